"""Parts of an experiment that are a user's own: the examples, each used by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from peer.simulate import BadExperiment, Result, Swarm, run
from peer.simulate.settings import commented, parse

EXAMPLES = Path(__file__).parents[3] / "examples"
LINES_MAX = 20
SMALL = {"peers.count": 5, "problem.size": 2, "outer.fragments": 1, "end.cycles": 4.0}


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def ran(**settings: object) -> Result:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return run(Swarm().with_settings({**SMALL, **named}))


@pytest.mark.parametrize(
    "own",
    [
        {"outer__merge": "own_merge_rule:Middle", "outer__codec": "f32"},
        {"outer__codec_up": "own_codec:Ternary", "outer__feedback": "on"},
        {"outer__optimizer": "own_outer:HeavyBall"},
        {"outer__optimizer": "own_outer:HeavyBall", "outer__momentum": 0.0},
    ],
    ids=str,
)
def test_a_rule_of_ones_own_trains_otherwise_than_ours(own: dict[str, object]) -> None:
    ours, result = ran(outer__codec="f32"), ran(**own)
    assert result.trace != ours.trace
    assert result.final.loss < 0.5 * result.points[0].loss
    assert {record.contributors for record in result.rounds} == {5}
    assert ran(**own).trace == result.trace
    assert ran(outer__codec="f32").trace == ours.trace, "it is still there in another simulation"


def test_five_values_of_the_own_codec_take_a_byte() -> None:
    """Merged values come back in 8 bits in both."""
    own = ran(outer__codec_up="own_codec:Ternary", outer__codec="int8", problem__size=128)
    ours = ran(outer__codec="int8", problem__size=128)
    assert own.bytes_sent < 0.7 * ours.bytes_sent


def test_an_own_problem_is_learned() -> None:
    result = run(Swarm().with_settings({"problem.name": "own_problem:Logistic", "end.cycles": 4.0}))
    assert result.final.loss < 0.5 * result.points[0].loss


@pytest.mark.parametrize("name", ["own_merge_rule", "own_codec", "own_outer", "own_problem"])
def test_each_of_them_is_short(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            lines = {n.lineno for n in ast.walk(node) if isinstance(n, ast.stmt | ast.expr)}
            assert len(lines) <= LINES_MAX, node.name


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("adam", "it is nesterov, or module:name"),
        ("nowhere:Adam", "outer.optimizer: 'nowhere:Adam'"),
    ],
)
def test_an_optimizer_that_is_not_there_is_refused(value: str, says: str) -> None:
    with pytest.raises(BadExperiment) as refused:
        run(Swarm().with_settings({"outer.optimizer": value}))
    assert says in str(refused.value)


def test_a_new_file_has_every_setting_at_its_default() -> None:
    assert parse(commented()) == Swarm()

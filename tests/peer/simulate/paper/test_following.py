"""``shoal simulate compare --following``: settings of a line, and the table on a cheap problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import Level, Line
from peer.cli import run
from peer.simulate.paper import compare, following
from peer.simulate.paper.training import LevelChange

CHEAP = {"problem.name": "quadratic", "problem.size": 2}
SETTING = compare.Setting(parameters=124e6, step_s=0.08, learners=4, cycles=4)
LABELS = list(following.FOLLOWING)


def share(level: Level, mbit: float) -> float:
    line = Line(bytes_per_s=mbit * 125_000, step_s=0.08, fragments=1, members=4, share_max=1.0)
    return line.share_of(lambda codec: codec_named(codec).encoded_size([124_000_000]), level)


def test_a_fixed_setting_has_the_shortest_cycle_that_the_line_carries() -> None:
    first, *fitting = following.fixed_levels(SETTING, 0.08, link_mbit=50.0)
    assert first == following.FIRST
    assert [(one.codec, one.codec_down) for one in fitting] == list(following.FIXED_CODECS)
    for one in fitting:
        shorter = replace(one, cycle_steps=one.cycle_steps - 1)
        assert share(one, 50.0) <= following.FIXED_SHARE < share(shorter, 50.0)


def test_a_line_that_carries_the_first_setting_has_it_once_and_no_longer_cycles() -> None:
    levels = following.fixed_levels(SETTING, 0.08, link_mbit=1000.0)
    assert levels[0] == following.FIRST
    assert [one.cycle_steps for one in levels] == [following.FIRST.cycle_steps] * 3


def test_all_rows_make_equally_many_steps() -> None:
    for settings in ({}, {"outer.steps_per_cycle": 120}, *following.FOLLOWING.values()):
        experiment = following.experiment_of(
            SETTING, settings, step_s=0.08, link_mbit=50.0, latency_s=0.02, changes=CHEAP
        )
        steps = experiment.end.cycles * experiment.outer.steps_per_cycle
        assert steps == SETTING.cycles * following.FIRST.cycle_steps
        assert experiment.network.lines == ((50.0, 50.0),)


@pytest.mark.slow  # averaging/live/test_line_levels.py does so with peers
def test_a_fast_line_changes_nothing_and_a_slow_one_is_followed_once_for_a_reason() -> None:
    rows = following.table(SETTING, seeds=(0,), links_mbit=(1000.0, 200.0), changes=CHEAP)
    by_name = {(row.link_mbit, row.label): row for row in rows}
    fast, slow = by_name[1000.0, LABELS[0]], by_name[200.0, LABELS[0]]
    assert (fast.last, fast.changes, fast.reason) == (str(following.FIRST), 0, "")
    assert fast.loss == by_name[1000.0, str(following.FIRST)].loss
    assert slow.last != str(following.FIRST)
    assert slow.changes == 1
    assert f"{slow.last} takes" in slow.reason
    assert slow.settled_s > 0
    assert min(row.behind.value for row in rows if not row.follows) == 0
    assert all(row.computing == pytest.approx(1.0, abs=0.02) for row in rows)


def test_a_level_that_goes_back_and_forth_is_counted() -> None:
    def taken(peer: str, level: str, reason: str = "") -> LevelChange:
        return LevelChange(0.0, peer, 0, level, reason)

    once = [taken("a", "int2"), taken("b", "int2"), taken("a", "int2", "the line is slow")]
    assert following.most_changes([]) == 0
    assert following.most_changes(once) == 1
    assert following.most_changes([*once, taken("a", "int4"), taken("a", "int2")]) == 3


def test_the_command_prints_the_rows_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "compare", "--following", "--params", "124e6", "--step", "0.08s"]
    arguments += ["--learners", "4", "--link", "1Gbit", "--cycles", "2", "--workers", "1"]
    arguments += ["--set", "problem.name=quadratic", "--set", "problem.size=2", "--json"]
    assert run([*arguments, "--latency", "20"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["label"] for row in rows if row["follows"]] == LABELS
    assert run([*arguments, "--latency", "20,100"]) == 2
    assert "--following takes one --latency" in capsys.readouterr().err

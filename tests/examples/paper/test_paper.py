"""The experiments of ``examples/paper``: what each computes, on a cheap problem where it trains."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.paper.bandwidth import run as bandwidth
from examples.paper.compare import run as compare
from examples.paper.goodput import run as goodput
from examples.paper.heterogeneous import run as heterogeneous
from examples.paper.methods import run as methods
from examples.paper.methods.members import Contribution, Late
from examples.paper.paired import LevelChange
from examples.paper.program import command_of
from examples.paper.quality import run as quality
from peer.simulate.names import problem_of
from peer.simulate.problems.problem import Quadratic
from peer.simulate.problems.text_gpt import TextGpt

PAPER = Path(__file__).parents[3] / "examples" / "paper"
FOLDERS = sorted(path.name for path in PAPER.iterdir() if path.is_dir() and path.name[0] != "_")
CHEAP = {"problem.name": "quadratic"}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_one_page_a_result_and_a_plot(name: str) -> None:
    page = (PAPER / name / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == ["Question", "Reported", "Found"]
    assert len(page.splitlines()) <= 60
    assert "![" in page
    found = json.loads((PAPER / name / "result.json").read_text(encoding="utf-8"))
    assert found["rows"] and f"examples.paper.{name}.run" in found["command"]
    assert (PAPER / name / "plot.png").read_bytes().startswith(b"\x89PNG")


# Goodput


def job(*, slices: int = 100, rate: float = 1e-4, stop_s: float = 0.0) -> goodput.Job:
    return goodput.Job(
        slices=slices,
        failures_per_slice_s=rate,
        away=goodput.ReturnDelay(scale_s=10.0, shape=1.0, power=1.0),
        stop_s=stop_s,
        return_s=0.0,
        return_every_s=0.0,
    )


@pytest.mark.parametrize(
    ("simulated", "expected"),
    [
        (job(), 10_000 / 10_010),  # a slice works for 1/rate and is away for 10 s
        (job(stop_s=20.0), 1 / 1.2 * 10_000 / 10_010),  # 0.01 failures a second, 20 s each
        (job(slices=1, rate=1 / 100), 100 / 110),
    ],
)
def test_failures_cost_what_is_known_in_closed_form(
    simulated: goodput.Job, expected: float
) -> None:
    line = goodput.run_job(simulated, horizon_s=2e6, rng=np.random.default_rng(0))
    assert line.goodput == pytest.approx(expected, abs=0.01)
    assert np.all(line.idle[1:, 0] >= line.idle[:-1, 1]), "pauses do not overlap"


@pytest.mark.slow  # figures; the model is held by the closed forms above
def test_the_reported_goodput_comes_out() -> None:
    cells = goodput.table(goodput.ClusterModel(), seeds=(0,))
    decoupled = [cell for cell in cells if cell.system == "decoupled"]
    assert len(decoupled) == 20
    assert goodput.rms_difference(decoupled) < 2
    at = {(c.system, c.learners): c.goodput for c in cells if c.chips == 1_200_000}
    assert at["decoupled", 8] == pytest.approx(88, abs=2)
    assert at["rigid", 1] == pytest.approx(27, abs=2)
    assert "nan" not in str(goodput.section(cells).rows), "one seed has no error to show"


def test_a_swarm_loses_only_the_machine_that_failed() -> None:
    rigid, elastic, decoupled = goodput.swarm(learners=12, mtbf_s=32_400, rejoin_s=240, seed=0)
    assert decoupled.goodput == pytest.approx(100 * 32_400 / 32_640, abs=0.1)
    assert rigid.goodput < elastic.goodput < decoupled.goodput


@pytest.mark.slow
def test_the_pauses_of_the_model_are_those_that_fit_the_reported_elastic_cells() -> None:
    """On a grid: pause after a failure, pause to readmit, time between these."""
    grid = product((10.0, 12.0, 14.0, 16.0, 18.0), (10.0, 15.0, 20.0), (60.0, 120.0, 180.0))
    shipped, found = goodput.ClusterModel(), {}
    for stop_s, return_s, every_s in grid:
        trial = replace(
            shipped,
            elastic_stop_s=stop_s,
            elastic_return_s=return_s,
            elastic_return_every_s=every_s,
        )
        cells = goodput.table(
            trial, seeds=(0, 1, 2), rows=(("elastic", 1),), failures_per_cell=3_000
        )
        found[goodput.rms_difference(cells)] = trial
    assert found[min(found)] == shipped
    target = goodput.REPORTED["rigid", 1][goodput.CHIPS.index(1_200_000)] / 100
    per_s = shipped.failures_per_chip_year * 1_200_000 / goodput.YEAR_S
    assert (1 / target - 1) / per_s == pytest.approx(shipped.rigid_stop_s, abs=0.5)


# Bandwidth


def test_the_reported_fall_from_198_to_0_84_comes_out() -> None:
    setting = bandwidth.Setting()
    assert bandwidth.gbit_s("data parallel", setting) == pytest.approx(198, rel=0.02)
    assert bandwidth.gbit_s("decoupled", setting) == pytest.approx(0.84, rel=0.01)
    for method in bandwidth.METHODS:
        need = bandwidth.gbit_s(method, setting)
        assert bandwidth.largest_model(method, setting, link_gbit_s=need) == pytest.approx(5e9)


def test_a_codec_for_each_way_needs_the_mean_of_both_and_a_syncer_the_larger_one() -> None:
    def need(method: bandwidth.Method, codec: str) -> float:
        return bandwidth.gbit_s(method, bandwidth.Setting(codec=codec))

    assert need("shoal", "int2/int4") == pytest.approx(
        (need("shoal", "int2") + need("shoal", "int4")) / 2
    )
    assert need("decoupled", "int2/int4") == need("decoupled", "int4")


def test_what_makes_a_link_enough_is_told_and_true() -> None:
    setting = bandwidth.Setting(parameters=1.2e9)
    told = bandwidth.what_helps(setting, link_gbit_s=0.02)
    assert told == (
        "-H 424 steps per cycle, or steps of 17.6 s with -H 24; int2/int4 in place of int4 needs "
        "75% of either; int2 in place of int4 needs 50% of either"
    )
    assert bandwidth.gbit_s("shoal", replace(setting, steps_per_cycle=424)) <= 0.02
    assert bandwidth.gbit_s("shoal", replace(setting, steps_per_cycle=423)) > 0.02


# Heterogeneous


def test_each_mix_of_speeds_meets_each_rule_and_has_reported_figures_once() -> None:
    cells = heterogeneous.cells()
    assert len({cell.name for cell in cells}) == len(heterogeneous.PARTS) * len(heterogeneous.RULES)
    experiments = [heterogeneous.experiment_of(cell, cycles=3) for cell in cells]
    assert {experiment.end.counts for experiment in experiments} == {"processed"}
    assert [bool(experiment.event) for experiment in experiments] == [False] * 12 + [True] * 6


# Quality


def test_every_cell_is_compared_with_one_that_is_there() -> None:
    cells = [
        *quality.cells(learners=(2, 4, 8, 16)),
        *quality.liar_cells(),
        *quality.muon_cells(),
        *quality.large_cells(),
    ]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    for cell in cells:
        assert cell.against is None or f"{cell.part}/{cell.against}" in names
        quality.experiment_of(cell, cycles=2)  # all of its settings are there
    [*_, large] = quality.large_cells()
    problem = problem_of(quality.experiment_of(large, cycles=2, changes={"problem.device": "cpu"}))
    assert 10e6 < sum(spec.size for spec in problem.specs) < 12e6


@pytest.mark.slow  # it trains all codecs
def test_a_factor_is_selected_by_the_beginning_of_its_name() -> None:
    rows = quality.table(seeds=(0,), cycles=3, only="codec", changes={**CHEAP, "problem.size": 96})
    by_label = {row.cell.label: row for row in rows}
    assert list(by_label) == [name for name, _ in quality.CODECS]
    assert (by_label["int4"].cell.bound, by_label[quality.PAIR].cell.bound) == (0.005, 0.003)
    sent = [quality.record(by_label[name])["sent_mb"] for name in ("int2", quality.PAIR, "int4")]
    assert sent == sorted(sent)
    with pytest.raises(ValueError, match="no factor begins with 'colour'; there are: method"):
        quality.table(seeds=(0,), cycles=4, only="colour", changes=CHEAP)


# Compare


SETTING = compare.Setting(parameters=1e9, step_s=1.0, learners=8, cycles=8)
LINE = compare.Setting(parameters=124e6, step_s=0.08, learners=4, cycles=4)


def test_a_ring_sends_everything_nearly_twice_behind_two_thirds_of_a_step() -> None:
    spent = compare.all_reduce_s(SETTING, link_mbit=1000.0, latency_s=0.0)
    assert spent == pytest.approx(2 * 7 / 8 * 16)
    later = compare.all_reduce_s(SETTING, link_mbit=1000.0, latency_s=0.1)
    assert later - spent == pytest.approx(1.4)
    slow = compare.data_parallel_step_s(SETTING, 1.0, link_mbit=1000.0, latency_s=0.0)
    assert slow == pytest.approx(1.0 + 28.0 - 2 / 3)


def test_merged_data_travels_at_the_size_of_the_large_model() -> None:
    experiment = compare.experiment_of(
        SETTING, step_s=1.0, link_mbit=1000.0, latency_s=0.02, changes=CHEAP
    )
    size = sum(spec.size for spec in Quadratic().specs)
    assert experiment.weather.bulk_factor == pytest.approx(1e9 / size)


def test_a_fixed_setting_has_the_shortest_cycle_that_the_line_carries() -> None:
    first, *fitting = compare.fixed_levels(LINE, 0.08, link_mbit=50.0)
    assert first == compare.FIRST
    assert [(one.codec, one.codec_down) for one in fitting] == list(compare.FIXED_CODECS)
    pair, both = fitting[1:]
    assert both.cycle_steps == pytest.approx(pair.cycle_steps * 2 / 3, rel=0.01)
    fast = compare.fixed_levels(LINE, 0.08, link_mbit=1000.0)
    assert [one.cycle_steps for one in fast] == [compare.FIRST.cycle_steps] * 3


def test_a_level_that_goes_back_and_forth_is_counted() -> None:
    def taken(peer: str, level: str, reason: str = "") -> LevelChange:
        return LevelChange(0.0, peer, 0, level, reason)

    once = [taken("a", "int2"), taken("b", "int2"), taken("a", "int2", "the line is slow")]
    assert compare.most_changes([]) == 0
    assert compare.most_changes(once) == 1
    assert compare.most_changes([*once, taken("a", "int4"), taken("a", "int2")]) == 3


@pytest.mark.slow  # figures of docs/research
def test_a_slow_link_costs_data_parallel_time_and_shoal_hardly_any() -> None:
    slow, fast = compare.table(
        replace(SETTING, loss=0.1),
        seeds=(0,),
        links_mbit=(2000.0, 100_000.0),
        latencies_s=(0.02,),
        changes=CHEAP,
    )
    assert slow.data_parallel_s > 8 * fast.data_parallel_s
    assert slow.shoal_s is not None and fast.shoal_s is not None
    assert slow.shoal_s.value < 2 * fast.shoal_s.value
    with pytest.raises(ValueError, match="ask for a higher loss or for more cycles"):
        compare.table(
            replace(SETTING, loss=1e-6, cycles=2),
            seeds=(0,),
            links_mbit=(1000.0,),
            latencies_s=(0.02,),
            changes=CHEAP,
        )


# Commands


def called(program: Any, *arguments: str) -> None:
    command_of(program.main)(args=list(arguments), standalone_mode=False)


def test_programs_print_rows_for_scripts_and_write_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(bandwidth.__file__)])
    called(bandwidth, "--json", "--out", str(tmp_path))
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == 105 and "bandwidth.run" in printed["command"]
    assert (tmp_path / "bandwidth.csv").read_text().count("\n") == 106
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "bandwidth.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page and "http" not in page


def test_quick_shortens_only_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaced what was given without a word."""
    asked: list[Any] = []

    def table(*, seeds: Any, learners: Any, cycles: float, **_: Any) -> None:
        asked.append((seeds, learners, cycles))
        raise RuntimeError("enough")

    monkeypatch.setattr(quality, "table", table)
    for given in ((), ("--seeds", "2"), ("--learners", "8", "--cycles", "7")):
        with pytest.raises(RuntimeError, match="enough"):
            called(quality, "--quick", *given)
    assert asked == [((0,), (2, 4), 15), ((0, 1), (2, 4), 15), ((0,), (8,), 7)]


# Methods


def test_an_idea_has_a_control_and_a_prediction_from_before_it_was_trained() -> None:
    names = {cell.full_name for cell in methods.CELLS}
    assert len(names) == len(methods.CELLS)
    for cell in methods.CELLS:
        methods.trial_for(cell, 0)  # all of its settings are there
        assert cell.trained in names
        assert bool(cell.control) == bool(cell.prediction), cell.full_name
        assert not cell.control or f"{cell.idea}/{cell.control}" in names


def test_a_cell_is_trained_beside_its_control_and_kept(tmp_path: Path) -> None:
    control, cell = (
        methods.Cell("30% fail", name, {"steps": 4, "cycle": 4, "members": 2, **changes}, against)
        for name, changes, against in (
            ("mean of its cycles", {}, ""),
            ("whole", {"rate": 1e-3}, "mean of its cycles"),
        )
    )
    tiny = TextGpt(layers=1, width=16, length=8, batch=1, optimizer="muon")
    made = [
        methods.trained([control, cell], seeds=(0, 1), size=tiny, kept=tmp_path, compiled=False)
        for _ in range(2)
    ]
    assert made[0] == made[1], "the second time nothing is trained"
    rows = methods.table([control, cell], made[0], seeds=(0, 1))
    assert [row.change is not None for row in rows] == [False, True]
    losses = [made[0][f"30% fail/{name}", 1].loss for name in ("mean of its cycles", "whole")]
    assert losses[0] < losses[1]


def test_weights_of_members_of_different_speed() -> None:
    claims = [Contribution(1000, 10), *[Contribution(100, 1)] * 5]
    assert methods.at_most(1 / 4)(claims, ()) == pytest.approx([1 / 4, *[3 / 20] * 5])
    weights = methods.as_long_as_the_fastest(methods.by_tokens)(claims, ())
    assert sum(w * claim.steps for w, claim in zip(weights, claims, strict=True)) == pytest.approx(
        10
    )


@pytest.mark.parametrize(
    ("rule", "moved", "kept"),
    [
        (methods.whole, [2.0, 2.0], [2.0, 2.0]),
        (methods.by_angle, [2.0, 2.0], [1.0, 2.0]),
        (methods.by_angle, [-2.0, 2.0], [0.0, 2.0]),
        (methods.by_angle_shorter, [2.0, 2.0], [1.0, 1.0]),
        (methods.by_angle_shorter, [-2.0, 2.0], [0.0, 1.0]),
        (methods.by_root, [2.0, 2.0], [2.0 / 2**0.5] * 2),
    ],
)
def test_rules_for_late_work(rule: Any, moved: list[float], kept: list[float]) -> None:
    """Work that is one version late, while theta went along the first axis."""
    late = Late(np.float32(moved), 1, np.float32([4.0, 0.0]))  # type: ignore[arg-type]
    assert rule(late).tolist() == pytest.approx(kept)

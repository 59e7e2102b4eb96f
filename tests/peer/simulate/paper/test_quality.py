"""``shoal simulate quality``: the table, on the cheap quadratic problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.cli import run
from peer.results import Mean
from peer.simulate.paper import quality
from peer.simulate.swarm.resolving import problem_of
from peer.simulate.swarm.swarm import run as simulate

CHEAP = {"problem.name": "quadratic"}
SMALL = {**CHEAP, "problem.size": 2, "outer.steps_per_cycle": 12, "outer.fragments": 2}


def test_every_cell_is_compared_with_one_that_is_there() -> None:
    cells = quality.cells(learners=(2, 4, 8, 16))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    for cell in cells:
        assert cell.against is None or f"{cell.factor}/{cell.against}" in names


def test_each_cell_differs_from_the_base_in_its_factor_alone() -> None:
    base = quality.experiment_of(quality.Cell("", ""), cycles=3)
    for cell in quality.cells(learners=(4,)):
        assert cell.settings or cell.label in ("mean",), cell.name
        assert quality.experiment_of(cell, cycles=3).end == base.end


def test_a_factor_is_selected_by_the_beginning_of_its_name() -> None:
    rows = quality.table(seeds=(0, 1), cycles=3, only="codec", changes=CHEAP)
    assert [row.label for row in rows] == [name for name, _ in quality.CODECS]
    assert rows[0].change is None
    by_label = {row.label: row for row in rows}
    assert (by_label["int4"].bound, by_label[quality.PAIR].bound) == (0.005, 0.003)
    assert all(abs(row.change.value) < 0.05 for row in rows[1:4] if row.change is not None)
    assert by_label["int2"].sent_mb < by_label[quality.PAIR].sent_mb < by_label["int4"].sent_mb
    with pytest.raises(ValueError, match="no factor begins with 'colour'; there are: method"):
        quality.table(seeds=(0,), cycles=4, only="colour", changes=CHEAP)


def test_rows_with_liars_come_only_on_request_and_bring_their_controls() -> None:
    assert not any(cell.factor.startswith("liars") for cell in quality.cells(learners=(4,)))
    rows = quality.table(seeds=(0,), cycles=2, only="liars: 30%, sign x 10", changes=SMALL)
    assert [row.label for row in rows][:2] == ["mean, none lies", "mean, liars' work missing"]
    assert [row.label for row in rows][2:] == list(quality.ROBUST)
    assert {row.against for row in rows} == {None, "mean, none lies"}
    mean, clip, centered = (row.change for row in rows[2:])
    assert mean is not None and clip is not None and centered is not None
    assert mean.value > 10 and max(clip.value, centered.value) < 5
    assert [row.bound for row in rows[2:]] == [quality.ROBUST_BOUND] * 3


def test_rows_with_muon_come_only_on_request_and_have_a_reference_with_the_same_optimizer() -> None:
    assert not any(cell.factor.startswith("muon") for cell in quality.cells(learners=(4,)))
    cells = [*quality.muon_cells(), *quality.large_cells()]
    by_name = {cell.name: cell for cell in cells}
    assert len(by_name) == len(cells)
    for cell in cells:
        experiment = quality.experiment_of(cell, cycles=2)
        assert (experiment.problem.name, experiment.outer.steps_per_cycle) == ("text_gpt", 30)
        if cell.bound is not None:
            against = quality.experiment_of(by_name[f"{cell.factor}/{cell.against}"], cycles=2)
            assert experiment.problem == against.problem
            assert experiment.problem.optimizer == "muon"
    for cell in quality.large_cells():
        on_cpu = {"problem.device": "cpu"}
        problem = problem_of(quality.experiment_of(cell, cycles=2, changes=on_cpu))
        assert 10e6 < sum(spec.size for spec in problem.specs) < 12e6


def test_all_rows_process_equally_many_tokens_including_the_last_round() -> None:
    [cell] = [cell for cell in quality.cells(learners=(4,)) if cell.label == "synchronous DiLoCo"]
    for settings in (cell.settings, quality.failing(4), {"outer.missed": "drop"}):
        one = quality.Cell("", "", settings)
        result = simulate(quality.experiment_of(one, cycles=3, changes=CHEAP), 0)
        assert result.fate.processed == pytest.approx(3 * 24 * 4 * 64, rel=0.15)
        if settings is cell.settings:
            assert [record.version for record in result.rounds] == [1, 2, 3]


def test_a_bound_counts_as_missed_only_beyond_two_standard_errors() -> None:
    assert quality.is_held(Mean(0.012, 0.004), 0.005) is True
    assert quality.is_held(Mean(0.012, 0.003), 0.005) is False
    assert quality.is_held(Mean(0.012, 0.0), None) is None
    assert quality.is_held(None, 0.005) is None


def test_the_command_prints_rows_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "quality", "--seeds", "1", "--cycles", "2", "--only", "codec"]
    arguments += ["--workers", "1", "--set", "problem.name=quadratic", "--out", str(tmp_path)]
    assert run([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in printed["rows"]] == [name for name, _ in quality.CODECS]
    assert (tmp_path / "quality.csv").read_text().count("\n") == 1 + len(quality.CODECS)
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in (tmp_path / "quality.html").read_text()


def test_an_unknown_setting_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "quality", "--set", "outer.momentom=0.5"]) == 2
    assert "outer.momentum" in capsys.readouterr().err

"""Paired trainings and the tables of their cells, on the cheap quadratic problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from examples.paper.paired import (
    Cell,
    Job,
    Row,
    Trained,
    TrainingFolder,
    against,
    by_name,
    central_steps,
    key_of,
    mean_curve,
    run_jobs,
    shown,
    train,
    train_all,
)
from peer.run_file.sections import RunFile
from peer.simulate.results import Mean
from peer.simulate.settings import Swarm
from peer.simulate.simulation import run as simulate

SMALL = Swarm().with_settings({"peers.count": 3, "end.cycles": 4.0})


def trained(name: str = "a", seed: int = 0, loss: float = 1.0, **changes: object) -> Trained:
    fields: dict[str, object] = {
        "name": name,
        "seed": seed,
        "loss": loss,
        "goodput": 1.0,
        "missed": 0.0,
        "staleness": 0.0,
        "duration_s": 2.0,
        "bytes_sent": 0,
        "times_s": (0.0, 1.0, 2.0),
        "tokens": (0.0, 100.0, 200.0),
        "losses": (3.0, 2.0, loss),
        **changes,
    }
    return Trained(**fields)  # type: ignore[arg-type]


def test_the_base_of_all_experiments_is_what_a_new_run_has() -> None:
    outer, new = Swarm().outer, RunFile().outer
    names = "steps_per_cycle overlap_steps learning_rate merge codec"
    for name in names.split():
        assert getattr(outer, name) == getattr(new, name), name
    rounds = Swarm().rounds
    for name in ("quorum", "grace", "group_size", "stale_max"):
        assert getattr(rounds, name) == getattr(RunFile().rounds, name), name


def test_the_reference_sees_as_many_tokens_as_the_swarm_merges() -> None:
    swarm, central = train(Job("a", SMALL, 0)), train(Job("b", SMALL, 0, central=True))
    assert central_steps(SMALL) == 96
    assert central.tokens[-1] == 96 * 3 * 64
    assert swarm.tokens[-1] == pytest.approx(central.tokens[-1], rel=0.15)
    assert swarm.tokens[-1] >= central.tokens[-1]


def test_peers_that_miss_rounds_are_counted_and_keep_their_work() -> None:
    settings = {"peers.count": 4, "end.cycles": 12.0}
    whole = Swarm().with_settings(settings)
    failing = whole.with_settings({"peers.misses": 0.4})
    there, missing = train(Job("a", whole, 0)), train(Job("b", failing, 0))
    assert there.missed < 0.02
    assert 0.1 < missing.missed < 0.45


def test_a_run_may_count_processed_tokens_instead_of_merged_ones() -> None:
    settings = {"peers.count": 4, "end.cycles": 8.0, "peers.misses": 0.4, "outer.missed": "drop"}
    experiment = Swarm().with_settings(settings)
    merged = simulate(experiment, 0)
    processed = simulate(experiment.with_settings({"end.counts": "processed"}), 0)
    wanted = 8 * 24 * 4 * 64
    assert wanted <= merged.final.merged_tokens < 1.1 * wanted
    assert wanted <= processed.final.processed_tokens < 1.1 * wanted
    assert processed.final.merged_tokens < 0.9 * wanted


def test_finished_trainings_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("a", SMALL, 0), Job("b", SMALL, 1)]
    first = run_jobs(jobs[:1], workers=1, kept=TrainingFolder(tmp_path))
    done: list[Job] = []

    def watched(job: Job, progress: Callable[[float], None]) -> Trained:
        done.append(job)
        return train(job, progress)

    monkeypatch.setattr("examples.paper.paired.train", watched)
    shares: list[float] = []
    both = run_jobs(jobs, workers=1, kept=TrainingFolder(tmp_path), progress=shares.append)
    assert done == jobs[1:]
    assert both == [first[0], train(jobs[1])]
    assert shares[0] >= 0.5
    assert run_jobs(jobs, workers=1, kept=TrainingFolder(tmp_path)) == both
    assert len(done) == 1


def test_a_damaged_file_is_trained_again(tmp_path: Path) -> None:
    job, kept = Job("a", SMALL, 0), TrainingFolder(tmp_path)
    [whole] = run_jobs([job], workers=1, kept=kept)
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert kept.find(key_of(job)) is None
    assert run_jobs([job], workers=1, kept=kept) == [whole]
    assert kept.find(key_of(job)) == whole


def test_equal_trainings_of_two_names_are_done_once(tmp_path: Path) -> None:
    jobs = [Job("a", SMALL, 0), Job("b", SMALL.with_settings({"name": "other"}), 0)]
    one, other = run_jobs(jobs, workers=1, kept=TrainingFolder(tmp_path))
    assert (one.name, other.name) == ("a", "b")
    assert one.losses == other.losses
    assert len(list(tmp_path.iterdir())) == 1
    others = (Job("a", SMALL, 1), Job("a", SMALL, 0, central=True))
    slower = Job("a", SMALL.with_settings({"peers.step_time_s": 2.0}), 0)
    assert len({key_of(job) for job in (*jobs, *others, slower)}) == 4


def test_the_time_to_a_loss_lies_between_two_looks() -> None:
    one = trained(loss=1.0)
    assert one.time_to(3.5) == 0.0
    assert one.time_to(2.5) == pytest.approx(0.5)
    assert one.time_to(1.0) == pytest.approx(2.0)
    assert one.time_to(0.9) is None


def test_losses_are_compared_seed_by_seed() -> None:
    base = [trained("a", seed, loss) for seed, loss in ((0, 1.0), (1, 2.0))]
    worse = [trained("b", seed, loss) for seed, loss in ((0, 1.1), (1, 2.2))]
    assert against(worse, base).value == pytest.approx(0.1)
    assert against(worse, base).error == pytest.approx(0.0, abs=1e-12)
    assert list(by_name(worse + base)) == ["b", "a"]


def test_a_mean_of_one_seed_has_no_error() -> None:
    assert Mean.of([2.0]) == Mean(2.0, 0.0)
    assert Mean.of([1.0, 3.0]) == Mean(2.0, pytest.approx(1.0))  # type: ignore[arg-type]
    assert Mean(0.0123, 0.001).percent() == "+1.2% ±0.1"
    assert Mean.of([0.0123]).percent() == "+1.2%"
    assert Mean.of([1.234]).text(2) == "1.23"
    assert Mean.of([1.0, 3.0]).text(2) == "2.00 ±1.00"


def test_a_mean_curve_goes_as_far_as_the_shortest_seed() -> None:
    short = trained(times_s=(0.0, 0.5, 1.0))
    xs, ys = mean_curve([trained(), short])
    assert (xs[0], xs[-1]) == (0.0, 1.0)
    assert ys[0] == pytest.approx(3.0)
    assert ys[-1] == pytest.approx(1.5)


def test_a_cell_is_compared_with_the_one_that_it_names_in_its_part() -> None:
    cells = [
        Cell("one", "base", {"peers.count": 3}),
        Cell("one", "slow", {"peers.count": 3, "outer.learning_rate": 0.1}, "base", 0.01),
        Cell("two", "base", {"peers.count": 2}),
    ]
    short = Swarm().with_settings({"problem.size": 1, "end.cycles": 3.0})
    rows = train_all(cells, lambda cell: short.with_settings(cell.settings), seeds=(0, 1))

    assert [len(row.trained) for row in rows] == [2, 2, 2]
    assert rows[0].change is None and rows[0].held is None
    assert rows[1].change == against(rows[1].trained, rows[0].trained)
    assert rows[1].held is False
    columns = {"": lambda row: row.cell.label, "loss": lambda row: row.loss.text(1)}
    table = shown("Heading", "Text.", rows, lambda row: row.cell.part, columns)
    assert [row[0] for row in table.rows] == ["one", "  base", "  slow", "two", "  base"]


def test_a_bound_counts_as_missed_only_beyond_two_standard_errors() -> None:
    def held(change: Mean | None, bound: float | None) -> bool | None:
        return Row(Cell("", "", bound=bound), (), Mean(1.0, 0.0), change).held

    assert held(Mean(0.012, 0.004), 0.005) is True
    assert held(Mean(0.012, 0.003), 0.005) is False
    assert held(Mean(0.012, 0.0), None) is None
    assert held(None, 0.005) is None

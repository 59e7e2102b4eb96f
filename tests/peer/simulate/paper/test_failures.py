"""The failure simulation against cases whose answer is known in closed form."""

import numpy as np
import pytest

from peer.simulate.paper.failures import Job, ReturnDelay, run_job, share_with_nobody_stepping

SHORT = ReturnDelay(scale_s=10.0, shape=1.0, power=1.0)  # exponential, mean 10 s


def job(
    *, slices: int = 100, rate: float = 1e-4, stop_s: float = 0.0, away: ReturnDelay = SHORT
) -> Job:
    return Job(
        slices=slices,
        failures_per_slice_s=rate,
        away=away,
        stop_s=stop_s,
        return_s=0.0,
        return_every_s=0.0,
    )


def goodput(job: Job, horizon_s: float, seed: int = 0) -> float:
    return run_job(job, horizon_s=horizon_s, rng=np.random.default_rng(seed)).goodput


def test_without_pauses_only_absent_slices_cost_anything() -> None:
    # On average a slice works for 1/rate and is away for 10 s.
    expected = 10_000 / (10_000 + 10)
    assert goodput(job(), 2e6) == pytest.approx(expected, abs=1e-4)


def test_pauses_that_never_overlap_cost_their_length_each() -> None:
    # Total failure rate 0.01/s, pause 20 s, failures in a pause free: 1 / (1 + 0.2).
    measured = goodput(job(stop_s=20.0), 2e6)
    assert measured == pytest.approx(1 / 1.2 * (10_000 / 10_010), abs=0.005)


def test_a_job_of_one_slice_alternates_between_working_and_being_away() -> None:
    alone = job(slices=1, rate=1 / 100, away=ReturnDelay(scale_s=50.0, shape=1.0, power=1.0))
    assert goodput(alone, 2e6) == pytest.approx(100 / 150, abs=0.01)


def test_goodput_never_leaves_zero_to_one_and_pauses_never_overlap() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        wild = Job(
            slices=int(rng.integers(1, 40)),
            failures_per_slice_s=float(rng.uniform(1e-4, 1e-1)),
            away=ReturnDelay(scale_s=float(rng.uniform(1, 500)), shape=0.8, power=1.5),
            stop_s=float(rng.uniform(0, 60)),
            return_s=float(rng.uniform(0, 60)),
            return_every_s=float(rng.uniform(0, 200)),
        )
        line = run_job(wild, horizon_s=5_000.0, rng=rng)
        assert 0.0 <= line.goodput <= 1.0, f"seed {seed}"
        assert np.all(line.idle[1:, 0] >= line.idle[:-1, 1]), f"seed {seed}"


def test_same_seed_same_timeline() -> None:
    first, second = (
        run_job(job(stop_s=20.0), horizon_s=1e5, rng=np.random.default_rng(7)) for _ in range(2)
    )
    assert first.goodput == second.goodput
    assert np.array_equal(first.idle, second.idle)


def test_no_job_trains_only_where_all_jobs_pause() -> None:
    rng = np.random.default_rng(3)
    lines = [run_job(job(stop_s=50.0), horizon_s=1e6, rng=r) for r in rng.spawn(3)]
    alone = [share_with_nobody_stepping([line]) for line in lines]
    # Independent jobs: the shares multiply.
    assert share_with_nobody_stepping(lines) == pytest.approx(np.prod(alone), rel=0.15)

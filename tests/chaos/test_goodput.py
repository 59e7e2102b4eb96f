"""The arithmetic of the goodput experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.chaos.goodput import GoodputSettings, figures_text, times_until_failure_s


@pytest.mark.parametrize(("learners", "best"), [(4, 0.597), (8, 0.748), (16, 0.856)])
def test_the_best_share_is_each_learners_own_share_of_the_time(
    tmp_path: Path, learners: int, best: float
) -> None:
    settings = GoodputSettings(directory=tmp_path, learners=learners)
    assert settings.best == pytest.approx(best, abs=0.001)
    # The same, from the training time between two failures of one learner.
    trains_s = settings.mean_until_failure_s
    assert settings.best == pytest.approx(trains_s / (trains_s + settings.recovery_s))
    together = GoodputSettings(directory=tmp_path, learners=learners, synchronous=True)
    assert together.best == pytest.approx(0.27, abs=0.001)


def trains_share(settings: GoodputSettings, seed: int, *, begin_s: float) -> float:
    """Share of the time after the lead-in that learners without waiting spend in training."""
    times = times_until_failure_s(settings, 20, np.random.default_rng(seed))
    end_s, trained_s = begin_s + settings.length_s, 0.0
    for row in times:
        up_s = 0.0
        for until_s in row:
            trained_s += max(0.0, min(up_s + until_s, end_s) - max(up_s, begin_s))
            up_s += until_s + settings.recovery_s
    return trained_s / settings.length_s / settings.learners


@pytest.mark.parametrize("learners", [4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_failures_over_whole_turns_leave_exactly_the_best_share(
    tmp_path: Path, learners: int, seed: int
) -> None:
    settings = GoodputSettings(directory=tmp_path, learners=learners, minutes=4, recovery_s=45)
    for begin_s in (settings.lead_in_s, settings.lead_in_s + 71.0):
        assert trains_share(settings, seed, begin_s=begin_s) == pytest.approx(settings.best)
    # During the lead-in all learners train, so there are too few failures.
    assert trains_share(settings, seed, begin_s=0.0) > settings.best


@pytest.mark.parametrize("seed", range(5))
def test_each_turn_of_a_synchronous_run_has_one_failure(tmp_path: Path, seed: int) -> None:
    settings = GoodputSettings(directory=tmp_path, synchronous=True, minutes=4, recovery_s=45)
    times = times_until_failure_s(settings, 20, np.random.default_rng(seed))
    moments = np.cumsum(times, axis=1).ravel()
    turns = round(settings.length_s / settings.turn_s)
    counts = np.histogram(moments, bins=turns, range=(0.0, settings.length_s))[0]
    assert turns >= 3 and set(counts) == {1}
    # All learners stop for each failure: training time, plus one recovery per failure.
    whole_s = settings.length_s + turns * settings.recovery_s
    assert settings.length_s / whole_s == pytest.approx(settings.best)


def test_a_recovery_shorter_than_a_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recovery_s is 5"):
        GoodputSettings(directory=tmp_path, recovery_s=5.0)


def test_figures_are_reported_beside_the_possible_ones() -> None:
    told = figures_text(
        {
            "kind": "shoal",
            "learners": 8,
            "minutes": 10.0,
            "goodput": 0.72,
            "best": 0.748,
            "of_best": 0.963,
            "failures": 24,
            "recovery_s": 60.2,
            "best_at_measured_load": 0.747,
            "cpu_share": 0.55,
        }
    )
    assert "72.0% of 74.8% at best (96.3% of it); 24 failures, 60.2 s each" in told
    assert "74.7% were possible" in told

"""The arithmetic of the goodput experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.chaos.goodput import GoodputSettings, figures_text, times_until_failure_s


@pytest.mark.parametrize(("learners", "best"), [(4, 0.597), (8, 0.748), (16, 0.856)])
def test_the_best_that_can_be_had_is_each_learners_own_share_of_the_time(
    tmp_path: Path, learners: int, best: float
) -> None:
    settings = GoodputSettings(directory=tmp_path, learners=learners)
    assert settings.best == pytest.approx(best, abs=0.001)
    # The same by the time that one learner trains between two failures of its own.
    trains_s = settings.mean_until_failure_s
    assert settings.best == pytest.approx(trains_s / (trains_s + settings.recovery_s))
    together = GoodputSettings(directory=tmp_path, learners=learners, synchronous=True)
    assert together.best == pytest.approx(0.27, abs=0.001)


def test_failures_come_at_the_rate_asked_for_from_the_first_minute_on() -> None:
    times = times_until_failure_s(30.0, 8, 100, np.random.default_rng(0))
    assert times.shape == (8, 100)
    moments = np.cumsum(times, axis=1)
    for until_s in (30.0, 60.0, 300.0, 2000.0):
        failures = int((moments <= until_s).sum())
        assert failures == pytest.approx(8 * until_s / 30.0, rel=0.1, abs=3), until_s
    assert times.std() > 5.0  # not all at once, and not one after the other


def test_a_recovery_shorter_than_a_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recovery_s is 5"):
        GoodputSettings(directory=tmp_path, recovery_s=5.0)


def test_the_figures_are_told_beside_what_was_possible() -> None:
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

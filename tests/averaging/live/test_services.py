"""What the fragments of an averager share: its clock and its timers."""

from __future__ import annotations

import random

import pytest

from averaging.live.services import rings_at


def test_a_timer_rings_when_the_clock_has_come_to_its_time_however_sums_are_rounded() -> None:
    """One that rang a rounding error early found nothing due and was set to the same moment: in
    virtual time for ever (storms 20254, and 66 of restarts)."""
    rng = random.Random(1)
    rounded_down = 0
    for number in range(10_000):
        ahead_s = (0.01, 50.0, 1e5)[number % 3]
        clock_s = rng.uniform(-ahead_s, ahead_s)
        at = rng.uniform(0.0, 300.0) + clock_s + rng.expovariate(1.0)
        when = rings_at(at, clock_s=clock_s)
        assert when + clock_s >= at
        assert when == pytest.approx(at - clock_s, abs=1e-9)
        rounded_down += (at - clock_s) + clock_s < at
    assert rounded_down > 100

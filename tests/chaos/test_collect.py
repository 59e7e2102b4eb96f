"""Evidence that is read from the folders of a swarm's peers."""

from __future__ import annotations

import pytest

from tests.chaos.collect import true_time_s

CLOCK = [(0.0, 0.0), (10.0, 7200.0), (50.0, -30.0)]


@pytest.mark.parametrize(
    ("told_s", "true_s"), [(5.0, 5.0), (7220.0, 20.0), (7249.0, 49.0), (30.0, 60.0), (70.0, 100.0)]
)
def test_times_of_a_wrong_clock_are_corrected(told_s: float, true_s: float) -> None:
    assert true_time_s(told_s, CLOCK, ended_s=200.0) == true_s


def test_times_of_a_right_clock_are_not_changed() -> None:
    assert true_time_s(123.0, [(0.0, 0.0)], ended_s=200.0) == 123.0

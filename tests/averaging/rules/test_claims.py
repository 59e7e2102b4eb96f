"""Claims of steps, on both sides of what fits into the time that others saw pass."""

from __future__ import annotations

import pytest

from averaging.rules.claims import SIGHT_S, SLACK, STEP_RATIO_MAX, overstated

DAY_S = 86_400.0


def refused(steps: float, seen_s: float, median_step_s: float = 1.0, slack: float = 1.0) -> bool:
    reason = overstated(int(steps), seen_s=seen_s, median_step_s=median_step_s, slack=slack)
    return reason is not None


def test_steps_fit_into_the_time_up_to_a_bound() -> None:
    most = STEP_RATIO_MAX * (SIGHT_S + 50.0) / 2.0

    assert not refused(most, 50.0, 2.0)
    assert refused(most + 1, 50.0, 2.0)
    assert not refused(SLACK * most, 50.0, 2.0, SLACK)
    assert refused(SLACK * most + 1, 50.0, 2.0, SLACK)


def test_nothing_is_said_while_no_step_time_is_known() -> None:
    assert not refused(10**15, 0.0, 0.0)


@pytest.mark.parametrize("seen_s", [0.0, 5.0, 600.0])
def test_the_fastest_device_among_the_slowest_is_believed_at_once(seen_s: float) -> None:
    """20 ms beside laptops that take ten seconds."""
    assert not refused((SIGHT_S + seen_s) / 0.02, seen_s, median_step_s=10.0)


def test_a_laptop_among_fast_devices_is_believed() -> None:
    assert not refused(100, 0.0, median_step_s=0.02)


def test_a_return_after_a_day_is_believed_by_those_who_saw_the_peer_before() -> None:
    assert not refused(DAY_S, DAY_S)


def test_a_return_after_a_day_is_believed_by_all_others_after_a_minute_and_a_half() -> None:
    assert refused(DAY_S, 60.0)
    assert not refused(DAY_S, 80.0)
    assert not refused(DAY_S, 1.0, slack=SLACK), "no member declines what its leader has taken"


def test_a_claim_that_would_end_a_run_is_refused_for_years() -> None:
    assert refused(10**12, 3 * 365 * DAY_S, median_step_s=1.0)

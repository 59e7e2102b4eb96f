"""Claims that no honest peer makes, on both sides of their bounds."""

from __future__ import annotations

import pytest

from averaging.messages import COUNT_MAX, Head, Link
from averaging.rules.plausible import (
    RATE_RATIO_MAX,
    SIGHT_S,
    SLACK,
    STEP_RATIO_MAX,
    VERSIONS_AHEAD_MAX,
    leap,
    overstated,
)
from averaging.rules.weights import CREDIT_RATIO_MAX, NEWCOMER_CREDIT_RATIO_MAX, credited


def head(version: int, tokens: int) -> Head:
    lineage = bytes([version % 256]) * 32
    return Head(version, lineage, (Link(version, lineage, tokens),))


@pytest.mark.parametrize(
    ("mine", "theirs", "is_plausible"),
    [
        (head(10, 1000), head(11, 1100), True),
        (head(10, 1000), head(10 + VERSIONS_AHEAD_MAX, 2000), True),
        (head(10, 1000), head(11 + VERSIONS_AHEAD_MAX, 2000), False),
        (head(10, 1000), head(COUNT_MAX, 2000), False),
        (head(10, 1000), head(20, 1000 + RATE_RATIO_MAX * 100 * 20), True),
        (head(10, 1000), head(20, 1001 + RATE_RATIO_MAX * 100 * 20), False),
        (head(1000, 1000), head(900, 900 * 64), True),
        (head(0, 0), head(COUNT_MAX, 0), False),
        (head(0, 0), head(10**6, 10**12), True),
        (None, head(10**6, 10**12), True),
        (None, head(COUNT_MAX, COUNT_MAX), False),
    ],
)
def test_a_head_is_plausible_up_to_a_bound(
    mine: Head | None, theirs: Head, is_plausible: bool
) -> None:
    assert (leap(mine, theirs) is None) == is_plausible


def test_the_tokens_that_count_are_bounded_by_the_median_of_a_round() -> None:
    honest = [(800, 8)] * 3

    claims = [*honest, (10**12, 10**10)]

    assert credited(claims, batch_tokens_max=10**6)[3] == CREDIT_RATIO_MAX * 800
    counted = credited(claims, batch_tokens_max=10**6, on_probation=[3])
    assert counted == (800, 800, 800, NEWCOMER_CREDIT_RATIO_MAX * 800)
    assert credited([(100, 1), (6400, 64)], batch_tokens_max=100) == (100, 6400)
    assert credited([(10**6, 2)], batch_tokens_max=100) == (200,)


def test_all_tokens_of_a_rack_beside_laptops_count() -> None:
    laptops = [(100 * 2048, 100)] * 5
    rack = (100 * 300 * 2048, 100)

    counted = credited([*laptops, rack], batch_tokens_max=1 << 30)

    assert counted == tuple(tokens for tokens, _ in [*laptops, rack])


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

"""Claims that no honest peer makes, on both sides of their bounds."""

from __future__ import annotations

import pytest

from averaging.messages import COUNT_MAX, Head, Link
from averaging.rules.plausible import RATE_RATIO_MAX, VERSIONS_AHEAD_MAX, leap
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

"""Claims that no honest peer makes, on both sides of their bounds."""

from __future__ import annotations

import pytest

from averaging.history.merged_map import Mark, MergedMap
from averaging.messages import COUNT_MAX, Head, Link
from averaging.rules.plausible import RATE_RATIO_MAX, VERSIONS_AHEAD_MAX, capped, invented, leap
from averaging.rules.weights import CREDIT_RATIO_MAX, credited
from tests.averaging.message_examples import ANNA, BORIS, COMMIT


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


def test_a_merged_map_has_no_more_tokens_than_the_state_that_it_came_with() -> None:
    stood_on = COMMIT.parents[0].tokens

    assert invented(MergedMap({ANNA: Mark(1, 1, 2 * stood_on)}), COMMIT, 0) is None
    assert invented(MergedMap({ANNA: Mark(1, 1, 2 * stood_on + 1)}), COMMIT, 0) is not None


def test_nobody_has_merged_more_of_a_member_than_it_offers() -> None:
    anna, boris = COMMIT.members
    honest = {
        ANNA: Mark(anna.incarnation, anna.mark, 7),
        BORIS: Mark(boris.incarnation - 1, 10**9, 8),
    }
    assert capped(MergedMap(honest), COMMIT) == MergedMap(honest)

    poisoned = MergedMap({**honest, ANNA: Mark(COUNT_MAX, COUNT_MAX, 7)})

    assert capped(poisoned, COMMIT) == MergedMap(honest), "its owner is here and knows"
    assert invented(poisoned, COMMIT, None) is not None, "a reducer has put it right"
    assert invented(MergedMap(honest), COMMIT, None) is None


def test_the_tokens_that_count_are_bounded_by_the_median_of_a_round() -> None:
    honest = [(800, 8)] * 3

    counted = credited([*honest, (10**12, 10**10)], batch_tokens_max=10**6)

    assert counted == (800, 800, 800, CREDIT_RATIO_MAX * 800)
    assert credited([(100, 1), (6400, 64)], batch_tokens_max=100) == (100, 6400)
    assert credited([(10**6, 2)], batch_tokens_max=100) == (200,)

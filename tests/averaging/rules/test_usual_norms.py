"""The distance by which the last merges moved a fragment, which is the measure of the next
upload."""

from __future__ import annotations

import numpy as np

from averaging.rules.usual_norms import MERGES_KEPT, UsualNorms

FIRST, BOTH = slice(0, 1), slice(0, 2)


def test_nothing_is_usual_before_the_third_merge() -> None:
    usual = UsualNorms()
    usual.merged(np.array([1.0]))
    usual.merged(np.array([1.0]))
    assert usual.norm(FIRST) is None
    usual.merged(np.array([1.0]))
    assert usual.norm(FIRST) == 1.0


def test_the_median_merge_counts() -> None:
    usual = UsualNorms()
    for squares in (1.0, 10_000.0, 9.0):
        usual.merged(np.array([squares, 16.0]))
    assert usual.norm(FIRST) == 3.0
    assert usual.norm(BOTH) == 5.0
    usual.merged(np.array([23.0, 0.0]))
    assert usual.norm(FIRST) == 4.0


def test_merges_of_long_ago_are_forgotten() -> None:
    usual = UsualNorms()
    for _ in range(MERGES_KEPT):
        usual.merged(np.array([1.0]))
    for _ in range(MERGES_KEPT // 2 + 1):
        usual.merged(np.array([4.0]))
    assert usual.norm(FIRST) == 2.0

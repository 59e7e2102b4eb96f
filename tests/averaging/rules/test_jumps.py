"""The steps that are unusual."""

from __future__ import annotations

import math

import pytest

from averaging.rules.usual_norms import UNUSUAL_RATIO, is_unusual


@pytest.mark.parametrize(
    ("moved", "steps", "unusual"),
    [
        (2 * UNUSUAL_RATIO, 1, False),
        (2 * UNUSUAL_RATIO + 1e-6, 1, True),
        (6 * UNUSUAL_RATIO, 3, False),
        (6 * UNUSUAL_RATIO + 1e-6, 3, True),
        (math.nan, 1, True),
        (math.inf, 100, True),
    ],
)
def test_a_step_is_unusual_beyond_a_multiple_of_the_usual_one(
    moved: float, steps: int, unusual: bool
) -> None:
    assert is_unusual(moved, usual=2.0, steps=steps) is unusual


def test_nothing_is_unusual_before_it_is_known_what_is_usual() -> None:
    assert not is_unusual(1e30, usual=None)

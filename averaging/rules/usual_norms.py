"""What is usual for a fragment: how far its last merges moved each unit.

A reducer judges how long an upload is (``averaging.round.reducer``) by the others' and by this.
Each peer remembers for itself, and nobody has to agree: a seal says who was taken.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from averaging.numbers.arrays import Float64s

MERGES_KEPT = 9
"""So many are remembered; their median counts, so that a few odd ones do not."""

MERGES_MIN = 3
"""After fewer nobody knows what is usual."""


class UsualNorms:
    """The memory of one fragment at one peer."""

    __slots__ = ("_squares",)

    def __init__(self) -> None:
        self._squares: deque[Float64s] = deque(maxlen=MERGES_KEPT)

    def __repr__(self) -> str:
        return f"UsualNorms({len(self._squares)} merges)"

    def merged(self, squares: Float64s) -> None:
        """A round has moved each unit by so much: the sum of squares of what was merged."""
        self._squares.append(squares)

    def norm(self, units: slice) -> float | None:
        """How far a merge moves these units as a rule; ``None`` when that is not known yet."""
        if len(self._squares) < MERGES_MIN:
            return None
        return math.sqrt(float(median(squares[units].sum() for squares in self._squares)))

"""The usual norms of a fragment's updates: how far its last merges moved each unit.

A reducer refuses an upload that is fifty times longer than usual (``rounds.norm_max_ratio``;
``averaging.round.reducer``). The usual norm is the median of the round's other uploads, or that of
the last nine merges of these units, whichever is more. Each peer remembers for itself; nobody has
to agree on a verdict, because the seal says which uploads were merged.

The bound was a thousand times the reducer's own displacement once. Then a peer further along a
warm-up from zero was refused at 346 times, and half of a poison of a thousandfold passed, because
its sender had done little. Until three merges are known nothing is usual, and an upload no longer
than theta is taken: honest peers differ by any factor then, and none moves theta by its own length.
Norms are bounds read from the codecs' scales (``averaging.numbers.norm_bounds``), so judging costs
next to nothing. Steps are not divided out: they are the sender's word, and would buy a liar as much
length as it claims.

With four speeds, newcomers, pairs and warm-ups, honest uploads were at most 4.6 times as long as
usual (and 11 times as long as another one). Of a peer that sent 10 and 30 times its displacement
everything was merged, of 100 times 2 of 49 rounds, of 1000 times none of 48
(``tests/averaging/simulated/norm_experiment.py`` of commit 7c8660cd). For uploads below the bound
there is ``outer.merge = "clip"``.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from averaging.numbers.arrays import Float64s

MERGES_KEPT = 9
"""Merges remembered; their median counts, so that a few unusual ones do not matter."""

MERGES_MIN = 3
"""Merges that must be known before anything is usual."""


class UsualNorms:
    """The memory of one fragment at one peer."""

    __slots__ = ("_squares",)

    def __init__(self) -> None:
        self._squares: deque[Float64s] = deque(maxlen=MERGES_KEPT)

    def __repr__(self) -> str:
        return f"UsualNorms({len(self._squares)} merges)"

    def merged(self, squares: Float64s) -> None:
        """Record that a round has moved each unit by this sum of squares."""
        self._squares.append(squares)

    def norm(self, units: slice) -> float | None:
        """Return how far a merge usually moves these units; ``None`` if it is not known yet."""
        if len(self._squares) < MERGES_MIN:
            return None
        return math.sqrt(float(median(squares[units].sum() for squares in self._squares)))

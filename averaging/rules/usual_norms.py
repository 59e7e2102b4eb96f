"""The usual norms of a fragment's updates: how far its last merges moved each unit.

A reducer refuses an upload that is fifty times longer than usual (``rounds.norm_max_ratio``;
``averaging.round.slices``). The usual norm is the median of the round's other uploads, or that of
the last nine merges of these units, whichever is more. Each peer remembers for itself; nobody has
to agree on a verdict, because the seal says which uploads were merged.

The bound was a thousand times the reducer's own displacement once. Then a peer further along a
warm-up from zero was refused at 346 times, and half of a poison of a thousandfold passed, because
its sender had done little. Until three merges are known nothing is usual, and an upload no longer
than theta is taken: honest peers differ by any factor then, and none moves theta by its own length.
Norms are bounds read from the codecs' scales (``averaging.numbers.arithmetic``), so judging costs
next to nothing. Steps are not divided out: they are the sender's word, and would buy a liar as much
length as it claims.

With four speeds, newcomers, pairs and warm-ups, honest uploads were at most 4.6 times as long as
usual (and 11 times as long as another one). Of a peer that sent 10 and 30 times its displacement
everything was merged, of 100 times 2 of 49 rounds, of 1000 times none of 48
(``tests/averaging/simulated/norm_experiment.py`` of commit 7c8660cd). For uploads below the bound
there is ``outer.merge = "centered_clip"``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
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

    def merged(self, squares: Float64s) -> None:
        """Record that a round has moved each unit by this sum of squares."""
        self._squares.append(squares)

    def norm(self, units: slice) -> float | None:
        """Return how far a merge usually moves these units; ``None`` if it is not known yet."""
        if len(self._squares) < MERGES_MIN:
            return None
        return math.sqrt(float(median(squares[units].sum() for squares in self._squares)))


NORM_MIN = 1e-20
"""A usual norm below this is taken for zero: any upload would be a large multiple of it."""


@dataclass(frozen=True, slots=True)
class UploadNorm:
    """The norm of an upload, and what its reducer knew of that slice before."""

    value: float
    usual: float | None = None
    """The norm of the slice in the last merges; ``None``: not known yet.

    See ``UsualNorms``.
    """
    harmless: float = 0.0
    """An upload up to this norm is never refused: the norm of theta, until ``usual`` is known.

    At the start of a run, with a warm-up from zero for example, honest peers differ by any factor,
    and none moves theta by more than its own norm."""


def outlying(norms: Mapping[int, UploadNorm], *, norm_ratio_max: float) -> dict[int, str]:
    """Uploads of one slice whose norm is far above the usual one, each with the reason.

    The usual norm is the median of the other uploads or the norm in recent merges, whichever is
    larger: among newcomers that have done little, the upload of a peer at work is not outlying. Of
    two uploads without a history the larger one is outlying: a round without an honest contribution
    costs a round, one with an absurd contribution costs the model.
    """
    found = {}
    for sender, norm in sorted(norms.items()):
        others = [other.value for index, other in norms.items() if index != sender]
        usual = max(median(others) if others else 0.0, norm.usual or 0.0)
        allowed = max(norm_ratio_max * usual, norm.harmless)
        if usual > NORM_MIN and norm.value > allowed:
            found[sender] = (
                f"its norm is {norm.value / usual:.3g} times what is usual; "
                f"at most {norm_ratio_max:g}"
            )
    return found


MERGED_SLACK = 2.0
"""Largest norm of a merged slice over that of an upload: its reducer knows other norms."""


def norm_objection(
    merged: float, *, usual: float | None, own: float, theta: float, norm_ratio_max: float
) -> str | None:
    """The reason not to take a slice that another peer merged; ``None``: there is none.

    No mean of contributions has a larger norm than all of them, and a reducer leaves out what is
    far above the usual one. ``usual``, ``own``: norms of the slice in the last merges and in the
    own contribution; 0: there is none. ``theta``: norm of the slice, which a merge may move so far
    in any case. Until something is usual it is that of the whole fragment, and a multiple of it is
    allowed: honest peers differ by any factor then, and a slice of theta may be zero.
    """
    known = max(usual or 0.0, own)
    harmless = theta if usual is not None else norm_ratio_max * theta
    allowed = max(MERGED_SLACK * norm_ratio_max * known, harmless)
    if allowed <= NORM_MIN or merged <= allowed:
        return None
    return f"the merged slice has a norm of {merged:.3g}; at most {allowed:.3g} is plausible"


UNUSUAL_RATIO = 5.0
"""Length of an unusual step, as a multiple of the usual one. The uploads of honest peers were at
most 4.6 times as long as usual and a merge is shorter than the
longest of its uploads."""


def is_unusual(moved: float, *, usual: float | None, steps: int = 1) -> bool:
    """True if ``steps`` merges moved a fragment further than is usual.

    ``usual``: how far one merge moves it; ``None``: that is not known yet, and nothing is unusual.
    """
    return usual is not None and not moved <= UNUSUAL_RATIO * usual * max(1, steps)

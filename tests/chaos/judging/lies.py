"""The ways in which members lie in the scenario ``liars``, and when they do.

Liars first work honestly, until they are established. Then they lie in one way after another, each
for a while (an *act*): first in those ways that no signature proves, then in one that is provable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Lie(StrEnum):
    """A way in which a member lies."""

    OVERSTATE = "overstate"
    """The liar claims more steps and tokens than it made."""
    POISON = "poison"
    """The liar uploads its work with the opposite sign, of the usual norm."""
    FORGE = "forge"
    """The liar serves states and rounds with other numbers."""
    CENSOR = "censor"
    """The liar refuses the uploads and joins of one peer."""
    SILENCE = "silence"
    """The liar withholds its votes."""
    STALL = "stall"
    """The liar withholds the slices that it has merged."""
    HIDE = "hide"
    """The liar shows auditors nothing."""
    MARKS = "marks"
    """The liar claims in its merged map that work is merged which is not."""
    REDUCE = "reduce"
    """The liar merges falsely, within the bound on norms."""
    EQUIVOCATE = "equivocate"
    """The liar sends different commits, and different seals, to different members."""
    UPLOADS = "uploads"
    """The liar signs another upload for auditors than the one that was merged."""


PROVABLE = frozenset({Lie.REDUCE, Lie.EQUIVOCATE, Lie.UPLOADS})
"""Lies after which a proof bans their author."""

ROUNDS_MAX = 20
"""Rounds within which every honest peer bans the author of a provable lie."""

LIARS_SHARE = 0.3
"""Share of the established members that lie."""

LAST_ACT = 4.0
"""Length of the last act, relative to the others: a liar merges a slice of some rounds only."""


@dataclass(frozen=True, slots=True)
class Act:
    """A time in which the liars lie in certain ways: liar ``i`` in the ``i``-th one, in turn."""

    begins_s: float
    """Time since every learner was in the run; in evidence, on the observer's clock."""
    ends_s: float
    lies: tuple[Lie, ...]

    def of(self, liar: int) -> Lie:
        return self.lies[liar % len(self.lies)]


ACTS: tuple[tuple[Lie, ...], ...] = (
    (Lie.OVERSTATE,),
    (Lie.POISON,),
    (Lie.FORGE,),
    (Lie.CENSOR,),
    (Lie.SILENCE,),
    (Lie.SILENCE, Lie.STALL, Lie.HIDE),
    # A liar that has lost its standing by hiding can still sign two uploads.
    (Lie.REDUCE, Lie.EQUIVOCATE, Lie.UPLOADS),
)


SERVING = ACTS.index((Lie.FORGE,))
"""The act in which a learner joins and asks for the state."""


def liars_of(peers: int) -> int:
    """Number of liars in a swarm with this number of honest peers."""
    return max(1, round(peers * LIARS_SHARE / (1.0 - LIARS_SHARE)))


def acts(begins_s: float, ends_s: float) -> tuple[Act, ...]:
    """Divide a time into acts."""
    units = len(ACTS) - 1 + LAST_ACT
    unit_s = (ends_s - begins_s) / units
    lengths: Sequence[float] = [unit_s] * (len(ACTS) - 1) + [LAST_ACT * unit_s]
    found, at_s = [], begins_s
    for lies, length_s in zip(ACTS, lengths, strict=True):
        found.append(Act(at_s, at_s + length_s, lies))
        at_s += length_s
    return tuple(found)

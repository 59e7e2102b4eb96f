"""What a reducer knows of the slices it reduces in one round: who is complete, what is merged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

NORM_MIN = 1e-20
"""A median smaller than this says nothing about what is usual."""


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("complete", "merged", "merging", "norms", "refused")

    def __init__(self) -> None:
        self.complete: set[int] = set()
        """Roster indices whose upload is here in full, finite and within the norm bound."""
        self.refused: dict[int, str] = {}
        """Roster indices whose upload will not be taken, and why."""
        self.norms: dict[int, float] = {}
        """Of complete uploads, where somebody has looked."""
        self.merging = False
        self.merged: bytes | None = None
        """Digest of the merged slice, once it is here."""


class Reducer:
    """The slices that one peer reduces in one round. Knows nothing of seals and ballots."""

    __slots__ = ("_norm_ratio_max", "slices")

    def __init__(self, slices: Iterable[int], *, norm_ratio_max: float = math.inf) -> None:
        """``norm_ratio_max``: how many times longer than the others' median an upload may be."""
        self._norm_ratio_max = norm_ratio_max
        self.slices: dict[int, SliceState] = {index: SliceState() for index in slices}

    def take(self, index: int) -> bool:
        """Reduce this slice too. ``False`` when I do so already."""
        if index in self.slices:
            return False
        self.slices[index] = SliceState()
        return True

    def arrived(
        self, index: int, sender: int, problem: str | None, norm: float | None = None
    ) -> bool:
        """An upload has ended, well or not. ``False`` when it changes nothing."""
        state = self.slices.get(index)
        if state is None or sender in state.complete:
            return False
        if problem is None:
            state.complete.add(sender)
            state.refused.pop(sender, None)
            if norm is not None:
                state.norms[sender] = norm
            return True
        changed = sender not in state.refused
        state.refused[sender] = problem[:300]
        return changed

    def outlying(self, index: int) -> dict[int, str]:
        """Complete uploads that are absurdly longer than the others, and by how much.

        For a reducer that has nothing of its own to compare them with. Of two, the longer one: a
        round without an honest contribution costs a round, one with an absurd one the model.
        """
        norms = self.slices[index].norms
        found = {}
        for sender, norm in sorted(norms.items()):
            usual = median([other for who, other in norms.items() if who != sender] or [norm])
            if usual > NORM_MIN and norm > self._norm_ratio_max * usual:
                found[sender] = (
                    f"its norm is {norm / usual:.3g} times the others' median; "
                    f"at most {self._norm_ratio_max:g}"
                )
        return found

    def can_merge(self, index: int, contributors: Iterable[int]) -> bool:
        state = self.slices.get(index)
        return (
            state is not None
            and not state.merging
            and state.merged is None
            and state.complete.issuperset(contributors)
        )

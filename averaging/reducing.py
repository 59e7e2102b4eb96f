"""What a reducer knows of the slices it reduces in one round: who is complete, what is merged."""

from __future__ import annotations

from collections.abc import Iterable


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("complete", "merged", "merging", "refused")

    def __init__(self) -> None:
        self.complete: set[int] = set()
        """Roster indices whose upload is here in full, finite and within the norm bound."""
        self.refused: dict[int, str] = {}
        """Roster indices whose upload will not be taken, and why."""
        self.merging = False
        self.merged: bytes | None = None
        """Digest of the merged slice, once it is here."""


class Reducer:
    """The slices that one peer reduces in one round. Knows nothing of seals and ballots."""

    __slots__ = ("slices",)

    def __init__(self, slices: Iterable[int]) -> None:
        self.slices: dict[int, SliceState] = {index: SliceState() for index in slices}

    def take(self, index: int) -> bool:
        """Reduce this slice too. ``False`` when I do so already."""
        if index in self.slices:
            return False
        self.slices[index] = SliceState()
        return True

    def arrived(self, index: int, sender: int, problem: str | None) -> bool:
        """An upload has ended, well or not. ``False`` when it changes nothing."""
        state = self.slices.get(index)
        if state is None or sender in state.complete:
            return False
        if problem is None:
            state.complete.add(sender)
            state.refused.pop(sender, None)
            return True
        changed = sender not in state.refused
        state.refused[sender] = problem[:300]
        return changed

    def can_merge(self, index: int, contributors: Iterable[int]) -> bool:
        state = self.slices.get(index)
        return (
            state is not None
            and not state.merging
            and state.merged is None
            and state.complete.issuperset(contributors)
        )

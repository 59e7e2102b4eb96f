"""The state of a reducer in one round: which uploads are complete, which slices are merged."""

from __future__ import annotations

import math
from collections.abc import Iterable

from averaging.rules.usual_norms import UploadNorm, outlying


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("bundles", "complete", "merged", "merging", "norms", "refused")

    def __init__(self) -> None:
        self.complete: set[int] = set()
        """Roster indices of uploads that are here in full, finite and within the norm bound."""
        self.bundles: dict[int, tuple[int, ...]] = {}
        """Riders in each delegate's upload: all of a bundle count or none."""
        self.refused: dict[int, str] = {}
        """Roster indices of uploads that will not be taken, with the reasons."""
        self.norms: dict[int, UploadNorm] = {}
        """Norms of complete uploads that move a displacement, the own one included."""
        self.merging = False
        self.merged: bytes | None = None
        """Digest of the merged slice, once it is here."""

    def has_whole_bundles(self, contributors: set[int]) -> bool:
        """True if these contributors take all of each bundle or nothing of it, as an honest seal
        does."""
        together = ({delegate, *riders} for delegate, riders in self.bundles.items())
        return all(each <= contributors or each.isdisjoint(contributors) for each in together)


class Reducer:
    """The slices that one peer reduces in one round. Knows nothing of seals and ballots."""

    __slots__ = ("_norm_ratio_max", "slices")

    def __init__(self, slices: Iterable[int], *, norm_ratio_max: float = math.inf) -> None:
        """``norm_ratio_max``: the largest norm of an upload, as a multiple of the usual one."""
        self._norm_ratio_max = norm_ratio_max
        self.slices: dict[int, SliceState] = {index: SliceState() for index in slices}

    def take(self, index: int) -> bool:
        """Reduce this slice too. ``False``: it is reduced here already."""
        if index in self.slices:
            return False
        self.slices[index] = SliceState()
        return True

    def arrived(
        self,
        index: int,
        sender: int,
        problem: str | None,
        norm: UploadNorm | None = None,
        *,
        riders: tuple[int, ...] = (),
    ) -> bool:
        """An upload has ended, well or not. ``False`` when it changes nothing."""
        state = self.slices.get(index)
        if state is None or sender in state.complete:
            return False
        if problem is None:
            state.complete.update((sender, *riders))
            if riders:
                state.bundles[sender] = riders
            for member in (sender, *riders):
                state.refused.pop(member, None)
            if norm is not None:
                state.norms[sender] = norm
            return True
        changed = sender not in state.refused
        state.refused.update(dict.fromkeys((sender, *riders), problem[:300]))
        return changed

    def missed(self, index: int, members: Iterable[int]) -> None:
        """The bundle of these members' delegate is here without their uploads."""
        state = self.slices.get(index)
        if state is not None:
            for member in members:
                state.refused.setdefault(member, "it was too late for its site's bundle")

    def outlying(self, index: int) -> dict[int, str]:
        """Complete uploads whose norm is far above the usual one, each with the reason."""
        found = outlying(self.slices[index].norms, norm_ratio_max=self._norm_ratio_max)
        for delegate, riders in self.slices[index].bundles.items():
            if delegate in found:
                found.update(dict.fromkeys(riders, f"it came with another's: {found[delegate]}"))
        return found

    def can_merge(self, index: int, contributors: Iterable[int]) -> bool:
        state = self.slices.get(index)
        return (
            state is not None
            and not state.merging
            and state.merged is None
            and state.complete.issuperset(contributors)
            and state.has_whole_bundles(set(contributors))
        )

"""The slices of a round at one peer: those that it lacks as a member, and those that it reduces.

``MemberSlices`` has the uploads that failed and the merged slices that are here; ``Reducer`` has
the uploads that are complete and the slices that are merged. Neither knows of seals and ballots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from averaging.rules.usual_norms import UploadNorm, outlying


class SliceState:
    """One slice at its reducer."""

    __slots__ = ("bundles", "complete", "merging", "norms", "refused")

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
            and state.complete.issuperset(contributors)
            and state.has_whole_bundles(set(contributors))
        )


UPLOAD_TRIES_MAX = 3


class MemberSlices:
    """Uploads of one peer that failed, and merged slices that it has."""

    def __init__(self, count: int) -> None:
        self.digests: list[bytes | None] = [None] * count
        """Digests of the merged slices that are here."""
        self.tries: dict[int, int] = {}
        """Number of failed uploads, by slice."""
        self._retry_at: dict[int, float] = {}
        self._claimed: dict[int, tuple[int, ...]] = {}
        """The contributors that the makers of merged slices claim, by slice."""

    def upload_failed(self, index: int, *, retry_at: float) -> None:
        self.tries[index] = self.tries.get(index, 0) + 1
        if self.tries[index] < UPLOAD_TRIES_MAX:
            self._retry_at[index] = retry_at

    def next_retry_at(self) -> float:
        return min(self._retry_at.values(), default=math.inf)

    def to_retry(self, now: float) -> list[int]:
        """Slices to be uploaded again now."""
        due = sorted(index for index, at in self._retry_at.items() if now >= at)
        for index in due:
            del self._retry_at[index]
        return due

    def take(self, index: int, digest: bytes, claimed: tuple[int, ...] | None = None) -> bool:
        """A merged slice is here. ``False``: it was here already.

        ``claimed``: the contributors of one that another peer made, as it says.
        """
        if self.digests[index] is not None:
            return False
        self.digests[index] = digest
        if claimed is not None:
            self._claimed[index] = claimed
        self._retry_at.pop(index, None)
        return True

    def all_digests(self) -> tuple[bytes, ...] | None:
        """``None``: a slice is missing."""
        digests = tuple(digest for digest in self.digests if digest is not None)
        return digests if len(digests) == len(self.digests) else None

    def objection(self, seal: tuple[int, ...]) -> str | None:
        """The reason not to apply the slices: their makers used another seal."""
        if any(claimed != seal for claimed in self._claimed.values()):
            return "a merged slice is not made of the sealed contributors"
        return None

"""The slices of a round at one of its members (a reducer's: ``averaging.round.reducer``)."""

from __future__ import annotations

import math

from averaging.history.parent_maps import parents_of
from averaging.messages import Commit

UPLOAD_TRIES_MAX = 3


class MemberSlices:
    """Uploads of one peer that failed, and merged slices that it has."""

    def __init__(self, count: int) -> None:
        self.digests: list[bytes | None] = [None] * count
        """Digests of the merged slices that are here."""
        self.tries: dict[int, int] = {}
        """Number of failed uploads, by slice."""
        self._retry_at: dict[int, float] = {}
        self._map_parents: tuple[int, ...] | None = None
        """The parents whose merged maps another reducer sent with slice 0."""
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

    def claim(
        self, index: int, parents: tuple[int, ...] | None, contributors: tuple[int, ...] | None
    ) -> None:
        """A slice has come of which its maker says this; the first one that comes is taken."""
        if self.digests[index] is None:
            self._map_parents = parents if index == 0 else self._map_parents
            if contributors is not None:
                self._claimed[index] = contributors

    def take(self, index: int, digest: bytes) -> bool:
        """A merged slice is here. ``False``: it was here already."""
        if self.digests[index] is not None:
            return False
        self.digests[index] = digest
        self._retry_at.pop(index, None)
        return True

    def all_digests(self) -> tuple[bytes, ...] | None:
        """``None``: a slice is missing."""
        digests = tuple(digest for digest in self.digests if digest is not None)
        return digests if len(digests) == len(self.digests) else None

    def objection(self, commit: Commit, seal: tuple[int, ...]) -> str | None:
        """The reason not to apply the slices: their makers used another seal."""
        if self._map_parents not in (None, parents_of(commit, seal)):
            return "its merged maps are not those of the sealed contributors"
        if any(claimed != seal for claimed in self._claimed.values()):
            return "a merged slice is not made of the sealed contributors"
        return None

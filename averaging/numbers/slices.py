"""Cutting a fragment into slices for reducers: consecutive units, in proportion to shares.

A slice ends where a unit ends, so the bytes of a payload do not depend on the cut. A reducer's own
contribution to its slice has no backup elsewhere: that would cost half as much traffic again in a
group of two, to save rounds in which only time is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ENCODED_MIN_BYTES = 256 << 10
"""Smallest slice that is worth a reducer of its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Units ``first_unit`` up to, but not including, ``end_unit`` of a fragment. May be empty."""

    index: int
    first_unit: int
    end_unit: int
    offset: int
    """Index of its first value in the fragment's vector."""
    size: int
    """Number of values."""

    @property
    def values(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    @property
    def units(self) -> slice:
        return slice(self.first_unit, self.end_unit)


def cut(unit_sizes: Sequence[int], shares: Sequence[int]) -> tuple[Slice, ...]:
    """Return one slice for each share, in order, each as near to its part as units allow.

    If two unit ends are equally near, the earlier one is taken. Shares are whole numbers (for
    example bytes per second), because every peer must cut alike and nothing may be rounded. A share
    of 0, or more shares than units, gives empty slices.
    """
    if not shares or min(shares) < 0 or sum(shares) < 1:
        raise ValueError(f"shares {list(shares)}: need whole numbers from 0, not all 0")
    ends = list(accumulate(unit_sizes, initial=0))
    total = sum(shares)
    size = ends[-1]
    slices = []
    first = 0
    given = 0
    for index, share in enumerate(shares):
        given += share
        target = size * given  # in values times total shares
        end = bisect_left(ends, target, key=lambda end: end * total)
        if end > first and target - ends[end - 1] * total <= ends[end] * total - target:
            end -= 1
        end = max(end, first)
        slices.append(Slice(index, first, end, ends[first], ends[end] - ends[first]))
        first = end
    return tuple(slices)


def reducers_count(
    members: int, encoded_bytes: int, *, slice_bytes_min: int = ENCODED_MIN_BYTES
) -> int:
    """Return the number of reducers: min(members, ceil(encoded bytes / minimum)), at least 1."""
    return max(1, min(members, -(-encoded_bytes // slice_bytes_min)))

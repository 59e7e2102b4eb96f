"""Slices and chunks of a fragment: their places in its vector and in its payload.

A **chunk** is a few units that a thread works on between two looks at the clock. The bytes do not
depend on how units are grouped into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from averaging.numbers.layout import Fragment, Kind
from averaging.numbers.slices import Slice


class EncodedSize(Protocol):
    """How many bytes units take when they are encoded."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...


CHUNK_VALUES = 1 << 20
"""Values in a chunk: about a millisecond of work, and 4 MB."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few units of a fragment, and where their values and their encoded bytes are."""

    first_unit: int
    end_unit: int
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    values: slice
    data: slice


class Cutting:
    """The slices and chunks of a fragment, and where each of them lies in the payload."""

    def __init__(self, fragment: Fragment, numbers: EncodedSize, shares: Sequence[int]) -> None:
        self.fragment = fragment
        self.slices: tuple[Slice, ...] = fragment.slices(shares)
        self._ends = list(
            accumulate((numbers.encoded_size((size,)) for size in fragment.unit_sizes), initial=0)
        )
        self.data_size = self._ends[-1]
        self._starts = list(accumulate(fragment.unit_sizes, initial=0))
        self.chunks: tuple[tuple[Chunk, ...], ...] = tuple(
            tuple(self._chunks(piece.first_unit, piece.end_unit)) for piece in self.slices
        )

        self.all_chunks = [chunk for chunks in self.chunks for chunk in chunks]
        """The chunks of all slices, in order."""

    def data_of(self, index: int) -> slice:
        """Return the range of slice ``index`` in the payload."""
        piece = self.slices[index]
        return slice(self._ends[piece.first_unit], self._ends[piece.end_unit])

    def _chunks(self, first: int, end: int) -> list[Chunk]:
        made = []
        while first < end:
            last = first + 1
            count = self.fragment.unit_sizes[first]
            while last < end and count + self.fragment.unit_sizes[last] <= CHUNK_VALUES:
                count += self.fragment.unit_sizes[last]
                last += 1
            made.append(
                Chunk(
                    first,
                    last,
                    self.fragment.unit_sizes[first:last],
                    self.fragment.kinds[first:last],
                    slice(self._starts[first], self._starts[last]),
                    slice(self._ends[first], self._ends[last]),
                )
            )
            first = last
        return made

    def tensor_at(self, unit: int) -> str:
        return self.fragment.units[unit].tensor

"""Slices and chunks of a fragment: their places in its vector and in its payloads.

There are two payloads, because contributions and merged slices may be encoded differently.

A **chunk** is a few units that a thread works on between two looks at the clock. The bytes do not
depend on how units are grouped into chunks.

A **piece** is a part of a chunk that is audited on its own (``averaging.audit``). It has whole
units, because ``clip`` and ``centered_clip`` weigh contributions by the norms of whole units. A
slice of a small model has two to seven pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from averaging.numbers.layout import Fragment, Kind
from averaging.numbers.slices import Slice


class EncodedSize(Protocol):
    """The number of bytes that units take when they are encoded."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...


class BothLegs(Protocol):
    """The encodings of contributions on their way up, and of merged slices on their way down."""

    @property
    def up(self) -> EncodedSize: ...

    @property
    def down(self) -> EncodedSize: ...


CHUNK_VALUES = 1 << 20
"""Values in a chunk: about a millisecond of work, and 4 MB."""

PIECES = 16
"""Pieces of a slice, at most, unless it has more chunks."""

PIECE_MIN_VALUES = 1 << 10
"""Values in a piece that are worth claims and digests of their own: an upload's are about 300
bytes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few units of a fragment, and where their values and their encoded bytes are."""

    first_unit: int
    end_unit: int
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    values: slice
    data: slice
    """Place in an encoded contribution."""
    merged: slice
    """Place in the encoded merged fragment."""


class Cutting:
    """The slices and chunks of a fragment, and where each of them lies in the payloads."""

    def __init__(
        self, fragment: Fragment, legs: BothLegs, shares: Sequence[int], *, pieces: int = 1
    ) -> None:
        """``pieces``: of a slice, as far as its units allow; 1: its chunks are its pieces."""
        self.fragment = fragment
        self._pieces = pieces
        self._audited: dict[int, list[tuple[Chunk, slice]]] = {}
        self._places: dict[int, dict[int, list[slice]]] = {}
        self.slices: tuple[Slice, ...] = fragment.slices(shares)
        self._ends = _ends_of(fragment, legs.up)
        self._merged_ends = _ends_of(fragment, legs.down)
        self.data_size = self._ends[-1]
        """Bytes of a contribution."""
        self.merged_size = self._merged_ends[-1]
        self._starts = list(accumulate(fragment.unit_sizes, initial=0))
        self.chunks: tuple[tuple[Chunk, ...], ...] = tuple(
            tuple(self._chunks(piece.first_unit, piece.end_unit)) for piece in self.slices
        )

        self.all_chunks = [chunk for chunks in self.chunks for chunk in chunks]
        """The chunks of all slices, in order."""

    def data_of(self, index: int) -> slice:
        """Return the range of slice ``index`` in a contribution."""
        piece = self.slices[index]
        return slice(self._ends[piece.first_unit], self._ends[piece.end_unit])

    def merged_of(self, index: int) -> slice:
        """Return the range of slice ``index`` in the merged fragment."""
        piece = self.slices[index]
        return slice(self._merged_ends[piece.first_unit], self._merged_ends[piece.end_unit])

    def pieces(self, index: int, *, merged: bool = False) -> list[tuple[Chunk, slice]]:
        """Return the chunks of a slice, each with its place in the bytes of that slice."""
        start = (self.merged_of(index) if merged else self.data_of(index)).start
        places = ((chunk, chunk.merged if merged else chunk.data) for chunk in self.chunks[index])
        return [(chunk, slice(at.start - start, at.stop - start)) for chunk, at in places]

    def audited(self, index: int) -> list[tuple[Chunk, slice]]:
        """Return the pieces of a slice, each with its place in an upload of that slice."""
        found = self._audited.get(index)
        if found is None:
            start = self.data_of(index).start
            found = self._audited[index] = [
                (piece, slice(piece.data.start - start, piece.data.stop - start))
                for pieces in self._pieces_of(index)
                for piece in pieces
            ]
        return found

    def audited_places(self, index: int) -> dict[int, list[slice]]:
        """Return the places of the pieces of each chunk of a slice in the uploaded chunk, by the
        chunk's first unit."""
        found = self._places.get(index)
        if found is None:
            found = self._places[index] = {
                chunk.first_unit: [
                    slice(piece.data.start - chunk.data.start, piece.data.stop - chunk.data.start)
                    for piece in pieces
                ]
                for chunk, pieces in zip(self.chunks[index], self._pieces_of(index), strict=True)
            }
        return found

    def _pieces_of(self, index: int) -> list[list[Chunk]]:
        """The pieces of a slice, by chunk."""
        chunks = self.chunks[index]
        count = max(1, self._pieces // max(1, len(chunks)))
        return [self._chunks(chunk.first_unit, chunk.end_unit, count) for chunk in chunks]

    def upload_size(self, index: int) -> int:
        """Return the number of bytes of a contribution to slice ``index``."""
        piece = self.slices[index]
        return self._ends[piece.end_unit] - self._ends[piece.first_unit]

    def _chunks(self, first: int, end: int, pieces: int | None = None) -> list[Chunk]:
        """Group these units into chunks, or into at most so many pieces that are about equal."""
        made: list[Chunk] = []
        most = CHUNK_VALUES
        while first < end:
            last = first + 1
            if pieces is not None:
                left = self._starts[end] - self._starts[first]
                most = max(PIECE_MIN_VALUES, left // (pieces - len(made)))
            count = self.fragment.unit_sizes[first]
            while last < end and count + self.fragment.unit_sizes[last] <= most:
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
                    slice(self._merged_ends[first], self._merged_ends[last]),
                )
            )
            first = last
        return made

    def tensor_at(self, unit: int) -> str:
        return self.fragment.units[unit].tensor


def _ends_of(fragment: Fragment, leg: EncodedSize) -> list[int]:
    return list(accumulate((leg.encoded_size((size,)) for size in fragment.unit_sizes), initial=0))

"""Slices and chunks of a fragment: their places in its vector and in its payloads.

There are two payloads, because contributions and merged slices may be encoded differently.

A **chunk** is a few units that a thread works on between two looks at the clock. The bytes do not
depend on how units are grouped into chunks. A chunk is also a **piece** of its slice: a part that
is audited on its own (``averaging.guard``). It has whole units, because ``centered_clip`` weighs
contributions by the norms of whole units. A slice of a small model has one to six.

The **digest of a slice** is the root of a hash tree over its pieces. So one piece of an upload, or
of a merged slice, can be shown without the others: with a hash for each level of the tree anybody
can tell whether it belongs to a digest that was signed. A proof of a false merge is as large for a
model of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

import blake3

from averaging.numbers.arrays import Buffer
from averaging.numbers.layout import Fragment, Kind, Slice, cut


class EncodedSize(Protocol):
    """The number of bytes that units take when they are encoded."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...


CHUNK_VALUES = 1 << 20
"""Most values in a chunk of several units: about a millisecond of work, and 4 MB."""

CHUNKS = 16
"""Chunks of a slice, at most, unless it has more of ``CHUNK_VALUES``."""

CHUNK_MIN_VALUES = 1 << 14
"""Values in a chunk that are worth an audit of their own: to ask a member for it takes as long as
merging does. A reducer that lies in one piece of each round is found as soon, whatever their size.
"""


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
        self, fragment: Fragment, up: EncodedSize, down: EncodedSize, shares: Sequence[int]
    ) -> None:
        """``up``, ``down``: the encodings of contributions, and of merged slices."""
        self.fragment = fragment
        self.slices: tuple[Slice, ...] = fragment.slices(shares)
        self._ends = _ends_of(fragment.unit_sizes, up)
        self._merged_ends = _ends_of(fragment.unit_sizes, down)
        self.data_size = self._ends[-1]
        """Bytes of a contribution."""
        self.merged_size = self._merged_ends[-1]
        self._starts = list(accumulate(fragment.unit_sizes, initial=0))
        self.chunks: tuple[tuple[Chunk, ...], ...] = tuple(
            tuple(self._chunk(*each) for each in _chunks(self._starts, piece))
            for piece in self.slices
        )

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
        chunks = enumerate(self.chunks[index])
        return [(chunk, self.place(index, number, merged=merged)) for number, chunk in chunks]

    def place(self, index: int, number: int, *, merged: bool = False) -> slice:
        """Return the place of a chunk in the bytes of its slice."""
        first, chunk = self.chunks[index][0], self.chunks[index][number]
        start, at = (first.merged.start, chunk.merged) if merged else (first.data.start, chunk.data)
        return slice(at.start - start, at.stop - start)

    def upload_size(self, index: int) -> int:
        """Return the number of bytes of a contribution to slice ``index``."""
        piece = self.slices[index]
        return self._ends[piece.end_unit] - self._ends[piece.first_unit]

    def _chunk(self, first: int, end: int) -> Chunk:
        return Chunk(
            first,
            end,
            self.fragment.unit_sizes[first:end],
            self.fragment.kinds[first:end],
            slice(self._starts[first], self._starts[end]),
            slice(self._ends[first], self._ends[end]),
            slice(self._merged_ends[first], self._merged_ends[end]),
        )

    def tensor_at(self, unit: int) -> str:
        return self.fragment.units[unit].tensor


def _ends_of(unit_sizes: Sequence[int], leg: EncodedSize) -> list[int]:
    return list(accumulate((leg.encoded_size((size,)) for size in unit_sizes), initial=0))


def digests_of_slices(
    data: memoryview, unit_sizes: Sequence[int], shares: Sequence[int], leg: EncodedSize
) -> list[bytes]:
    """Return the digests of the slices of a merged fragment without states."""
    starts = list(accumulate(unit_sizes, initial=0))
    ends = _ends_of(unit_sizes, leg)
    return [
        root_of(
            digests_of(
                data, (slice(ends[first], ends[end]) for first, end in _chunks(starts, piece))
            )
        )
        for piece in cut(unit_sizes, shares)
    ]


def _chunks(starts: Sequence[int], piece: Slice) -> list[tuple[int, int]]:
    """Group the units of a slice into chunks that are about equal."""
    made: list[tuple[int, int]] = []
    first, end = piece.first_unit, piece.end_unit
    while first < end:
        share = (starts[end] - starts[first]) // max(1, CHUNKS - len(made))
        most = min(CHUNK_VALUES, max(CHUNK_MIN_VALUES, share))
        last = first + 1
        while last < end and starts[last + 1] - starts[first] <= most:
            last += 1
        made.append((first, last))
        first = last
    return made


DIGEST_BYTES: Final = 32
LEVELS_MAX: Final = 20
"""Enough for a million pieces."""

_NODE: Final = "shoal 2026-11 pieces of a slice"


# Digests


def digest_of(piece: Buffer) -> bytes:
    return blake3.blake3(piece).digest()


def digests_of(data: memoryview, places: Iterable[slice]) -> list[bytes]:
    """Return the digests of these pieces."""
    return [digest_of(data[place]) for place in places]


def root_of(pieces: Sequence[bytes]) -> bytes:
    """Return the digest of a slice, given those of its pieces in their order."""
    level = list(pieces) or [digest_of(b"")]
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path_to(index: int, pieces: Sequence[bytes]) -> bytes:
    """Return the digests that lead from a piece to the root, one after the other."""
    path, level = b"", list(pieces)
    while len(level) > 1:
        if (index ^ 1) < len(level):
            path += level[index ^ 1]
        level, index = _above(level), index // 2
    return path


def leads_to(root: bytes, path: bytes, piece: Buffer, *, index: int, count: int) -> bool:
    """True if these are the bytes of piece ``index`` of the ``count`` of a slice."""
    node, at = digest_of(piece), 0
    while count > 1:
        if (index ^ 1) < count:
            beside = path[at : at + DIGEST_BYTES]
            node = _node(beside, node) if index % 2 else _node(node, beside)
            at += DIGEST_BYTES
        count, index = (count + 1) // 2, index // 2
    return node == root and at == len(path)


def _above(level: Sequence[bytes]) -> list[bytes]:
    return [
        _node(level[at], level[at + 1]) if at + 1 < len(level) else level[at]
        for at in range(0, len(level), 2)
    ]


def _node(left: bytes, right: bytes) -> bytes:
    return blake3.blake3(left + right, derive_key_context=_NODE).digest()

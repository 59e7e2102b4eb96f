"""The contract of a codec: fragments as bytes, and back into the same bits on every machine.

A codec encodes unit by unit (``averaging.numbers.layout``). So the bytes of a fragment do not
depend on how it was cut into slices, and their number follows from the unit sizes alone. Everything
is little-endian. Decoding is elementwise fp32 and bit-exact on every machine. Encoding is exact
too, but no other peer has to repeat it.

A new codec derives from ``averaging.numbers.block_codecs.BlockCodec``, because
``averaging.numbers.arithmetic`` reads the scales of every codec but f32.

Work is done on tiles of 512 blocks, which stay in the processor's cache. numpy releases the GIL for
each tile, so callers divide units among threads, each with a ``Scratch`` of its own.

``averaging.numbers.compiled_codecs`` has the same codecs with kernels that take a block through all
passes in the first cache. (Kernels for single passes over a tile, such as the one that packs its
codes, save next to nothing, because tiles then travel through the caches as often.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from averaging.errors import BadPayload
from averaging.numbers.arrays import (
    SUM_TILE,
    Buffer,
    Bytes,
    Float32s,
    Float64s,
    aligned,
    arithmetic,
)

BLOCK = 1024
"""Values that share a scale. Part of the format."""

TILE_BLOCKS = 512

TILE = BLOCK * TILE_BLOCKS
"""Values that are worked on together. Not part of the format."""


class Scratch:
    """Buffers of one thread: about 4.5 MB, plus a few units if a merge rule asks for them."""

    def __init__(self) -> None:
        self.first: Float32s = aligned(4 * TILE).view(np.float32)
        self.second: Float32s = aligned(4 * TILE).view(np.float32)
        self.bytes = aligned(TILE).view(np.int8)
        self.sums: Float64s = np.empty(SUM_TILE, np.float64)
        self._vectors: dict[int, Float32s] = {}

    def vector(self, index: int, size: int) -> Float32s:
        """Return an uninitialised vector of ``size`` values. Each index has a vector of its own."""
        held = self._vectors.get(index)
        if held is None or held.size < size:
            held = self._vectors[index] = np.empty(size, np.float32)
        return held[:size]


TileReader: TypeAlias = Callable[[int, slice, Float32s], None]
"""Fills a vector with a tile, given by its number and its range of values: all codecs divide units
into the same tiles (``averaging.numbers.tiles``)."""


@dataclass(frozen=True, slots=True)
class Addends:
    """Encoded vectors to add up, in the order of the roster, and a weight for each."""

    payloads: Sequence[Buffer]
    weights: Sequence[float]


class Codec(ABC):
    """An encoding of values. ``sizes`` are unit sizes; vectors are flat, contiguous fp32.

    ``decode`` and ``decode_add`` raise ``BadPayload`` for a wrong length before they write
    anything. Data that ``check`` has not accepted may decode to infinity, and to nothing worse.
    """

    name: str
    peak_of_scale: float
    """Largest absolute value in a block, as a multiple of the block's scale."""

    @abstractmethod
    def encoded_size(self, sizes: Sequence[int]) -> int:
        """Return the number of bytes of these units, whatever their values."""

    @abstractmethod
    def error_bound(self, peak: float) -> float:
        """Return the largest error of a value in a block whose absolute maximum is ``peak``."""

    @abstractmethod
    def encode(
        self,
        values: Float32s,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        *,
        base: Float32s | None = None,
        leaves_rest: bool = False,
    ) -> None:
        """Fill ``out``, of exactly ``encoded_size(sizes)`` bytes. Raises ``NotFinite``.

        ``base``: encode base - values, without holding the whole difference in memory.
        ``leaves_rest``: then set ``values`` to what the bytes stand for, which is ``base`` less the
        difference that they decode to. Where ``NotFinite`` is raised some may have been set.
        """

    @abstractmethod
    def encode_sum(
        self,
        source: Codec,
        given: Addends,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        *,
        rest: Float32s | None = None,
    ) -> None:
        """Encode the sum that ``decode_add`` of ``source`` makes from zero, tile by tile.

        ``rest`` is set to what encoding loses of it.
        """

    @abstractmethod
    def tile_reader(
        self, data: Buffer, sizes: Sequence[int], weight: float, scratch: Scratch
    ) -> TileReader:
        """Return a function that decodes single tiles, times ``weight``, for ``encode_sum``.

        ``scratch.first`` and ``second`` are the caller's. Use it inside ``arithmetic()``.
        """

    @abstractmethod
    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless another peer's ``data`` decodes to finite values."""

    @abstractmethod
    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        """Fill ``out`` with the values."""

    @abstractmethod
    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        """Yield ``code * (scale * weight)`` in fp32, tile by tile, and each tile's place.

        ``weight`` is one number, or a vector with one per unit. A tile lies in the cache and is
        valid until the next one is requested; ``scratch.second`` is free for the caller. Iterate
        inside ``arithmetic()``.
        """

    def decode_add(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        accumulator: Float32s,
        scratch: Scratch,
    ) -> None:
        """Add what ``pieces`` yields to ``accumulator``."""
        require_size(accumulator, sizes)
        with arithmetic():
            for part, values in self.pieces(data, sizes, weight, scratch):
                np.add(accumulator[part], values, out=accumulator[part])

    def decode_subtract(
        self,
        data: Buffer,
        sizes: Sequence[int],
        minuend: Float32s,
        out: Float32s,
        scratch: Scratch,
    ) -> None:
        """Set ``out``, which may be ``minuend``, to ``minuend`` less the values."""
        require_size(minuend, sizes)
        with arithmetic():
            for part, values in self.pieces(data, sizes, 1.0, scratch):
                np.subtract(minuend[part], values, out=out[part])


def require_size(vector: Float32s, sizes: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the vector holds the values of these units."""
    if vector.size != sum(sizes):
        raise ValueError(f"a vector of {vector.size} values for units of {sum(sizes)}")


def as_bytes(data: Buffer) -> Bytes:
    return np.frombuffer(data, np.uint8)


def checked_bytes(codec: str, data: Buffer, expected: int) -> Bytes:
    """Return ``data`` as an array. Raises ``BadPayload`` for a length other than ``expected``."""
    octets = as_bytes(data)
    if octets.size != expected:
        raise BadPayload(codec, f"{octets.size} bytes; the layout says {expected}")
    return octets

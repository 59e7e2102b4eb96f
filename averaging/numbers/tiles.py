"""The format of payloads with a scale per block, and its division into tiles.

Within a unit values go in blocks of 1024 with one fp32 scale each: first all scales of the unit,
then all codes. A format may also have no scales. A tile is a group of blocks of equal length, so
that one numpy call works on many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from averaging.numbers.arrays import Bytes, Float32s

BLOCK = 1024
"""Values that share a scale. Part of the format."""

TILE_BLOCKS = 512

TILE = BLOCK * TILE_BLOCKS
"""Values that are worked on together. Not part of the format."""

SCALE_BYTES = 4

_ONE = np.ones(1, np.float32)


class BlockSizes(Protocol):
    """Sizes in bytes that a codec's format prescribes."""

    @property
    def scale_bytes(self) -> int: ...

    def code_bytes(self, columns: int) -> int: ...

    def encoded_size(self, sizes: Sequence[int]) -> int: ...


class Tile(NamedTuple):
    """Blocks of equal length that are worked on together: ``rows`` of ``columns`` values.

    In a unit of many blocks, scales and codes are apart, and ``record`` is 0. Neighbouring small
    units of one size form one tile: for each a record of ``record`` bytes, the scale and then the
    codes.
    """

    unit: int
    start: int
    rows: int
    columns: int
    scales_at: int
    codes_at: int
    record: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def values(self) -> slice:
        return slice(self.start, self.start + self.size)

    def of(self, vector: Float32s) -> Float32s:
        tile: Float32s = vector[self.start : self.start + self.size].reshape(
            self.rows, self.columns
        )
        return tile

    @property
    def units(self) -> slice:
        """Range of the units in this tile: one per row, or one for all rows."""
        return slice(self.unit, self.unit + (self.rows if self.record else 1))

    def unit_of(self, row: int) -> int:
        return self.unit + row if self.record else self.unit


class Plan(NamedTuple):
    """The tiles of a range of units."""

    tiles: tuple[Tile, ...]
    units: tuple[tuple[Tile, ...], ...]
    """The same tiles, grouped by the unit, or the run of small units, that they are part of."""
    values: int
    bytes: int


@lru_cache(maxsize=256)
def plan_of(codec: BlockSizes, sizes: tuple[int, ...]) -> Plan:
    tiles = tuple(_tiles(codec, sizes))
    units = tuple(tuple(found) for _, found in groupby(tiles, key=lambda tile: tile.unit))
    return Plan(tiles, units, sum(sizes), codec.encoded_size(sizes))


def _tiles(codec: BlockSizes, sizes: tuple[int, ...]) -> Iterator[Tile]:
    unit = start = at = 0
    head = codec.scale_bytes
    while unit < len(sizes):
        size = sizes[unit]
        if size <= BLOCK:
            record = head + codec.code_bytes(size)
            count = 1
            most = TILE // max(1, size)
            while count < most and unit + count < len(sizes) and sizes[unit + count] == size:
                count += 1
            if size:
                yield Tile(unit, start, count, size, at, at + head, record)
                at += record * count
            unit += count
            start += size * count
            continue
        blocks, rest = divmod(size, BLOCK)
        codes_at = at + head * (blocks + bool(rest))
        code_bytes = codec.code_bytes(BLOCK)
        for first in range(0, blocks, TILE_BLOCKS):
            rows = min(TILE_BLOCKS, blocks - first)
            yield Tile(unit, start + first * BLOCK, rows, BLOCK, at + head * first, codes_at, 0)
            codes_at += rows * code_bytes
        if rest:
            yield Tile(unit, start + blocks * BLOCK, 1, rest, at + head * blocks, codes_at, 0)
            codes_at += codec.code_bytes(rest)
        at = codes_at
        unit += 1
        start += size


def scales_of(codec: BlockSizes, data: Bytes, tiles: Sequence[Tile]) -> NDArray[np.float32]:
    """Return a view of the scales of a unit's tiles, which follow one another."""
    first, last = tiles[0], tiles[-1]
    if first.record or not codec.scale_bytes:
        return view_of(codec, data, first)[0]
    return data[first.scales_at : last.scales_at + SCALE_BYTES * last.rows].view("<f4")


def view_of(codec: BlockSizes, data: Bytes, tile: Tile) -> tuple[NDArray[np.float32], Bytes]:
    """Return views of the scales and of the codes of a tile; ones where there are no scales."""
    rows, head, code_bytes = tile.rows, codec.scale_bytes, codec.code_bytes(tile.columns)
    if tile.record:
        records = data[tile.scales_at : tile.scales_at + rows * tile.record].reshape(rows, -1)
        codes = records[:, head:]
        scales = records[:, :head].view("<f4")[:, 0] if head else _ONE
    else:
        codes = data[tile.codes_at : tile.codes_at + rows * code_bytes].reshape(rows, code_bytes)
        scales = data[tile.scales_at : tile.scales_at + head * rows].view("<f4") if head else _ONE
    return scales, codes


@lru_cache(maxsize=256)
def row_starts(rows: int, columns: int) -> NDArray[np.intp]:
    """Indices for ``reduceat``, which is faster than a reduction along an axis."""
    return np.arange(0, rows * columns, columns)


_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of an fp32 value except the sign."""


def peaks_of(values: Float32s, starts: NDArray[np.intp]) -> Float32s:
    """Return the absolute maximum of each row; NaN if the row holds one.

    The bits are compared as integers, which takes three quarters of the time: without the sign they
    are ordered like the values, and NaN is above everything. The signed maximum is that of the
    largest positive value, the unsigned maximum that of the most negative one, if there is any.
    """
    bits = values.view(np.int32)
    peaks = np.maximum.reduceat(bits, starts)
    negative = np.maximum.reduceat(bits.view(np.uint32), starts).view(np.int32)
    np.maximum(peaks & _MAGNITUDE, negative & _MAGNITUDE, out=peaks)
    return peaks.view(np.float32)

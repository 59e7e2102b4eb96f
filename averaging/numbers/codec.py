"""Codecs: fragments as bytes, and back into the same bits on every machine.

A codec encodes unit by unit (``averaging.numbers.layout``). So the bytes of a fragment do not
depend on how it was cut into slices, and their number follows from the unit sizes alone. Everything
is little-endian. Decoding is elementwise fp32 and bit-exact on every machine. Encoding is exact
too, but no other peer has to repeat it.

Work is done on tiles of 512 blocks, which stay in the processor's cache. numpy releases the GIL for
each tile, so callers divide units among threads, each with a ``Scratch`` of its own.

``peer.extras.compiled`` has the same codecs with kernels that take a block through all passes in
the first cache. (Kernels for single passes over a tile, such as the one that packs its codes, save
next to nothing, because tiles then travel through the caches as often.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from averaging.errors import BadPayload, NotFinite
from averaging.numbers.arrays import (
    WORK_VALUES,
    Buffer,
    Bytes,
    Float32s,
    Float64s,
    aligned,
    arithmetic,
)
from averaging.numbers.tiles import (
    BLOCK,
    SCALE_BYTES,
    TILE,
    Tile,
    peaks_of,
    plan_of,
    row_starts,
    scales_of,
    view_of,
)

PEAK_MIN = np.float32(2.0**-100)
"""Smallest absolute maximum that a block is coded with, so that scales stay normal."""

FLOAT_MAX = np.finfo(np.float32).max

_ZERO = np.float32(0)


class Scratch:
    """Buffers of one thread: about 5 MB, plus a few units if a merge rule asks for them."""

    def __init__(self) -> None:
        self.first: Float32s = aligned(4 * TILE).view(np.float32)
        self.second: Float32s = aligned(4 * TILE).view(np.float32)
        self.bytes = aligned(TILE).view(np.int8)
        self.sums: Float64s = np.empty(WORK_VALUES, np.float64)
        self._vectors: dict[int, Float32s] = {}

    def vector(self, index: int, size: int) -> Float32s:
        """Return an uninitialised vector of ``size`` values. Each index has a vector of its own."""
        held = self._vectors.get(index)
        if held is None or held.size < size:
            held = self._vectors[index] = np.empty(size, np.float32)
        return held[:size]


TileReader: TypeAlias = Callable[[int, Float32s], None]
"""Fills a vector with a tile, given by its number: all codecs divide units into the same tiles."""


@dataclass(frozen=True, slots=True)
class Addends:
    """Encoded vectors to add up, in the order of the roster, and a weight for each."""

    payloads: Sequence[Buffer]
    weights: Sequence[float]


class Codec(ABC):
    """An encoding of values. ``sizes`` are unit sizes; vectors are flat, contiguous fp32.

    Subclasses say how the values of a tile become codes and back. ``decode`` and ``decode_add``
    raise ``BadPayload`` for a wrong length before they write anything. Data that ``check`` has not
    accepted may decode to infinity, and to nothing worse.
    """

    name: str
    peak_of_scale: float
    """Largest absolute value in a block, as a multiple of the block's scale."""
    scale_safe: float
    """Below this scale every code decodes to a finite value."""
    scale_bytes: ClassVar[int] = SCALE_BYTES
    """0 for a format without scales: each of them is 1."""
    signed_zero: ClassVar[bool] = False
    """True if the code of a negative zero differs from that of a positive one."""

    @abstractmethod
    def code_bytes(self, columns: int) -> int:
        """Return the number of bytes of the codes of one block."""

    @abstractmethod
    def error_bound(self, peak: float) -> float:
        """Return the largest error of a value in a block whose absolute maximum is ``peak``."""

    @abstractmethod
    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        """Write scales and codes of a tile, which may be ``scratch.first``; ``second`` is free."""

    @abstractmethod
    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        """Set ``out`` to the decoded values, with ``factors`` in place of the scales."""

    def encoded_size(self, sizes: Sequence[int]) -> int:
        """Return the number of bytes of these units, whatever their values."""
        full = self.scale_bytes + self.code_bytes(BLOCK)
        total = 0
        for size in sizes:
            blocks, rest = divmod(size, BLOCK)
            total += blocks * full + (self.scale_bytes + self.code_bytes(rest) if rest else 0)
        return total

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

        def given(_: int, tile: Tile) -> Float32s:
            if base is None:
                return tile.of(values)
            made = scratch.first[: tile.size].reshape(tile.rows, tile.columns)
            np.subtract(tile.of(base), tile.of(values), out=made)
            return made

        self._encode(sizes, out, scratch, given, values.size)
        if base is not None and leaves_rest:
            self.decode_subtract(out, sizes, base, values, scratch)

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
        first, *others = [
            source.tile_reader(payload, sizes, weight, scratch)
            for payload, weight in zip(given.payloads, given.weights, strict=True)
        ]

        def added(number: int, tile: Tile) -> Float32s:
            total, more = scratch.first[: tile.size], scratch.second[: tile.size]
            first(number, total)
            if self.signed_zero:
                np.add(total, _ZERO, out=total)  # a sum from zero has no negative zero
            for read in others:
                read(number, more)
                np.add(total, more, out=total)
            if rest is not None:
                np.add(total, _ZERO, out=rest[tile.values])
            return total.reshape(tile.rows, tile.columns)

        self._encode(sizes, out, scratch, added, sum(sizes))
        if rest is not None:
            self.decode_subtract(out, sizes, rest, rest, scratch)

    def tile_reader(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> TileReader:
        """Return a function that decodes single tiles to ``code * (scale * weight)`` in fp32.

        ``weight`` is one number, or a vector with one per unit. ``scratch.first`` and ``second``
        are the caller's. Use it inside ``arithmetic()``.
        """
        plan = plan_of(self, tuple(sizes))
        octets = checked_bytes(self.name, data, plan.bytes)
        rounded = np.asarray(weight, np.float32)

        def read(number: int, into: Float32s) -> None:
            tile = plan.tiles[number]
            scales, codes = view_of(self, octets, tile)
            mine = rounded[tile.units] if rounded.ndim else rounded
            factors = np.multiply(scales, mine, dtype=np.float32)
            matrix = into.reshape(tile.rows, tile.columns)
            self.read(codes, scales, factors, matrix, scratch)

        return read

    def _encode(
        self,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        source: Callable[[int, Tile], Float32s],
        count: int,
    ) -> None:
        target = self._target(out, sizes, count)
        with arithmetic():
            for number, tile in enumerate(plan_of(self, tuple(sizes)).tiles):
                values = source(number, tile)
                peaks = peaks_of(values.reshape(-1), row_starts(tile.rows, tile.columns))
                if not np.maximum.reduce(peaks) <= FLOAT_MAX:  # true for NaN too
                    raise NotFinite(tile.unit_of(int(np.argmin(np.isfinite(peaks)))))
                np.maximum(peaks, PEAK_MIN, out=peaks)
                scales, codes = view_of(self, target, tile)
                self.fill(values, peaks, scales, codes, scratch)

    def _target(self, out: Buffer, sizes: Sequence[int], count: int) -> Bytes:
        """``out`` as an array. Raises ``ValueError`` unless it has room for ``count`` values."""
        plan, target = plan_of(self, tuple(sizes)), as_bytes(out)
        if target.size != plan.bytes or count != plan.values:
            raise ValueError(
                f"{count} values into {target.size} bytes; the units hold {plan.values} values, "
                f"which are {plan.bytes} bytes in {self.name}"
            )
        return target

    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless another peer's ``data`` decodes to finite values."""
        plan = plan_of(self, tuple(sizes))
        octets = checked_bytes(self.name, data, plan.bytes)
        with arithmetic():
            for tiles in plan.units:
                scales = scales_of(self, octets, tiles)
                highest = np.maximum.reduce(scales)
                # Both are NaN if one scale is.
                if not (np.minimum.reduce(scales) >= 0 and highest <= FLOAT_MAX):
                    row = int(np.argmin((scales >= 0) & np.isfinite(scales)))
                    raise BadPayload(
                        self.name,
                        f"unit {tiles[0].unit_of(row)} has the scale {float(scales[row])}",
                    )
                if highest >= self.scale_safe:
                    self._refuse_not_finite(octets, tiles, scratch)

    def _refuse_not_finite(self, data: Bytes, tiles: Sequence[Tile], scratch: Scratch) -> None:
        for tile in tiles:
            scales, codes = view_of(self, data, tile)
            work = scratch.first[: tile.size].reshape(tile.rows, tile.columns)
            self.read(codes, scales, scales.astype(np.float32), work, scratch)
            finite = np.isfinite(work).all(axis=1)
            if not finite.all():
                unit = tile.unit_of(int(np.argmin(finite)))
                raise BadPayload(self.name, f"unit {unit} is not finite")

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        """Fill ``out`` with the values."""
        read = self.tile_reader(data, sizes, 1.0, scratch)
        require_size(out, sizes)
        with arithmetic():
            for number, tile in enumerate(plan_of(self, tuple(sizes)).tiles):
                read(number, out[tile.values])

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        """Yield what ``tile_reader`` decodes, tile by tile, and each tile's place.

        A tile lies in the cache and is valid until the next one is requested; ``scratch.second`` is
        free for the caller. Iterate inside ``arithmetic()``.
        """
        read = self.tile_reader(data, sizes, weight, scratch)
        for number, tile in enumerate(plan_of(self, tuple(sizes)).tiles):
            values = scratch.first[: tile.size]
            read(number, values)
            yield tile.values, values

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

"""Turning ranges of a fragment into bytes, and back into the same bits on every machine.

A codec encodes unit by unit (``averaging.numbers.layout``), so the bytes of a fragment do not
depend on how it was sliced, and how many they are follows from the unit sizes alone. Within a unit,
values go in blocks of 1024 with one fp32 scale each: first all scales of the unit, then all codes.
Everything is little-endian.

Decoding is elementwise fp32, ``code * (scale * weight)``: two multiplies and nothing else, so it
is bit-exact. Encoding is too, but nobody has to repeat it.

Work is done on tiles of 512 blocks which stay in the processor's cache; numpy releases the GIL for
each, so callers split units over threads, each with a ``Scratch`` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from averaging.errors import BadPayload, NotFinite
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
TILE_BLOCKS = 512
TILE = BLOCK * TILE_BLOCKS

PEAK_MIN = np.float32(2.0**-100)
"""Blocks with a smaller absolute maximum are coded as if it were this: their scales stay normal."""

_FLOAT_MAX = np.finfo(np.float32).max
_ZERO = np.float32(0)
_UNITS_LAST = np.float32(3 << 22)
"""Added to what is far smaller, it leaves that rounded in the lowest bits, halves to even: as
``rint`` does, in less time, and bits are narrowed faster than floats."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits but the sign."""


class Scratch:
    """Buffers of one thread: about 4.5 MB, and a few units more once a merge asked for them."""

    def __init__(self) -> None:
        self.first: Float32s = aligned(4 * TILE).view(np.float32)
        self.second: Float32s = aligned(4 * TILE).view(np.float32)
        self.bytes = aligned(TILE).view(np.int8)
        self.sums: Float64s = np.empty(SUM_TILE, np.float64)
        self._vectors: dict[int, Float32s] = {}

    def vector(self, index: int, size: int) -> Float32s:
        """A vector of ``size`` values, uninitialised; another index is another vector."""
        held = self._vectors.get(index)
        if held is None or held.size < size:
            held = self._vectors[index] = np.empty(size, np.float32)
        return held[:size]


class Codec(Protocol):
    """How values travel. ``sizes`` are unit sizes; vectors are flat, contiguous fp32.

    ``decode`` and ``decode_add`` raise ``BadPayload`` for a wrong length before they touch
    anything. What ``check`` has not passed may decode to infinity, and to nothing worse.
    """

    @property
    def name(self) -> str: ...

    @property
    def peak_of_scale(self) -> float:
        """No value of a block is larger than so many times its scale."""
        ...

    def encoded_size(self, sizes: Sequence[int]) -> int:
        """Bytes of these units, whatever their values."""
        ...

    def error_bound(self, peak: float) -> float:
        """No value of a block whose absolute maximum is ``peak`` is decoded further off."""
        ...

    def encode(self, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch) -> None:
        """Fill ``out``, of exactly ``encoded_size(sizes)`` bytes. Raises ``NotFinite``."""
        ...

    def encode_difference(
        self, base: Float32s, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch
    ) -> None:
        """``encode`` of base - values, without ever holding it whole."""
        ...

    def encode_sum(
        self,
        payloads: Sequence[Buffer],
        weights: Sequence[float],
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
    ) -> None:
        """``encode`` of what ``decode_add`` adds up from zero, without ever holding it whole."""
        ...

    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless ``data`` decodes to finite values. For bytes of others."""
        ...

    def decode(
        self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch
    ) -> None: ...

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        """``code * (scale * weight)`` in fp32, a tile at a time, and where in the vector it goes.

        ``weight`` is one for all, or a vector of one for each unit.
        A tile lies in the cache and holds until the next one is asked for; ``scratch.second`` is
        free. Whoever iterates does so in ``arithmetic()``.
        """
        ...

    def decode_add(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        accumulator: Float32s,
        scratch: Scratch,
    ) -> None:
        """accumulator += what ``pieces`` yields."""
        ...


_codecs: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make ``codec_named`` know it. A name is taken once."""
    if codec.name in _codecs:
        raise ValueError(f"there is a codec {codec.name!r} already")
    _codecs[codec.name] = codec


def codec_named(name: str) -> Codec:
    try:
        return _codecs[name]
    except KeyError:
        raise ValueError(f"no codec is named {name!r}; there are {codec_names()}") from None


def codec_names() -> tuple[str, ...]:
    """Every registered codec, the most exact one first."""
    return tuple(_codecs)


# Tiles


class _Tile(NamedTuple):
    """Blocks of equal length that are worked on together: ``rows`` of ``columns`` values.

    In one unit of many blocks scales and codes are apart (``record`` is 0). Many small units of one
    size are one tile too: a record of ``record`` bytes each, the scale and then the codes.
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

    def of(self, vector: Float32s) -> Float32s:
        tile: Float32s = vector[self.start : self.start + self.size].reshape(
            self.rows, self.columns
        )
        return tile

    @property
    def units(self) -> slice:
        """Of each row, or the one of all rows."""
        return slice(self.unit, self.unit + (self.rows if self.record else 1))

    def unit_of(self, row: int) -> int:
        return self.unit + row if self.record else self.unit


class _Plan(NamedTuple):
    tiles: tuple[_Tile, ...]
    units: tuple[tuple[_Tile, ...], ...]
    """The same, those together that are of one unit, or of the same small ones."""
    values: int
    bytes: int


@lru_cache(maxsize=256)
def _plan(codec: _BlockCodec, sizes: tuple[int, ...]) -> _Plan:
    tiles = tuple(_tiles(codec, sizes))
    units = tuple(tuple(found) for _, found in groupby(tiles, key=lambda tile: tile.unit))
    return _Plan(tiles, units, sum(sizes), codec.encoded_size(sizes))


def _tiles(codec: _BlockCodec, sizes: tuple[int, ...]) -> Iterator[_Tile]:
    unit = start = at = 0
    while unit < len(sizes):
        size = sizes[unit]
        if size <= BLOCK:
            record = 4 + codec.code_bytes(size)
            count = 1
            most = TILE // max(1, size)
            while count < most and unit + count < len(sizes) and sizes[unit + count] == size:
                count += 1
            if size:
                yield _Tile(unit, start, count, size, at, at + 4, record)
                at += record * count
            unit += count
            start += size * count
            continue
        blocks, rest = divmod(size, BLOCK)
        codes_at = at + 4 * (blocks + bool(rest))
        code_bytes = codec.code_bytes(BLOCK)
        for first in range(0, blocks, TILE_BLOCKS):
            rows = min(TILE_BLOCKS, blocks - first)
            yield _Tile(unit, start + first * BLOCK, rows, BLOCK, at + 4 * first, codes_at, 0)
            codes_at += rows * code_bytes
        if rest:
            yield _Tile(unit, start + blocks * BLOCK, 1, rest, at + 4 * blocks, codes_at, 0)
            codes_at += codec.code_bytes(rest)
        at = codes_at
        unit += 1
        start += size


def _scales_of(data: Bytes, tiles: Sequence[_Tile]) -> NDArray[np.float32]:
    """The scales of the tiles of a unit, which follow one another, as a view."""
    first, last = tiles[0], tiles[-1]
    if first.record:
        return _view(data, first, first.record - 4)[0]
    return data[first.scales_at : last.scales_at + 4 * last.rows].view("<f4")


def _view(data: Bytes, tile: _Tile, code_bytes: int) -> tuple[NDArray[np.float32], Bytes]:
    """The scales and the codes of a tile, as views."""
    if tile.record:
        whole = data[tile.scales_at : tile.scales_at + tile.rows * tile.record]
        records = whole.reshape(tile.rows, tile.record)
        return records[:, :4].view("<f4")[:, 0], records[:, 4:]
    scales = data[tile.scales_at : tile.scales_at + 4 * tile.rows].view("<f4")
    codes = data[tile.codes_at : tile.codes_at + tile.rows * code_bytes]
    return scales, codes.reshape(tile.rows, code_bytes)


@lru_cache(maxsize=256)
def _row_starts(rows: int, columns: int) -> NDArray[np.intp]:
    """For ``reduceat``, which is faster than a reduction along an axis."""
    return np.arange(0, rows * columns, columns)


def _peaks(values: Float32s, starts: NDArray[np.intp]) -> Float32s:
    """The absolute maximum of each row; NaN where there is one.

    By their bits, which takes three quarters of the time: without the sign they are ordered as
    what they stand for is, and NaN is above everything. As signed numbers the highest are those of
    the largest positive value, as unsigned ones those of the largest negative one, if there is any.
    """
    bits = values.view(np.int32)
    peaks = np.maximum.reduceat(bits, starts)
    negative = np.maximum.reduceat(bits.view(np.uint32), starts).view(np.int32)
    np.maximum(peaks & _MAGNITUDE, negative & _MAGNITUDE, out=peaks)
    return peaks.view(np.float32)


def _require_size(vector: Float32s, sizes: Sequence[int]) -> None:
    if vector.size != sum(sizes):
        raise ValueError(f"a vector of {vector.size} values for units of {sum(sizes)}")


def _bytes_of(data: Buffer) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _checked(codec: str, data: Buffer, expected: int) -> Bytes:
    octets = _bytes_of(data)
    if octets.size != expected:
        raise BadPayload(codec, f"{octets.size} bytes; the layout says {expected}")
    return octets


# Codecs with a scale for each block


class _BlockCodec(ABC):
    """A scale for each block of 1024 values; subclasses say how a scaled value becomes a code."""

    name: str
    signed_zero: ClassVar[bool] = False
    """Whether it shows in the code if a zero is negative."""

    @property
    @abstractmethod
    def peak_of_scale(self) -> float: ...

    @property
    @abstractmethod
    def scale_safe(self) -> float:
        """Below this scale every code decodes to a finite value."""

    @abstractmethod
    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of one block."""

    @abstractmethod
    def error_bound(self, peak: float) -> float: ...

    @abstractmethod
    def _scales(self, peaks: Float32s) -> Float32s:
        """The scales of blocks with these absolute maxima."""

    @abstractmethod
    def _pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        """Write the codes of a tile, which may lie in ``scratch.first``; ``second`` is free."""

    @abstractmethod
    def _unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        """out = codes * factors, a factor for each row."""

    def encoded_size(self, sizes: Sequence[int]) -> int:
        full = 4 + self.code_bytes(BLOCK)
        total = 0
        for size in sizes:
            blocks, rest = divmod(size, BLOCK)
            total += blocks * full + (4 + self.code_bytes(rest) if rest else 0)
        return total

    def encode(self, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch) -> None:
        self._encode(sizes, out, scratch, lambda tile: tile.of(values), values.size)

    def encode_difference(
        self, base: Float32s, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch
    ) -> None:
        def difference(tile: _Tile) -> Float32s:
            made = scratch.first[: tile.size].reshape(tile.rows, tile.columns)
            np.subtract(tile.of(base), tile.of(values), out=made)
            return made

        self._encode(sizes, out, scratch, difference, values.size)

    def encode_sum(
        self,
        payloads: Sequence[Buffer],
        weights: Sequence[float],
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
    ) -> None:
        size = self.encoded_size(sizes)
        first, *others = [
            (_checked(self.name, payload, size), np.float32(weight))
            for payload, weight in zip(payloads, weights, strict=True)
        ]

        def weighted(tile: _Tile, data: Bytes, weight: np.float32, into: Float32s) -> Float32s:
            scales, codes = _view(data, tile, self.code_bytes(tile.columns))
            values = into[: tile.size].reshape(tile.rows, tile.columns)
            factors = np.multiply(scales, weight, dtype=np.float32)
            self._unpack(codes, factors, values, scratch)
            return values

        def added(tile: _Tile) -> Float32s:
            total = weighted(tile, *first, scratch.first)
            if self.signed_zero:
                np.add(total, _ZERO, out=total)  # a sum from zero has no negative zero
            for data, weight in others:
                np.add(total, weighted(tile, data, weight, scratch.second), out=total)
            return total

        self._encode(sizes, out, scratch, added, sum(sizes))

    def _encode(
        self,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        source: Callable[[_Tile], Float32s],
        count: int,
    ) -> None:
        plan = _plan(self, tuple(sizes))
        target = _bytes_of(out)
        if target.size != plan.bytes or count != plan.values:
            raise ValueError(
                f"{count} values into {target.size} bytes; the units hold {plan.values} values, "
                f"which are {plan.bytes} bytes in {self.name}"
            )
        with arithmetic():
            for tile in plan.tiles:
                values = source(tile)
                peaks = _peaks(values.reshape(-1), _row_starts(tile.rows, tile.columns))
                if not np.maximum.reduce(peaks) <= _FLOAT_MAX:  # true for NaN too
                    raise NotFinite(tile.unit_of(int(np.argmin(np.isfinite(peaks)))))
                np.maximum(peaks, PEAK_MIN, out=peaks)
                scales, codes = _view(target, tile, self.code_bytes(tile.columns))
                scales[:] = self._scales(peaks)
                self._pack(values, peaks, codes, scratch)

    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        plan = _plan(self, tuple(sizes))
        octets = _checked(self.name, data, plan.bytes)
        with arithmetic():
            for tiles in plan.units:
                scales = _scales_of(octets, tiles)
                good = (scales >= 0) & np.isfinite(scales)
                if not good.all():
                    row = int(np.argmin(good))
                    raise BadPayload(
                        self.name,
                        f"unit {tiles[0].unit_of(row)} has the scale {float(scales[row])}",
                    )
                if scales.max() >= self.scale_safe:
                    self._refuse_overflow(octets, tiles, scratch)

    def _refuse_overflow(self, data: Bytes, tiles: Sequence[_Tile], scratch: Scratch) -> None:
        for tile in tiles:
            scales, codes = _view(data, tile, self.code_bytes(tile.columns))
            work = scratch.first[: tile.size].reshape(tile.rows, tile.columns)
            self._unpack(codes, scales.astype(np.float32), work, scratch)
            if not np.isfinite(work).all():
                raise BadPayload(self.name, f"unit {tile.unit} overflows")

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        with arithmetic():
            for tile, codes, factors in self._read(data, sizes, 1.0, out.size):
                self._unpack(codes, factors, tile.of(out), scratch)

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        for tile, codes, factors in self._read(data, sizes, weight, sum(sizes)):
            values = scratch.first[: tile.size]
            self._unpack(codes, factors, values.reshape(tile.rows, tile.columns), scratch)
            yield slice(tile.start, tile.start + tile.size), values

    def decode_add(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        accumulator: Float32s,
        scratch: Scratch,
    ) -> None:
        _require_size(accumulator, sizes)
        with arithmetic():
            for part, values in self.pieces(data, sizes, weight, scratch):
                np.add(accumulator[part], values, out=accumulator[part])

    def _read(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, count: int
    ) -> Iterator[tuple[_Tile, Bytes, Float32s]]:
        plan = _plan(self, tuple(sizes))
        octets = _checked(self.name, data, plan.bytes)
        if count != plan.values:
            raise ValueError(f"a vector of {count} values for units of {plan.values}")
        rounded = np.asarray(weight, np.float32)
        for tile in plan.tiles:
            scales, codes = _view(octets, tile, self.code_bytes(tile.columns))
            mine = rounded[tile.units] if rounded.ndim else rounded
            yield tile, codes, np.multiply(scales, mine, dtype=np.float32)


class _Whole(_BlockCodec):
    """Whole numbers from -``steps`` to ``steps`` times absmax / ``steps``."""

    steps: ClassVar[int]

    def __init__(self) -> None:
        self._scale_max = np.nextafter(_FLOAT_MAX / np.float32(self.steps), _ZERO)
        """Times ``steps`` it is finite, however that is rounded."""

    @property
    def peak_of_scale(self) -> float:
        return self.steps + 1.0

    @property
    def scale_safe(self) -> float:
        return float(_FLOAT_MAX) / (self.steps + 1)

    def error_bound(self, peak: float) -> float:
        # Half a step; the rest is for the rounding of scale, quotient and product.
        return max(peak, float(PEAK_MIN)) / (2 * self.steps) * (1 + 2.0**-13)

    def _scales(self, peaks: Float32s) -> Float32s:
        scales: Float32s = peaks / np.float32(self.steps)
        np.minimum(scales, self._scale_max, out=scales)
        return scales

    def _codes(self, tile: Float32s, peaks: Float32s, scratch: Scratch) -> NDArray[np.int32]:
        """The codes, in the lowest byte of each. There is nothing to clip: |value| <= peak."""
        scaled: Float32s = scratch.first[: tile.size].reshape(tile.shape)
        np.multiply(tile, (np.float32(self.steps) / peaks)[:, None], out=scaled)
        np.add(scaled, _UNITS_LAST, out=scaled)
        return scaled.view(np.int32)


class _Int8(_Whole):
    """Error at most absmax / 254."""

    name = "int8"
    steps = 127

    def code_bytes(self, columns: int) -> int:
        return columns

    def _pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        codes.view(np.int8)[:] = self._codes(tile, peaks, scratch)

    def _unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        np.multiply(codes.view(np.int8), factors[:, None], out=out)


class _Int4(_Whole):
    """Error at most absmax / 14.

    A byte holds a value of the block's first half (low four bits, plus 8) and one of its second
    half (high four bits, signed), so that both are read in runs.
    """

    name = "int4"
    steps = 7

    def code_bytes(self, columns: int) -> int:
        return (columns + 1) // 2

    def _pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        rounded = self._codes(tile, peaks, scratch)
        # Halves apart: what is not interleaved is worked on in one run.
        half = codes.shape[1]
        low = scratch.bytes[: codes.size].reshape(codes.shape)
        high = scratch.bytes[codes.size : rounded.size].reshape(len(codes), rounded.shape[1] - half)
        low[:] = rounded[:, :half]
        high[:] = rounded[:, half:]
        np.multiply(high, np.int8(16), out=high)  # five times as fast as a shift
        paired = low[:, : high.shape[1]]
        np.add(paired, high, out=paired)  # from -119 to 119
        np.add(low, np.int8(8), out=codes.view(np.int8))

    def _unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        signed = codes.view(np.int8)
        half = codes.shape[1]
        part = scratch.bytes[: codes.size].reshape(codes.shape)
        np.bitwise_and(signed, np.int8(15), out=part)
        np.subtract(part, np.int8(8), out=part)
        out[:, :half] = part
        np.right_shift(signed, np.int8(4), out=part)
        out[:, half:] = part[:, : out.shape[1] - half]
        np.multiply(out, factors[:, None], out=out)


class _Float16(_BlockCodec):
    """IEEE half precision of value / scale; the scale is a power of two.

    It puts absmax between 2^14 and 2^15: nothing overflows, however large, and little is lost,
    however small. The error is at most 2^-11 of the value, or 2^-38 of absmax for values below
    2^-28 of it. numpy converts halves one by one; here bits are moved, many at a time.
    """

    name = "f16"
    peak_of_scale = 2.0**15
    scale_safe = 2.0**110
    signed_zero = True

    _REBIAS = np.float32(2.0**-112)
    """Gives a half's exponent to a float: then its bits, shifted by 13, are the half's."""
    _UNBIAS = np.float32(2.0**112)
    _LARGEST = np.float32((2 - 2.0**-10) * 2.0**127)
    """Larger floats would be rounded up to infinity."""

    def code_bytes(self, columns: int) -> int:
        return 2 * columns

    def error_bound(self, peak: float) -> float:
        return max(peak, float(PEAK_MIN)) * 2.0**-11

    def _scales(self, peaks: Float32s) -> Float32s:
        powers = (peaks.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        scales: Float32s = powers * np.float32(2.0**-14)
        return scales

    def _pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        scaled: Float32s = scratch.first[: tile.size].reshape(tile.shape)
        # Multiplying by powers of two is exact, in one step or in two.
        inverse: Float32s = np.divide(1, self._scales(peaks), dtype=np.float32)
        if peaks.max() < 2.0**26:
            np.multiply(inverse, self._REBIAS, out=inverse)
            np.multiply(tile, inverse[:, None], out=scaled)
        else:
            np.clip(tile, -self._LARGEST, self._LARGEST, out=scaled)
            np.multiply(scaled, inverse[:, None], out=scaled)
            np.multiply(scaled, self._REBIAS, out=scaled)
        bits = scaled.view(np.uint32)
        negative = scratch.bytes[: scaled.size].reshape(scaled.shape)
        signs = scratch.second[: scaled.size].view(np.uint16)[: scaled.size].reshape(scaled.shape)
        np.signbit(scaled, out=negative.view(np.bool_))
        np.copyto(signs, negative, casting="unsafe")
        np.multiply(signs, np.uint16(0x8000), out=signs)
        np.add(bits, np.uint32(0x1000), out=bits)  # round to nearest, halves away from zero
        np.right_shift(bits, np.uint32(13), out=bits)
        halves = codes.view("<u2")
        np.copyto(halves, bits, casting="unsafe")  # drops the float's own sign
        np.bitwise_or(halves, signs, out=halves)

    def _unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        bits = out.view(np.int32)
        np.copyto(bits, codes.view("<i2"))
        np.left_shift(bits, np.int32(13), out=bits)
        np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # the sign once, not four times
        if factors.max() < 2.0**15:
            np.multiply(out, (factors * self._UNBIAS)[:, None], out=out)
        else:
            np.multiply(out, self._UNBIAS, out=out)
            np.multiply(out, factors[:, None], out=out)


# The plain one


class _Float32:
    """The values themselves."""

    name = "f32"
    peak_of_scale = 1.0

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return 4 * sum(sizes)

    def error_bound(self, peak: float) -> float:
        return 0.0

    def encode(self, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch) -> None:
        target = self._target(out, sizes, values.size)
        for part in _parts(values.size):
            np.copyto(target[part], values[part])
            self._refuse_not_finite(target[part], part.start, sizes)

    def encode_difference(
        self, base: Float32s, values: Float32s, sizes: Sequence[int], out: Buffer, scratch: Scratch
    ) -> None:
        target = self._target(out, sizes, values.size)
        with arithmetic():
            for part in _parts(values.size):
                np.subtract(base[part], values[part], out=target[part])
                self._refuse_not_finite(target[part], part.start, sizes)

    def encode_sum(
        self,
        payloads: Sequence[Buffer],
        weights: Sequence[float],
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
    ) -> None:
        target = self._target(out, sizes, sum(sizes))
        given = [
            (self._source(payload, sizes, target.size), np.float32(weight))
            for payload, weight in zip(payloads, weights, strict=True)
        ]
        with arithmetic():
            for part in _parts(target.size):
                total = target[part]
                total.fill(0)
                for source, weight in given:
                    work = scratch.first[: total.size]
                    np.multiply(source[part], weight, out=work)
                    np.add(total, work, out=total)
                self._refuse_not_finite(total, part.start, sizes)

    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        octets = _checked(self.name, data, self.encoded_size(sizes))
        try:
            for part in _parts(octets.size // 4):
                self._refuse_not_finite(octets.view("<f4")[part], part.start, sizes)
        except NotFinite as error:
            raise BadPayload(self.name, f"unit {error.unit} is not finite") from None

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        source = self._source(data, sizes, out.size)
        np.copyto(out, source)

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        source = self._source(data, sizes, sum(sizes))
        rounded = np.asarray(weight, np.float32)
        spread = np.repeat(rounded, sizes) if rounded.ndim else None
        for part in _parts(source.size):
            values = scratch.first[: part.stop - part.start]
            np.multiply(source[part], rounded if spread is None else spread[part], out=values)
            yield part, values

    def decode_add(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        accumulator: Float32s,
        scratch: Scratch,
    ) -> None:
        _require_size(accumulator, sizes)
        with arithmetic():
            for part, values in self.pieces(data, sizes, weight, scratch):
                np.add(accumulator[part], values, out=accumulator[part])

    def _target(self, out: Buffer, sizes: Sequence[int], count: int) -> Float32s:
        target = _bytes_of(out)
        if target.size != self.encoded_size(sizes) or count != sum(sizes):
            raise ValueError(
                f"{count} values into {target.size} bytes; the units hold {sum(sizes)} values"
            )
        return target.view("<f4")

    def _source(self, data: Buffer, sizes: Sequence[int], count: int) -> Float32s:
        octets = _checked(self.name, data, self.encoded_size(sizes))
        if count != sum(sizes):
            raise ValueError(f"a vector of {count} values for units of {sum(sizes)}")
        return octets.view("<f4")

    def _refuse_not_finite(self, values: Float32s, start: int, sizes: Sequence[int]) -> None:
        """``values`` begin ``start`` values into the units."""
        finite = np.isfinite(values)
        if not finite.all():
            at = start + int(np.argmin(finite))
            raise NotFinite(int(np.searchsorted(np.cumsum(sizes), at, side="right")))


def _parts(size: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, size)) for start in range(0, size, TILE))


for _codec in (_Float32(), _Float16(), _Int8(), _Int4()):
    register(_codec)

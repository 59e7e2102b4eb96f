"""Codecs with a scale for each block of 1024 values: f16, int8, int4 and int2.

A value is decoded as ``code * (scale * weight)``: two multiplications and nothing else, so the
result is bit-exact on every machine. ``averaging.numbers.tiles`` describes the format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from averaging.errors import BadPayload, NotFinite
from averaging.numbers.arrays import Buffer, Bytes, Float32s, Float64s, arithmetic
from averaging.numbers.codec import (
    BLOCK,
    Addends,
    Codec,
    Scratch,
    TileReader,
    as_bytes,
    checked_bytes,
)
from averaging.numbers.tiles import Tile, peaks_of, plan_of, row_starts, scales_of, view_of

PEAK_MIN = np.float32(2.0**-100)
"""Smallest absolute maximum that a block is coded with, so that scales stay normal."""

FLOAT_MAX = np.finfo(np.float32).max

_ZERO = np.float32(0)

UNITS_LAST = np.float32(3 << 22)
"""Added to a far smaller value, it leaves the value, rounded half to even, in the lowest bits. That
is faster than ``rint``, and integers are narrowed faster than floats.
"""


class ScaledCodec(Codec):
    """A codec with a scale for each block; subclasses define how a tile becomes bytes."""

    signed_zero: ClassVar[bool] = False
    """True if the code of a negative zero differs from that of a positive one."""

    scale_safe: float
    """Below this scale every code decodes to a finite value."""

    @abstractmethod
    def code_bytes(self, columns: int) -> int:
        """Return the number of bytes of the codes of one block."""

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
        full = 4 + self.code_bytes(BLOCK)
        total = 0
        for size in sizes:
            blocks, rest = divmod(size, BLOCK)
            total += blocks * full + (4 + self.code_bytes(rest) if rest else 0)
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
        first, *others = [
            source.tile_reader(payload, sizes, weight, scratch)
            for payload, weight in zip(given.payloads, given.weights, strict=True)
        ]

        def added(number: int, tile: Tile) -> Float32s:
            total, more = scratch.first[: tile.size], scratch.second[: tile.size]
            first(number, tile.values, total)
            if self.signed_zero:
                np.add(total, _ZERO, out=total)  # a sum from zero has no negative zero
            for read in others:
                read(number, tile.values, more)
                np.add(total, more, out=total)
            if rest is not None:
                np.add(total, _ZERO, out=rest[tile.values])
            return total.reshape(tile.rows, tile.columns)

        self._encode(sizes, out, scratch, added, sum(sizes))
        if rest is not None:
            self.decode_subtract(out, sizes, rest, rest, scratch)

    def tile_reader(
        self, data: Buffer, sizes: Sequence[int], weight: float, scratch: Scratch
    ) -> TileReader:
        plan = plan_of(self, tuple(sizes))
        octets = checked_bytes(self.name, data, plan.bytes)
        rounded = np.float32(weight)

        def read(number: int, _: slice, into: Float32s) -> None:
            tile = plan.tiles[number]
            scales, codes = view_of(octets, tile, self.code_bytes(tile.columns))
            factors = np.multiply(scales, rounded, dtype=np.float32)
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
                scales, codes = view_of(target, tile, self.code_bytes(tile.columns))
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
        plan = plan_of(self, tuple(sizes))
        octets = checked_bytes(self.name, data, plan.bytes)
        with arithmetic():
            for tiles in plan.units:
                scales = scales_of(octets, tiles)
                highest = np.maximum.reduce(scales)
                # Both are NaN if one scale is.
                if not (np.minimum.reduce(scales) >= 0 and highest <= FLOAT_MAX):
                    row = int(np.argmin((scales >= 0) & np.isfinite(scales)))
                    raise BadPayload(
                        self.name,
                        f"unit {tiles[0].unit_of(row)} has the scale {float(scales[row])}",
                    )
                if highest >= self.scale_safe:
                    self._refuse_overflow(octets, tiles, scratch)

    def _refuse_overflow(self, data: Bytes, tiles: Sequence[Tile], scratch: Scratch) -> None:
        for tile in tiles:
            scales, codes = view_of(data, tile, self.code_bytes(tile.columns))
            work = scratch.first[: tile.size].reshape(tile.rows, tile.columns)
            self.read(codes, scales, scales.astype(np.float32), work, scratch)
            if not np.isfinite(work).all():
                raise BadPayload(self.name, f"unit {tile.unit} overflows")

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        with arithmetic():
            for tile, codes, scales, factors in self._read(data, sizes, 1.0, out.size):
                self.read(codes, scales, factors, tile.of(out), scratch)

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        for tile, codes, scales, factors in self._read(data, sizes, weight, sum(sizes)):
            values = scratch.first[: tile.size]
            self.read(codes, scales, factors, values.reshape(tile.rows, tile.columns), scratch)
            yield tile.values, values

    def _read(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, count: int
    ) -> Iterator[tuple[Tile, Bytes, NDArray[np.float32], Float32s]]:
        plan = plan_of(self, tuple(sizes))
        octets = checked_bytes(self.name, data, plan.bytes)
        if count != plan.values:
            raise ValueError(f"a vector of {count} values for units of {plan.values}")
        rounded = np.asarray(weight, np.float32)
        for tile in plan.tiles:
            scales, codes = view_of(octets, tile, self.code_bytes(tile.columns))
            mine = rounded[tile.units] if rounded.ndim else rounded
            yield tile, codes, scales, np.multiply(scales, mine, dtype=np.float32)


class BlockCodec(ScaledCodec):
    """A codec of scale and codes; subclasses define how a scaled value becomes a code."""

    @abstractmethod
    def scales_for(self, peaks: Float32s) -> Float32s:
        """Return the scales of blocks with these absolute maxima."""

    @abstractmethod
    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        """Write the codes of a tile, which may be ``scratch.first``; ``second`` is free."""

    @abstractmethod
    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        """Set ``out`` to codes * factors, with one factor per row."""

    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        scales[:] = self.scales_for(peaks)
        self.pack(tile, peaks, codes, scratch)

    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        self.unpack(codes, factors, out, scratch)


class WholeNumberCodec(BlockCodec):
    """Codes are whole numbers from -``steps`` to ``steps``; the scale is absmax / ``steps``."""

    steps: ClassVar[int]

    def __init__(self) -> None:
        self.peak_of_scale = self.steps + 1.0
        self.scale_safe = float(FLOAT_MAX) / (self.steps + 1)
        self.scale_max = np.nextafter(FLOAT_MAX / np.float32(self.steps), _ZERO)
        """Times ``steps`` it is finite, however that is rounded."""

    def error_bound(self, peak: float) -> float:
        # Half a step, and a margin for the rounding of scale, quotient and product.
        return max(peak, float(PEAK_MIN)) / (2 * self.steps) * (1 + 2.0**-13)

    def scales_for(self, peaks: Float32s) -> Float32s:
        scales: Float32s = peaks / np.float32(self.steps)
        np.minimum(scales, self.scale_max, out=scales)
        return scales

    def codes(self, tile: Float32s, peaks: Float32s, scratch: Scratch) -> NDArray[np.int32]:
        """Return the codes, each in its lowest byte. Nothing is clipped: |value| <= peak."""
        return whole_numbers(self.steps, tile, peaks, scratch)


def whole_numbers(
    steps: int, tile: Float32s, peaks: Float32s, scratch: Scratch
) -> NDArray[np.int32]:
    """Return values * steps / peak, rounded, each in its lowest byte, in ``scratch.first``."""
    scaled: Float32s = scratch.first[: tile.size].reshape(tile.shape)
    np.multiply(tile, (np.float32(steps) / peaks)[:, None], out=scaled)
    np.add(scaled, UNITS_LAST, out=scaled)
    return scaled.view(np.int32)


class Int8(WholeNumberCodec):
    """One byte per value. The error is at most absmax / 254."""

    name = "int8"
    steps = 127

    def code_bytes(self, columns: int) -> int:
        return columns

    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        codes.view(np.int8)[:] = self.codes(tile, peaks, scratch)

    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        np.multiply(codes.view(np.int8), factors[:, None], out=out)


class Int4(WholeNumberCodec):
    """Half a byte per value. The error is at most absmax / 14.

    A byte holds one value of the block's first half (low four bits, plus 8) and one of its second
    half (high four bits, signed), so that each half is read as a contiguous run.
    """

    name = "int4"
    steps = 7

    def code_bytes(self, columns: int) -> int:
        return (columns + 1) // 2

    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        rounded = self.codes(tile, peaks, scratch)
        # The two halves are not interleaved, so each is processed as one contiguous run.
        half = codes.shape[1]
        low = scratch.bytes[: codes.size].reshape(codes.shape)
        high = scratch.bytes[codes.size : rounded.size].reshape(len(codes), rounded.shape[1] - half)
        low[:] = rounded[:, :half]
        high[:] = rounded[:, half:]
        np.multiply(high, np.int8(16), out=high)  # five times as fast as a shift
        paired = low[:, : high.shape[1]]
        np.add(paired, high, out=paired)  # from -119 to 119
        np.add(low, np.int8(8), out=codes.view(np.int8))

    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        signed = codes.view(np.int8)
        half = codes.shape[1]
        part = scratch.bytes[: codes.size].reshape(codes.shape)
        np.bitwise_and(signed, np.int8(15), out=part)
        np.subtract(part, np.int8(8), out=part)
        out[:, :half] = part
        np.right_shift(signed, np.int8(4), out=part)
        out[:, half:] = part[:, : out.shape[1] - half]
        np.multiply(out, factors[:, None], out=out)


class Float16(BlockCodec):
    """IEEE half precision of value / scale; the scale is a power of two.

    The scale puts absmax between 2^14 and 2^15, so nothing overflows and small values keep their
    precision. The error is at most 2^-11 of the value, or 2^-38 of absmax for values below 2^-28 of
    it. numpy converts halves one by one; moving the bits converts many at a time.
    """

    name = "f16"
    peak_of_scale = 2.0**15
    scale_safe = 2.0**110
    signed_zero = True

    REBIAS = np.float32(2.0**-112)
    """Shifts a float's exponent to a half's: the bits, shifted right by 13, are then the half's."""
    UNBIAS = np.float32(2.0**112)
    LARGEST = np.float32((2 - 2.0**-10) * 2.0**127)
    """Larger floats would be rounded up to infinity."""

    def code_bytes(self, columns: int) -> int:
        return 2 * columns

    def error_bound(self, peak: float) -> float:
        return max(peak, float(PEAK_MIN)) * 2.0**-11

    def scales_for(self, peaks: Float32s) -> Float32s:
        powers = (peaks.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        scales: Float32s = powers * np.float32(2.0**-14)
        return scales

    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        scaled: Float32s = scratch.first[: tile.size].reshape(tile.shape)
        # Multiplying by powers of two is exact, in one step or in two.
        inverse: Float32s = np.divide(1, self.scales_for(peaks), dtype=np.float32)
        if peaks.max() < 2.0**26:
            np.multiply(inverse, self.REBIAS, out=inverse)
            np.multiply(tile, inverse[:, None], out=scaled)
        else:
            np.clip(tile, -self.LARGEST, self.LARGEST, out=scaled)
            np.multiply(scaled, inverse[:, None], out=scaled)
            np.multiply(scaled, self.REBIAS, out=scaled)
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

    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        bits = out.view(np.int32)
        np.copyto(bits, codes.view("<i2"))
        np.left_shift(bits, np.int32(13), out=bits)
        np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # the sign once, not four times
        if factors.max() < 2.0**15:
            np.multiply(out, (factors * self.UNBIAS)[:, None], out=out)
        else:
            np.multiply(out, self.UNBIAS, out=out)
            np.multiply(out, factors[:, None], out=out)


_STEPS: Final = 127

_K_BITS = np.uint32(_STEPS)

SCALE_MAX = np.float32((1 - 2.0**-15) * float(FLOAT_MAX) / _STEPS)
"""Times 127 it is finite, whatever its lowest bits are."""

_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int8)
_EIGHT_SIGNS = np.ascontiguousarray(_SIGNS).view(np.uint64).reshape(-1)
"""Eight factors of 1 or -1, by the byte of the plane of signs that they are read from."""


class Int2(ScaledCodec):
    """A quarter of a byte per value. The error is at most absmax, and far less on average.

    Each block has two magnitudes, and each value a sign. Values are first rounded to whole numbers
    from -127 to 127, as in int8. Those above one and a half times the mean magnitude of their block
    form one bin, the others the second, and each bin decodes to the mean magnitude of its values:
    the larger one is ``127 * scale``, the smaller one ``k * scale``. The number ``k`` is in the
    seven lowest bits of the block's scale, where it changes the scale by less than 1/65536. So a
    block takes as many bytes beside its codes as in the other codecs, and a value is decoded as
    code times factor like theirs. A block of all zeros decodes to zeros.

    The sums are sums of whole numbers, which are the same in every order: a merged slice that is
    encoded again by another reducer has the same bytes. The codes are two planes of bits, first the
    signs and then the bins, each padded to whole bytes.

    That levels are the means of their bins follows MuLoCo (arXiv 2505.23725).
    """

    name = "int2"
    signed_zero = True
    peak_of_scale = _STEPS + 1.0
    scale_safe = float(FLOAT_MAX) / (_STEPS + 1)

    def code_bytes(self, columns: int) -> int:
        return 2 * _plane_bytes(columns)

    def error_bound(self, peak: float) -> float:
        return max(peak, float(PEAK_MIN)) * (1 + 2.0**-13)

    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        sizes = scratch.bytes[: tile.size].reshape(tile.shape)
        plane = _plane_bytes(tile.shape[1])
        # The sign of a small value counts too: without it all of them would become positive.
        codes[:, :plane] = np.packbits(np.signbit(tile, out=sizes.view(np.bool_)), axis=1)
        sizes[:] = whole_numbers(_STEPS, tile, peaks, scratch)
        np.abs(sizes, out=sizes)
        total = _row_sums(sizes)
        limits = np.minimum(3 * total // (2 * tile.shape[1]), _STEPS).astype(np.int8)
        flags = scratch.second.view(np.int8)[: tile.size].reshape(tile.shape)
        large = np.packbits(np.greater(sizes, limits[:, None], out=flags.view(np.bool_)), axis=1)
        codes[:, plane:] = large
        count = _row_sums(np.bitwise_count(large))
        above = _row_sums(np.multiply(sizes, flags, out=sizes))
        low = (total - above) / np.maximum(tile.shape[1] - count, 1)
        high = np.where(count, above / np.maximum(count, 1), np.where(low, low, _STEPS))
        scales.view("<u4")[:] = _heads(peaks, low, high)

    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        plane, columns = codes.shape[1] // 2, out.shape[1]
        low = (scales.view("<u4") & _K_BITS).astype(np.int8)
        sizes = np.unpackbits(codes[:, plane:], axis=1, count=columns).view(np.int8)
        np.multiply(sizes, (np.int8(_STEPS) - low)[:, None], out=sizes)
        np.add(sizes, low[:, None], out=sizes)
        # In rows of a few values the padding takes more room than there is.
        fits = 8 * plane * len(codes) <= scratch.bytes.size
        room = scratch.bytes if fits else np.empty(8 * plane * len(codes), np.int8)
        eights = room[: 8 * plane * len(codes)].view(np.uint64).reshape(-1, plane)
        np.take(_EIGHT_SIGNS, codes[:, :plane], out=eights, mode="clip")  # never clips; is faster
        signs = eights.view(np.int8)[:, :columns]
        np.multiply(sizes, signs, out=sizes)
        np.multiply(sizes, factors[:, None], out=out)


def _heads(peaks: Float32s, low: Float64s, high: Float64s) -> NDArray[np.uint32]:
    """Return the bits of the scales with ``k`` in them, for means in units of peak / 127."""
    scales = (peaks * (high / _STEPS**2)).astype(np.float32)
    np.minimum(scales, SCALE_MAX, out=scales)
    heads: NDArray[np.uint32] = scales.view(np.uint32) & ~_K_BITS
    return heads | np.rint(_STEPS * low / high).astype(np.uint32)


def _plane_bytes(columns: int) -> int:
    return (columns + 7) // 8


def _row_sums(values: NDArray[Any]) -> NDArray[np.int32]:
    sums: NDArray[np.int32] = np.add.reduce(values, axis=1, dtype=np.int32)
    return sums

"""The codecs f32, f16, int8, int4 and int2, and the table in which run files and commits find them.

All but f32 have a scale for each block of 1024 values. A value is decoded as ``code * (scale *
weight)``: two multiplications and nothing else, so the result is bit-exact on every machine.
``averaging.numbers.tiles`` describes the format.

To add one, derive a class from ``Codec`` or ``WholeNumberCodec`` and add an instance to the table
below, or call ``register`` from a plugin. ``tests/averaging/numbers/test_new_codec.py`` does it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from averaging.numbers.arrays import Bytes, Float32s, Float64s
from averaging.numbers.codec import FLOAT_MAX, PEAK_MIN, Codec, Scratch

UNITS_LAST = np.float32(3 << 22)
"""Added to a far smaller value, it leaves the value, rounded half to even, in the lowest bits. That
is faster than ``rint``, and integers are narrowed faster than floats.
"""


class WholeNumberCodec(Codec):
    """Codes are whole numbers from -``steps`` to ``steps``; the scale is absmax / ``steps``."""

    steps: ClassVar[int]

    def __init__(self) -> None:
        self.peak_of_scale = self.steps + 1.0
        self.scale_safe = float(FLOAT_MAX) / (self.steps + 1)
        self.scale_max = np.nextafter(FLOAT_MAX / np.float32(self.steps), np.float32(0))
        """Times ``steps`` it is finite, however that is rounded."""

    def error_bound(self, peak: float) -> float:
        # Half a step, and a margin for the rounding of scale, quotient and product.
        return max(peak, float(PEAK_MIN)) / (2 * self.steps) * (1 + 2.0**-13)

    @abstractmethod
    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        """Write the codes of a tile, which may be ``scratch.first``; ``second`` is free."""

    @abstractmethod
    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        """Set ``out`` to codes * factors, with one factor per row."""

    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        np.divide(peaks, np.float32(self.steps), out=scales)
        np.minimum(scales, self.scale_max, out=scales)
        self.pack(tile, peaks, codes, scratch)

    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        self.unpack(codes, factors, out, scratch)

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


class Float16(Codec):
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

    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        powers = (peaks.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        np.multiply(powers, np.float32(2.0**-14), out=scales)
        scaled: Float32s = scratch.first[: tile.size].reshape(tile.shape)
        # Multiplying by powers of two is exact, in one step or in two.
        inverse: Float32s = np.divide(1, scales, dtype=np.float32)
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

    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
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


class Int2(Codec):
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


class Float32(Codec):
    """Raw little-endian fp32, without scales and without error."""

    name = "f32"
    peak_of_scale = 1.0
    scale_safe = 0.0
    scale_bytes = 0
    signed_zero = True

    def code_bytes(self, columns: int) -> int:
        return 4 * columns

    def error_bound(self, peak: float) -> float:
        return 0.0

    def fill(
        self, tile: Float32s, peaks: Float32s, scales: Float32s, codes: Bytes, scratch: Scratch
    ) -> None:
        codes.view("<f4")[:] = tile

    def read(
        self, codes: Bytes, scales: Float32s, factors: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        np.multiply(codes.view("<f4"), factors[:, None], out=out)


# The table


_codecs: dict[str, Codec] = {
    codec.name: codec for codec in (Float32(), Float16(), Int8(), Int4(), Int2())
}


def register(codec: Codec) -> None:
    """Add a codec to the table. Raises ``ValueError`` if it is incomplete, or its name is taken."""
    needed = {*Codec.__annotations__, *vars(Codec)}
    lacks = sorted(each for each in needed if each[0] != "_" and not hasattr(codec, each))
    if lacks:
        raise ValueError(
            f"the codec {type(codec).__name__} lacks {', '.join(lacks)}: see the class Codec in "
            "averaging/numbers/codec.py"
        )
    if codec.name in _codecs:
        raise ValueError(f"a codec is named {codec.name!r} already")
    _codecs[codec.name] = codec


def replace(codec: Codec) -> None:
    """Put a codec into the table in place of the one of its name, which gives the same bits."""
    assert codec.name in _codecs
    _codecs[codec.name] = codec


def codec_named(name: str) -> Codec:
    """Return the codec of this name. Raises ``ValueError`` if there is none."""
    try:
        return _codecs[name]
    except KeyError:
        raise ValueError(
            f"no codec is named {name!r}; there are {', '.join(codec_names())}"
        ) from None


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs, the most exact one first."""
    return tuple(_codecs)

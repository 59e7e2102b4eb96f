"""The codec int2: for each block of 1024 values two magnitudes, and a sign for each value.

Values are first rounded to whole numbers from -127 to 127, as in int8. Those above one and a half
times the mean magnitude of their block form one bin, the others the second, and each bin decodes to
the mean magnitude of its values: the larger one is ``127 * scale``, the smaller one ``k * scale``.
The number ``k`` is in the seven lowest bits of the block's scale, where it changes the scale by
less than 1/65536. So a block takes as many bytes beside its codes as in the other codecs, and a
value is decoded as code times factor like theirs. A block of all zeros decodes to zeros.

The sums are sums of whole numbers, which are the same in every order: a merged slice that is
encoded again by another reducer has the same bytes. The codes are two planes of bits, first the
signs and then the bins, each padded to whole bytes.

That levels are the means of their bins follows MuLoCo (arXiv 2505.23725).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from averaging.numbers.arrays import Bytes, Float32s, Float64s
from averaging.numbers.block_codecs import FLOAT_MAX, PEAK_MIN, ScaledCodec, whole_numbers
from averaging.numbers.codec import Scratch

_STEPS: Final = 127

_K_BITS = np.uint32(_STEPS)

SCALE_MAX = np.float32((1 - 2.0**-15) * float(FLOAT_MAX) / _STEPS)
"""Times 127 it is finite, whatever its lowest bits are."""

_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int8)
_EIGHT_SIGNS = np.ascontiguousarray(_SIGNS).view(np.uint64).reshape(-1)
"""Eight factors of 1 or -1, by the byte of the plane of signs that they are read from."""


class Int2(ScaledCodec):
    """A quarter of a byte per value. The error is at most absmax, and far less on average."""

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

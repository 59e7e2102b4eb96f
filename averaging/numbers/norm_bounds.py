"""Upper bounds on norms that are read from a payload's scales, without decoding its codes.

They compare contributions with each other and with what earlier merges moved
(``averaging.rules.usual_norms``), so that judging an upload costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.codec import BLOCK, Codec
from averaging.numbers.codecs import codec_named


def squares_at_most(codec: Codec, data: memoryview, sizes: Sequence[int]) -> Float64s:
    """Return for each unit an upper bound on its sum of squares, about ten times the sum itself.

    Only scales are read, as if every value of a block were as large as the scale allows. Raw fp32
    has no scales; there the largest value of each block is used.
    """
    octets = np.frombuffer(data, np.uint8)
    blocks = _blocks(codec.name, tuple(sizes))
    if not blocks.counts.size:
        return np.zeros(len(sizes))
    if codec.name == "f32":
        values = octets.view("<f4")
        highest = np.maximum.reduceat(values, blocks.starts)
        peaks = np.maximum(highest, -np.minimum.reduceat(values, blocks.starts))
    else:
        peaks = octets[blocks.scales_at].reshape(-1).view("<f4")
    squares = np.square(codec.peak_of_scale * peaks.astype(np.float64)) * blocks.counts
    return np.bincount(blocks.units, squares, minlength=len(sizes)).astype(np.float64)


def norm_at_most(values: Float32s, sizes: Sequence[int]) -> float:
    """Return ``squares_at_most`` as a norm, for values that have not been encoded."""
    data = values.data.cast("B")
    return math.sqrt(float(squares_at_most(codec_named("f32"), data, sizes).sum()))


class _Blocks(NamedTuple):
    """The blocks of a range of units, one after the other."""

    starts: NDArray[np.intp]
    """Index of the first value of each block."""
    scales_at: NDArray[np.intp] | slice
    """Offsets of the bytes of the scales; a single range if all blocks are of one unit."""
    counts: NDArray[np.intp]
    units: NDArray[np.intp]


@lru_cache(maxsize=256)
def _blocks(name: str, sizes: tuple[int, ...]) -> _Blocks:
    codec = codec_named(name)
    starts, scales_at, counts, units = [], [], [], []
    value = at = 0
    for unit, size in enumerate(sizes):
        for number, start in enumerate(range(0, size, BLOCK)):
            starts.append(value + start)
            scales_at.append(at + 4 * number)
            counts.append(min(BLOCK, size - start))
            units.append(unit)
        value += size
        at += codec.encoded_size((size,))
    where: NDArray[np.intp] | slice = np.array(scales_at, np.intp)[:, None] + np.arange(4)
    if len(set(units)) == 1:
        where = slice(scales_at[0], scales_at[-1] + 4)
    return _Blocks(
        np.array(starts, np.intp), where, np.array(counts, np.intp), np.array(units, np.intp)
    )

"""Arithmetic on arrays that gives the same bits on every machine.

Elementwise ufuncs are exact by IEEE 754 as long as a multiply and an add are two
calls, and nothing flushes subnormal numbers to zero. Sums are not: BLAS, ``np.dot``,
``linalg.norm`` and even ``np.sum`` choose their order by the build and the processor. Here the
order is written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from averaging.errors import SubnormalsFlushed

Float32s: TypeAlias = NDArray[np.float32]
"""A flat fp32 vector: a fragment, or a range of one."""
Float64s: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Encoded bytes. What is written to must be writable."""


SUM_TILE = 1 << 15
"""Values squared at a time: small enough for the cache. Part of what a sum's bits depend on."""


LINE_BYTES = 64
"""Vectors that begin at a cache line are worked on a third faster than ones that do not."""


def aligned(size: int) -> Bytes:
    """Uninitialised bytes that begin at a cache line. The array does not own its memory."""
    raw = np.empty(size + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return np.frombuffer(raw.data, np.uint8)[start : start + size]


BROADCAST_VALUES = 1024
"""Rows of at least as many values are multiplied by a factor each without copying the factors."""


@contextmanager
def arithmetic() -> Iterator[None]:
    """What tiles of blocks are worked on in: nothing warns, and factors of rows are not spread.

    By default numpy copies the operand of an elementwise function that is spread over rows of less
    than 8192 values into a buffer first, which takes as long as the multiplication.
    """
    with np.errstate(all="ignore"):
        np.setbufsize(BROADCAST_VALUES)  # part of what errstate puts back
        yield


def squared_norm(values: Float32s, work: Float64s | None = None) -> float:
    """The sum of squares in float64: the same bits everywhere.

    Each tile is folded in halves (elementwise adds only), tiles are added up
    from the first to the last. ``work`` of ``SUM_TILE`` values saves an allocation.
    """
    if work is None:
        work = np.empty(min(SUM_TILE, max(1, values.size)), np.float64)
    total = 0.0
    for start in range(0, values.size, SUM_TILE):
        tile = values[start : start + SUM_TILE]
        squares = work[: tile.size]
        np.copyto(squares, tile)
        np.multiply(squares, squares, out=squares)
        total += _fold(squares)
    return total


def norm(values: Float32s, work: Float64s | None = None) -> float:
    """The Euclidean norm: the square root of ``squared_norm``, correctly rounded."""
    return math.sqrt(squared_norm(values, work))


def squared_norms(rows: Float32s) -> Float64s:
    """``squared_norm`` of each row of a matrix. Rows are no longer than ``SUM_TILE``."""
    assert rows.shape[1] <= SUM_TILE
    terms = np.square(rows, dtype=np.float64)
    count = terms.shape[1]
    while count > 1:
        lower = (count + 1) // 2
        folded = terms[:, : count - lower]
        np.add(folded, terms[:, lower:count], out=folded)
        count = lower
    norms: Float64s = terms[:, 0] if terms.shape[1] else np.zeros(len(terms))
    return norms


def _fold(terms: Float64s) -> float:
    """Add up ``terms`` by adding their upper half to their lower one until one is left."""
    count = terms.size
    if not count:
        return 0.0
    while count > 1:
        lower = (count + 1) // 2
        np.add(terms[: count - lower], terms[lower:count], out=terms[: count - lower])
        count = lower
    return float(terms[0])


def check_subnormals() -> None:
    """Raise ``SubnormalsFlushed`` if this thread's arithmetic loses subnormal numbers.

    The setting belongs to a thread and is inherited by those that it starts; some libraries
    switch it. Call it once in each thread that does arithmetic others must repeat.
    """
    tiny = np.finfo(np.float32).smallest_subnormal
    for length in (1, 64):  # scalar and vector instructions
        smallest_normal = np.full(length, np.finfo(np.float32).smallest_normal)
        halves = np.multiply(smallest_normal, np.float32(0.5))
        if not np.all(halves.view(np.uint32) == 0x00400000):
            raise SubnormalsFlushed("results")
        doubled = np.add(np.full(length, tiny), np.full(length, tiny))
        if not np.all(doubled.view(np.uint32) == 2):
            raise SubnormalsFlushed("operands")
        widened = np.full(length, tiny).astype(np.float64)
        if not np.all(widened == 2.0**-149):
            raise SubnormalsFlushed("conversions")

"""Arithmetic on arrays that gives the same bits on every machine.

Elementwise ufuncs are exact by IEEE 754 as long as a multiply and an add are two calls and nothing
flushes subnormal numbers to zero. Sums are not: BLAS, ``np.dot``, ``linalg.norm`` and even
``np.sum`` choose an order that depends on the build and on the processor. The sums in this module
have a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from averaging.errors import SubnormalsFlushed

Float32s: TypeAlias = NDArray[np.float32]
"""A flat fp32 vector: a fragment, or a range of one."""
Float64s: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Encoded bytes. An output buffer must be writable."""


SUM_TILE = 1 << 15
"""Values squared at a time: few enough for the cache. The bits of a sum depend on it."""


LINE_BYTES = 64
"""Size of a cache line. Vectors that begin at one are processed a third faster."""


def aligned(size: int) -> Bytes:
    """Return uninitialised bytes that begin at a cache line. The array does not own its memory."""
    raw = np.empty(size + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return np.frombuffer(raw.data, np.uint8)[start : start + size]


BROADCAST_VALUES = 1024
"""Shortest rows that are multiplied by one factor each without a copy of the factors."""


class arithmetic:  # noqa: N801 # used like a function
    """Set numpy up for work on tiles: no warnings, and row factors are not copied.

    By default numpy copies an operand that is broadcast over rows of fewer than 8192 values into a
    buffer first, which takes as long as the multiplication.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = np.errstate(all="ignore")
        self._before.__enter__()
        np.setbufsize(BROADCAST_VALUES)  # part of what errstate puts back

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._before.__exit__(kind, error, trace)


def squared_norm(values: Float32s, work: Float64s | None = None) -> float:
    """Return the sum of squares in float64, with the same bits on every machine.

    Each tile is folded in halves (elementwise additions only), and tiles are added from the first
    to the last. ``work``, of ``SUM_TILE`` values, saves an allocation.
    """
    if work is None:
        work = np.empty(min(SUM_TILE, max(1, values.size)), np.float64)
    total = 0.0
    for start in range(0, values.size, SUM_TILE):
        total += _sum_of_squares(values[start : start + SUM_TILE], work)
    return total


def sum_of_squares(tile: Float32s, work: Float64s) -> float:
    """Return ``squared_norm`` of up to ``SUM_TILE`` values."""
    squares = work[: tile.size]
    np.copyto(squares, tile)
    np.multiply(squares, squares, out=squares)
    return _fold(squares)


_sum_of_squares: Callable[[Float32s, Float64s], float] = sum_of_squares


def sum_squares_with(function: Callable[[Float32s, Float64s], float]) -> None:
    """Use another function with the bits of ``sum_of_squares`` in its place."""
    global _sum_of_squares  # noqa: PLW0603
    _sum_of_squares = function


def norm(values: Float32s, work: Float64s | None = None) -> float:
    """Return the Euclidean norm: the square root of ``squared_norm``, correctly rounded."""
    return math.sqrt(squared_norm(values, work))


def squared_norms(rows: Float32s) -> Float64s:
    """Return ``squared_norm`` of each row of a matrix. Rows are no longer than ``SUM_TILE``."""
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
    """Return the sum of ``terms``, added in halves until one value is left."""
    count = terms.size
    if not count:
        return 0.0
    while count > 1:
        lower = (count + 1) // 2
        np.add(terms[: count - lower], terms[lower:count], out=terms[: count - lower])
        count = lower
    return float(terms[0])


def check_subnormals() -> None:
    """Raise ``SubnormalsFlushed`` if this thread's arithmetic flushes subnormal numbers to zero.

    The processor's setting belongs to a thread and is inherited by the threads that it starts; some
    libraries change it. Call this once in each thread whose results other peers must reproduce.
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


def uninitialised_floats(count: int) -> Float32s:
    return np.empty(count, np.float32)


def uninitialised(size: int) -> memoryview:
    """Return ``size`` uninitialised bytes. Zeroing a bytearray touches every page twice."""
    return np.empty(size, np.uint8).data

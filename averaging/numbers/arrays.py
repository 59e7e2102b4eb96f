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
Float32Rows: TypeAlias = NDArray[np.float32]
"""A contiguous fp32 matrix, whose rows are units or vectors."""
Float64s: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Encoded bytes. An output buffer must be writable."""


SUM_TILE = 1 << 15
"""Values squared at a time: few enough for the cache. The bits of a sum depend on it."""

WORK_VALUES = 4 * SUM_TILE
"""Values of several rows squared at a time, where rows are short."""


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


def squared_norms(rows: Float32Rows, work: Float64s, totals: Float64s) -> None:
    """Set ``totals`` to the sum of squares of each row in float64, the same bits on every machine.

    Each tile of a row is folded in halves (elementwise additions only), and tiles are added from
    the first to the last. ``work``: memory for ``WORK_VALUES`` values.
    """
    totals.fill(0.0)
    for start in range(0, rows.shape[1], SUM_TILE):
        tiles = rows[:, start : start + SUM_TILE]
        together = WORK_VALUES // tiles.shape[1]
        for first in range(0, len(tiles), together):
            some = slice(first, first + together)
            terms = work[: tiles[some].size].reshape(-1, tiles.shape[1])
            np.copyto(terms, tiles[some])
            np.multiply(terms, terms, out=terms)
            totals[some] += _folded(terms)


def _folded(terms: NDArray[np.float64]) -> Float64s:
    """Return the sum of each row of ``terms``, added in halves until one value is left."""
    count = terms.shape[1]
    while count > 1:
        lower = (count + 1) // 2
        upper = terms[:, : count - lower]
        np.add(upper, terms[:, lower:count], out=upper)
        count = lower
    sums: Float64s = terms[:, 0]
    return sums


SquaredNorms: TypeAlias = Callable[[Float32Rows, Float64s, Float64s], None]
_squared_norms: SquaredNorms = squared_norms


def take_squared_norms(function: SquaredNorms) -> None:
    """Use another function with the bits of ``squared_norms`` in its place."""
    global _squared_norms  # noqa: PLW0603
    _squared_norms = function


def norms(rows: Float32Rows, work: Float64s) -> Float64s:
    """Return the Euclidean norm of each row: the square root of its squared norm, rounded."""
    totals = np.empty(len(rows))
    _squared_norms(rows, work, totals)
    return np.sqrt(totals)


def norm(values: Float32s) -> float:
    """Return the Euclidean norm of one vector."""
    return math.sqrt(squared_norm(values))


def squared_norm(values: Float32s) -> float:
    """Return the ``squared_norms`` of one vector."""
    totals = np.empty(1)
    _squared_norms(values.reshape(1, -1), np.empty(WORK_VALUES), totals)
    return float(totals[0])


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

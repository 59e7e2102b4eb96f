"""An estimate of CenteredClip, by which an audit knows a right merge in a fifth of the time.

All that CenteredClip computes from a unit's values are norms, and each of its centers is a sum of
the contributions. So the matrix of their inner products gives the weights of that sum, without the
vectors, and one more pass over the values gives the sum. It is not the same to the last bit, and
need not be: only an audit that finds a difference has to merge to the bit, to prove it.

A merge that differs by less than ``DIFFERENCE_MAX`` passes. Right merges in int4 differed by less
than 0.00001 of their norm; a few values may be rounded to a neighbouring code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from averaging.errors import NotFinite
from averaging.numbers.arrays import Buffer, Float32s, Float64s, arithmetic
from averaging.numbers.codec import TILE, Addends, Codec, Scratch
from averaging.numbers.merge import CenteredClip, MergeRule

DIFFERENCE_MAX = 0.01
"""Norm of the difference of a unit's merged displacement, as a share of its norm."""
MEMORY_MAX = 1 << 23
"""Values of all contributions in memory at once: 32 MB. More contributions are merged instead."""
KEPT_MAX = 1 << 22
"""Values of all contributions to a unit that are decoded once: 16 MB. Of larger units tiles are
decoded for the products, and again for the sum."""
UNIT_MIN = 4096
"""Mean size of units below which many are merged together as fast as they are estimated."""
COLUMNS = 1024
"""Values whose products are added up in single precision."""


def can_estimate(rule: MergeRule, contributions: int, sizes: Sequence[int]) -> bool:
    """True if an estimate is cheaper than a merge by this rule: it takes one unit at a time."""
    large = sum(sizes) >= UNIT_MIN * len(sizes)
    return isinstance(rule, CenteredClip) and large and contributions * TILE <= MEMORY_MAX


def is_like(
    codec: Codec,
    given: Addends,
    sizes: Sequence[int],
    merged: Buffer,
    scratch: Scratch,
    *,
    into: Codec,
) -> bool:
    """Return whether ``merged`` is about the CenteredClip of these contributions, in each unit.

    ``False`` says nothing: merge them. ``into``: the codec of ``merged``.
    """
    views = [memoryview(payload).cast("B") for payload in given.payloads]
    claimed = memoryview(merged).cast("B")
    at = start = 0
    with np.errstate(all="ignore"):
        for size in sizes:
            end, stop = at + codec.encoded_size((size,)), start + into.encoded_size((size,))
            unit = _Unit(codec, [view[at:end] for view in views], size, scratch)
            try:
                like = _is_unit_like(unit, given.weights, claimed[start:stop], into, scratch)
            except NotFinite:
                like = False
            if not like:
                return False
            at, start = end, stop
    return True


class _Unit:
    """All contributions to one unit, as a matrix with a row for each, whole or tile by tile."""

    def __init__(
        self, codec: Codec, payloads: Sequence[memoryview], size: int, scratch: Scratch
    ) -> None:
        self._codec = codec
        self._payloads = payloads
        self._scratch = scratch
        self._whole: NDArray[np.float32] | None = None
        self.size = size

    def tiles(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield ranges of values with their matrices. Each is valid until the next one."""
        count = len(self._payloads)
        if count * self.size <= KEPT_MAX:
            if self._whole is None:
                self._whole = self._decoded()
            yield slice(0, self.size), self._whole
            return
        room = self._scratch.vector(2, count * min(TILE, self.size))
        with arithmetic():
            yield from _together([self._reader(payload) for payload in self._payloads], room)

    def _decoded(self) -> NDArray[np.float32]:
        count = len(self._payloads)
        rows = self._scratch.vector(2, count * self.size).reshape(count, self.size)
        with arithmetic():
            for row, payload in zip(rows, self._payloads, strict=True):
                for part, values in self._reader(payload):
                    row[part] = values
        return rows

    def _reader(self, payload: memoryview) -> Iterator[tuple[slice, Float32s]]:
        return self._codec.pieces(payload, (self.size,), 1.0, self._scratch)

    def products(self) -> Float64s:
        """Return the matrix of the contributions' inner products."""
        count = len(self._payloads)
        total = np.zeros((count, count))
        for _, rows in self.tiles():
            whole = rows.shape[1] // COLUMNS
            parts = rows[:, : whole * COLUMNS].reshape(count, whole, COLUMNS).swapaxes(0, 1)
            total += np.matmul(parts, parts.swapaxes(1, 2)).sum(axis=0, dtype=np.float64)
            rest = rows[:, whole * COLUMNS :]
            total += rest @ rest.T
        return total


def _together(
    readers: Sequence[Iterator[tuple[slice, Float32s]]], room: Float32s
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Read a tile of all contributions at a time. Readers share a buffer, so each is copied."""
    first, *others = readers
    for part, values in first:
        width = part.stop - part.start
        rows = room[: len(readers) * width].reshape(len(readers), width)
        rows[0] = values
        for number, reader in enumerate(others, start=1):
            rows[number] = next(reader)[1]
        yield part, rows


def _is_unit_like(
    unit: _Unit, weights: Sequence[float], claimed: memoryview, into: Codec, scratch: Scratch
) -> bool:
    factors = factors_of(unit.products(), np.asarray(weights, np.float64)).astype(np.float32)
    estimate = scratch.vector(0, unit.size)
    for part, rows in unit.tiles():
        np.matmul(factors, rows, out=estimate[part])
    # Both go through the codec: it rounds off far more than an estimate differs by.
    encoded = bytearray(into.encoded_size((unit.size,)))
    into.encode(estimate, (unit.size,), encoded, scratch)
    if memoryview(encoded) == claimed:
        return True
    into.decode(encoded, (unit.size,), estimate, scratch)
    there = scratch.vector(1, unit.size)
    into.decode(claimed, (unit.size,), there, scratch)
    np.subtract(there, estimate, out=there)
    allowed = DIFFERENCE_MAX * math.sqrt(float(np.dot(estimate, estimate)))
    return math.sqrt(float(np.dot(there, there))) <= allowed  # not if either is not finite


def factors_of(products: Float64s, weights: Float64s) -> Float64s:
    """Return the weights of the contributions in their CenteredClip, from their inner products."""

    def pulls(distances: Float64s) -> Float64s:
        limit = statistics.median(distances.tolist())  # a tenth of numpy's time for a few numbers
        shorter = np.divide(limit, distances, out=np.ones_like(distances), where=distances > limit)
        pulled: Float64s = weights * shorter
        return pulled

    squares = np.diag(products)
    center = pulls(np.sqrt(squares))
    for _ in range(CenteredClip.iterations):
        mixed = products @ center
        distances = squares - 2 * mixed + center @ mixed
        pulled = pulls(np.sqrt(np.maximum(distances, 0.0)))
        center = center * (1 - pulled.sum()) + pulled
    return center

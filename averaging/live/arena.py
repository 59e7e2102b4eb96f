"""Memory for large buffers, used again instead of asked of the system each time.

A fresh large array costs the kernel a zeroed page for each page touched: for a round of 30 M
values in int4 as much processor time as its arithmetic. Buffers come back by themselves
when the last array or view of them is gone, and wait here, up to a cap, for the next who asks.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from averaging.numbers.arrays import Bytes, Float32s

_STEP = 8
"""Sizes are rounded up to eighths of a power of two: fragments of a run are nearly equal."""

SMALL_BYTES = 1 << 20
"""Below this the ordinary allocator does not go to the system every time."""


class Arena:
    """Gives out uninitialised memory. ``kept_max_bytes`` bounds what waits unused."""

    def __init__(self, kept_max_bytes: int) -> None:
        if kept_max_bytes < 0:
            raise ValueError(f"kept_max_bytes is {kept_max_bytes}; it is 0 or more")
        self.kept_max_bytes = kept_max_bytes
        # Buffers may come back in any thread; a deque's ends are safe there.
        self._returned: deque[Bytes] = deque()
        self._kept: list[Bytes] = []

    def __repr__(self) -> str:
        self._collect()
        return f"Arena({self.kept_bytes} of {self.kept_max_bytes} bytes wait)"

    @property
    def kept_bytes(self) -> int:
        return sum(raw.size for raw in self._kept)

    def floats(self, count: int) -> Float32s:
        """A vector of ``count`` values."""
        array: Float32s = self._take(4 * count)[: 4 * count].view(np.float32)
        return array

    def room(self, size: int) -> memoryview:
        """``size`` bytes."""
        return self._take(size)[:size].data

    def _take(self, size: int) -> Bytes:
        if size < SMALL_BYTES:
            return np.empty(size, np.uint8)
        self._collect()
        rounded = _rounded(size)
        for index, raw in enumerate(self._kept):
            if raw.size == rounded:
                del self._kept[index]
                break
        else:
            raw = np.empty(rounded, np.uint8)
        # Every view's base is this array, as it does not own its memory: it goes when all are gone.
        owner: Bytes = np.frombuffer(raw.data, np.uint8)
        weakref.finalize(owner, self._returned.append, raw).atexit = False
        return owner

    def _collect(self) -> None:
        while self._returned:
            self._kept.append(self._returned.popleft())
        while self._kept and self.kept_bytes > self.kept_max_bytes:
            del self._kept[0]  # the longest unused one


def _rounded(size: int) -> int:
    step = max(1, (1 << (size - 1).bit_length()) // 2 // _STEP)
    return -(-size // step) * step

"""Large buffers: memory that is used again, and bytes that are read while they are written.

``Arena`` hands out memory. A fresh large array costs the kernel a zeroed page for each page
touched: for a round of 30 M values in int4 as much processor time as its arithmetic. Buffers come
back by themselves when the last array or view of them is gone, and wait here, up to a cap.

``GrowingBytes`` is a range of bytes that one task writes from the front while others already read
behind it. This is how encoding overlaps with sending, merging with answering, checking with
receiving.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque

import numpy as np

from averaging.errors import AveragingError
from averaging.numbers.arrays import Bytes, Float32s

_STEP = 8
"""Sizes are rounded up to eighths of a power of two: fragments of a run are nearly equal."""

SMALL_BYTES = 1 << 20
"""Below this the ordinary allocator does not go to the system every time."""


class Arena:
    """Gives out uninitialised memory. ``kept_max_bytes`` bounds what waits unused."""

    def __init__(self, kept_max_bytes: int) -> None:
        self.kept_max_bytes = kept_max_bytes
        # Buffers may come back in any thread, also in one that has the lock; a deque's ends are
        # safe there. A state is copied in a thread, while the loop takes buffers of rounds.
        self._returned: deque[Bytes] = deque()
        self._taking = threading.Lock()
        self._kept: list[Bytes] = []
        self._used_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return sum(raw.size for raw in self._kept)

    @property
    def used_bytes(self) -> int:
        """Size of the buffers that are in use, without small ones."""
        with self._taking:
            self._collect()
            return self._used_bytes

    def floats(self, count: int) -> Float32s:
        """A vector of ``count`` values."""
        array: Float32s = self._take(4 * count)[: 4 * count].view(np.float32)
        return array

    def uninitialised(self, size: int) -> memoryview:
        return self._take(size)[:size].data

    def _take(self, size: int) -> Bytes:
        if size < SMALL_BYTES:
            return np.empty(size, np.uint8)
        rounded = _rounded(size)
        with self._taking:
            self._collect()
            place = next((at for at, raw in enumerate(self._kept) if raw.size == rounded), None)
            kept = None if place is None else self._kept.pop(place)
            self._used_bytes += rounded
        raw = np.empty(rounded, np.uint8) if kept is None else kept
        # Every view's base is this array, as it does not own its memory: it goes when all are gone.
        owner: Bytes = np.frombuffer(raw.data, np.uint8)
        weakref.finalize(owner, self._returned.append, raw).atexit = False
        return owner

    def _collect(self) -> None:
        while self._returned:
            raw = self._returned.popleft()
            self._used_bytes -= raw.size
            self._kept.append(raw)
        while self._kept and self.kept_bytes > self.kept_max_bytes:
            del self._kept[0]  # the longest unused one


def _rounded(size: int) -> int:
    step = max(1, (1 << (size - 1).bit_length()) // 2 // _STEP)
    return -(-size // step) * step


class Abandoned(AveragingError):
    """The bytes will never be complete, for this reason."""

    reason: str
    message = "abandoned: {reason}"


class GrowingBytes:
    """A range of bytes and how far it is filled.

    Only the loop's thread touches the object; others may look whether it is ``lost``.
    """

    __slots__ = ("_changed", "data", "filled", "lost")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.filled = 0
        self.lost: str | None = None
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self.filled == len(self.data) and self.lost is None

    def grow(self, filled: int) -> None:
        """The first ``filled`` bytes are final now."""
        assert self.filled <= filled <= len(self.data)
        self.filled = filled
        self._wake()

    def abandon(self, reason: str) -> None:
        """No more bytes will come: raise ``Abandoned`` in all that wait."""
        if not self.complete:
            self.lost = self.lost or reason
            self._wake()

    async def beyond(self, start: int) -> int:
        """Wait until more than ``start`` bytes are final; returns how many are.

        Also returns at the end. Raises ``Abandoned``. The deadline is the caller's.
        """
        while self.filled <= start and self.filled < len(self.data):
            if self.lost is not None:
                raise Abandoned(self.lost)
            await self._changed.wait()
        return self.filled

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

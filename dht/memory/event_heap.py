"""Virtual time: a clock that moves from one scheduled event to the next.

An hour in which nothing is scheduled costs nothing. Events at the same time run in the order in
which they were scheduled, so the same program runs the same way each time, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from heapq import heapify, heappop, heappush
from typing import Any

_COMPACT_AFTER = 64


class Timer:
    """A call scheduled on an ``EventHeap``, with the methods of an ``asyncio.TimerHandle``."""

    __slots__ = ("_heap", "_when", "args", "callback", "is_cancelled")

    def __init__(
        self, heap: EventHeap, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._heap = heap
        self._when = when
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.is_cancelled = False

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self.is_cancelled

    def cancel(self) -> None:
        """Cancel the call. Safe at any time, more than once."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.callback is not None:
                self.callback, self.args = None, ()
                self._heap._count_cancelled()


class EventHeap:
    """Virtual time: runs scheduled calls in order of time, then of scheduling."""

    __slots__ = ("_cancelled", "_entries", "_order", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Number of events that have run."""
        self._order = 0
        self._cancelled = 0
        self._entries: list[tuple[float, int, Timer]] = []

    def __len__(self) -> int:
        return len(self._entries) - self._cancelled

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Schedule a call. A past time means now, after the calls already scheduled for now."""
        timer = Timer(self, when, callback, args)
        self._order += 1
        heappush(self._entries, (when if when > self.now else self.now, self._order, timer))
        return timer

    def call_in(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        return self.call_at(self.now + delay_s, callback, *args)

    def run_while(self, idle: Sized, ends_at: float) -> bool:
        """Run events while ``idle`` is empty, up to and including time ``ends_at``.

        False when there are no more, and ``idle`` is still empty.
        """
        while not idle:
            entries = self._entries  # cancelling may replace the list
            if not entries:
                return False
            when, _, entry = entries[0]
            callback = entry.callback
            if callback is None:
                heappop(entries)
                self._cancelled -= 1
                continue
            if when > ends_at:
                return False
            heappop(entries)
            args = entry.args
            entry.callback, entry.args = None, ()
            self.now = when
            self.events += 1
            callback(*args)
        return True

    def _count_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > _COMPACT_AFTER and self._cancelled * 2 > len(self._entries):
            self._entries = [entry for entry in self._entries if not entry[2].is_cancelled]
            heapify(self._entries)
            self._cancelled = 0

"""Virtual time: a clock that moves from one scheduled event to the next.

An hour in which nothing is scheduled costs nothing. Events at the same time run in the order in
which they were scheduled, so the same program runs the same way each time, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from heapq import heapify, heappop, heappush
from typing import Any

_COMPACT_AFTER = 64


class Entry:
    """Something scheduled on an ``EventHeap``."""

    __slots__ = ("_heap", "args", "callback", "is_cancelled")

    def __init__(
        self, heap: EventHeap, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._heap = heap
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the call. Safe at any time, more than once."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self.callback is not None:
                self.callback, self.args = None, ()
                self._heap._count_cancelled()


class Timer(Entry):
    """A call scheduled on an ``EventHeap``."""

    __slots__ = ("when",)

    def __init__(
        self, heap: EventHeap, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._heap = heap
        self.when = when
        self.callback = callback
        self.args = args
        self.is_cancelled = False

    def __repr__(self) -> str:
        state = " cancelled" if self.is_cancelled else ""
        return f"Timer(at {self.when:.6f}{state}, {self.callback})"


class EventHeap:
    """Virtual time: runs scheduled calls in order of time, then of scheduling."""

    __slots__ = ("_cancelled", "_entries", "_order", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Number of events that have run."""
        self._order = 0
        self._cancelled = 0
        self._entries: list[tuple[float, int, Entry]] = []

    def __repr__(self) -> str:
        return f"EventHeap(now={self.now:.6f}, scheduled={len(self)}, events={self.events})"

    def __len__(self) -> int:
        return len(self._entries) - self._cancelled

    @property
    def next_at(self) -> float | None:
        """Time of the next event; ``None`` if nothing is scheduled."""
        entries = self._entries
        while entries and entries[0][2].is_cancelled:
            heappop(entries)
            self._cancelled -= 1
        return entries[0][0] if entries else None

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Schedule a call. A past time means now, after the calls already scheduled for now."""
        if when < self.now:
            when = self.now
        timer = Timer(self, when, callback, args)
        self._order += 1
        heappush(self._entries, (when, self._order, timer))
        return timer

    def add(self, when: float, entry: Entry) -> None:
        """Schedule an entry that somebody else made, at a time that is not past."""
        self._order += 1
        heappush(self._entries, (when, self._order, entry))

    def call_in(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        return self.call_at(self.now + delay_s, callback, *args)

    def step(self) -> bool:
        """Run the next event, moving the clock to it. False when nothing is scheduled."""
        if self.next_at is None:
            return False
        self._run_next()
        return True

    def _run_next(self) -> None:
        when, _, entry = heappop(self._entries)
        callback, args = entry.callback, entry.args
        assert callback is not None
        entry.callback, entry.args = None, ()  # cancelling it from now on has no effect
        self.now = when
        self.events += 1
        callback(*args)

    def run(self, until: float | None = None, events_max: int | None = None) -> int:
        """Run events up to and including time ``until``, and return how many ran.

        The clock then stands at ``until``, unless ``events_max`` came first.
        """
        ran = 0
        while events_max is None or ran < events_max:
            when = self.next_at
            if when is None or (until is not None and when > until):
                if until is not None:
                    self.now = max(self.now, until)
                break
            self._run_next()
            ran += 1
        return ran

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

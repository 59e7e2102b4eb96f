"""Processor use of one peer: its trainer, agent and daemon together."""

from __future__ import annotations

import time

import psutil


class OwnUse:
    """Share of the machine's processors that a process and its descendants use."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._busy: dict[tuple[int, float], float] = {}
        self._at: float | None = None

    def look(self) -> float | None:
        """The share since the last call, 0 to 1; ``None`` at the first one."""
        now, then, before = time.monotonic(), self._at, self._busy
        self._busy, self._at = self._times(), now
        if then is None or now <= then:
            return None
        # Only processes that were there before: the time of others may be from long ago.
        spent = sum(busy - before[each] for each, busy in self._busy.items() if each in before)
        return min(1.0, max(0.0, spent / (now - then) / (psutil.cpu_count() or 1)))

    def _times(self) -> dict[tuple[int, float], float]:
        found: dict[tuple[int, float], float] = {}
        try:
            root = psutil.Process(self._pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return found
        for process in family:
            try:
                spent = process.cpu_times()
                found[process.pid, process.create_time()] = spent.user + spent.system
            except psutil.Error:  # it has ended
                continue
        return found

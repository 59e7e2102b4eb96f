"""Limit of the calls that each other peer may make. Pure, and bounded in memory."""

from __future__ import annotations

from collections import deque

from dht.identity import PeerId


class CallBudget:
    """Counts the calls of each peer within the last minute."""

    def __init__(self, per_minute: int, *, peers_max: int = 4096) -> None:
        if per_minute < 1:
            raise ValueError(f"per_minute is {per_minute}; it is at least 1")
        self._per_minute = per_minute
        self._peers_max = peers_max
        self._calls: dict[PeerId, deque[float]] = {}

    def spend(self, peer: PeerId, now: float) -> bool:
        """Count one more call of a peer, if it may make one now. Says whether it may."""
        calls = self._calls.pop(peer, None) or deque()
        self._calls[peer] = calls  # moved to the end: the longest silent peer is forgotten first
        while len(self._calls) > self._peers_max:
            del self._calls[next(iter(self._calls))]
        while calls and now - calls[0] >= 60.0:
            calls.popleft()
        if len(calls) >= self._per_minute:
            return False
        calls.append(now)
        return True

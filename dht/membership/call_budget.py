"""Limits of the calls that each other peer may make. Pure, and bounded in memory."""

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


class CallRate:
    """Tokens of each peer, which come back with time. A call takes one, and its reply some more."""

    def __init__(self, per_s: float, burst: float, *, peers_max: int = 4096) -> None:
        if not 0 < per_s <= burst:
            raise ValueError(f"per_s is {per_s:g} and burst is {burst:g}; 0 < per_s <= burst")
        self._per_s = per_s
        self._burst = burst
        self._peers_max = peers_max
        self._left: dict[bytes, tuple[float, float]] = {}
        """Tokens and the time at which they were counted, the longest silent peer first."""

    def spend(self, peer: bytes, now: float, tokens: float = 1.0) -> bool:
        """Take tokens of a peer, even if it has too few. Says whether it had any left."""
        left, counted_at = self._left.pop(peer, (self._burst, now))
        left = min(self._burst, left + (now - counted_at) * self._per_s)
        # At most a second of debt: who goes on calling is not shut out for ever.
        self._left[peer] = (max(left - tokens, -self._per_s), now)
        while len(self._left) > self._peers_max:
            del self._left[next(iter(self._left))]
        return left >= 1.0

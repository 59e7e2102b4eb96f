"""Limits of the calls that each other peer may make, or that address one host. Pure, and bounded in
memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from dht.bounded_mapping import BoundedMapping

C = TypeVar("C")


class CallBudget:
    """Counts the calls of each peer, or about each address, within the last minute."""

    def __init__(self, per_minute: int, *, peers_max: int = 4096) -> None:
        self._per_minute = per_minute
        self._calls = BoundedMapping[str, deque[float]](
            "calls",
            peers_max,
            # The time at which the peer had its whole budget again, were the budget even.
            worth=lambda _, calls: calls[-1] + 60.0 * len(calls) / per_minute if calls else 0.0,
        )

    def spend(self, peer: str, now: float) -> bool:
        """Count one more call of a peer, if it may make one now. Says whether it may."""
        calls = self._calls.get(peer) or deque()
        while calls and now - calls[0] >= 60.0:
            calls.popleft()
        may = len(calls) < self._per_minute
        if may:
            calls.append(now)
        self._calls.renew(peer, calls)
        return may


class CallRate:
    """Tokens of each peer, which come back with time. A call takes one, and its reply some more."""

    def __init__(self, per_s: float, burst: float, *, peers_max: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = BoundedMapping[bytes, tuple[float, float]](
            "call rates",
            peers_max,
            # The time at which the peer has all of its tokens again.
            worth=lambda _, counted: counted[1] + (burst - counted[0]) / per_s,
        )
        """Tokens and the time at which they were counted."""

    def spend(self, peer: bytes, now: float, tokens: float = 1.0) -> bool:
        """Take tokens of a peer, even if it has too few. Says whether it had any left."""
        left, counted_at = self._left.get(peer, (self._burst, now))
        left = min(self._burst, left + (now - counted_at) * self._per_s)
        # At most a second of debt: a peer that goes on calling is not shut out for ever.
        self._left[peer] = max(left - tokens, -self._per_s), now
        return left >= 1.0

    def is_frugal(self, peer: bytes, now: float) -> bool:
        """Say whether a peer has left at least half of what it may spend at once."""
        left, counted_at = self._left.get(peer, (self._burst, now))
        return left + (now - counted_at) * self._per_s >= self._burst / 2


class CallQueue(Generic[C]):
    """Calls that wait to be begun: those of frugal peers first, and one of each peer in turn.

    So a peer that asks little waits for one call of the others, however many identities they have
    and whatever their calls cost.
    """

    def __init__(self) -> None:
        self._frugal: OrderedDict[bytes, deque[C]] = OrderedDict()
        self._others: OrderedDict[bytes, deque[C]] = OrderedDict()
        """Calls by peer; the peer whose turn it is comes first."""

        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, peer: bytes, call: C, *, is_frugal: bool) -> None:
        self._count += 1
        waiting = self._frugal if is_frugal else self._others
        waiting.setdefault(peer, deque()).append(call)

    def take(self, frugal_max: int) -> list[tuple[bytes, C]]:
        """Remove and return the next calls: so many of frugal peers, and one of the others."""
        taken = [self._next(self._frugal) for _ in range(frugal_max) if self._frugal]
        if self._others:
            taken.append(self._next(self._others))
        self._count -= len(taken)
        return taken

    def _next(self, waiting: OrderedDict[bytes, deque[C]]) -> tuple[bytes, C]:
        peer, calls = waiting.popitem(last=False)
        call = calls.popleft()
        if calls:
            waiting[peer] = calls
        return peer, call

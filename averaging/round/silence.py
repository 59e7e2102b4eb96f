"""Who is silent to a peer while others answer it: one observation for all of its fragments.

Each fragment finds out by itself that its leader does not answer, and waits for it. But a peer that
is frozen answers about no fragment, so what one of them has found out is true for all. Unless it
is this peer that was asleep, or cut off: then nobody was heard. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from dht.identity import PeerId

HEARD_MAX = 1024
"""Peers of whom it is known when they were heard; the longest silent are forgotten beyond it."""
KEPT_S = 30.0
"""What was heard longer ago is forgotten: nobody waits that long for an answer
(``RoundPolicy.answer_s``, twice). Who meets others in every round hears all of a large swarm."""


class Answering:
    """When each peer was last heard, about whatever fragment."""

    __slots__ = ("_heard_at",)

    def __init__(self) -> None:
        self._heard_at: OrderedDict[PeerId, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"Answering({len(self._heard_at)} heard)"

    def __len__(self) -> int:
        """Of how many it is known."""
        return len(self._heard_at)

    def heard(self, peer: PeerId, now: float) -> None:
        self._heard_at[peer] = now
        self._heard_at.move_to_end(peer)
        longest_silent = next(iter(self._heard_at))
        if len(self._heard_at) > HEARD_MAX or self._heard_at[longest_silent] < now - KEPT_S:
            del self._heard_at[longest_silent]

    def is_silent(self, peer: PeerId, *, since: float) -> bool:
        """Whether this one has not been heard since then, and somebody else has."""
        if not self._heard_at:
            return False
        if self._heard_at.get(peer, since) > since:
            return False
        latest = next(reversed(self._heard_at))
        return self._heard_at[latest] > since

"""Peers that are silent while others answer: one observation for all fragments of a peer.

Each fragment waits for its own leader. But a peer that is frozen answers about no fragment, so a
silence that one fragment has found holds for all of them; unless this peer itself was asleep or cut
off, for then it has heard no peer at all.

A stopped process keeps its links for 16 s. The first fragment whose leader does not answer for 10 s
tells the others, unless nobody else was heard either: then this peer may be the one that slept.
"""

from __future__ import annotations

from collections import OrderedDict

from dht.identity import PeerId

HEARD_MAX = 1024
"""Peers that are remembered; beyond it those that have been silent longest are forgotten."""
KEPT_S = 30.0
"""Peers that were heard longer ago are forgotten. No answer is waited for that long, which is twice
``RoundPolicy.answer_s``. A peer with other members in every round hears all of a large swarm."""


class LastHeard:
    """The times at which peers were last heard, about any fragment."""

    __slots__ = ("_heard_at",)

    def __init__(self) -> None:
        self._heard_at: OrderedDict[PeerId, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"LastHeard({len(self._heard_at)} heard)"

    def __len__(self) -> int:
        """Number of peers that are remembered."""
        return len(self._heard_at)

    def heard(self, peer: PeerId, now: float) -> None:
        self._heard_at[peer] = now
        self._heard_at.move_to_end(peer)
        longest_silent = next(iter(self._heard_at))
        if len(self._heard_at) > HEARD_MAX or self._heard_at[longest_silent] < now - KEPT_S:
            del self._heard_at[longest_silent]

    def is_silent(self, peer: PeerId, *, since: float) -> bool:
        """True if this peer has not been heard since then, and another one has."""
        if not self._heard_at:
            return False
        if self._heard_at.get(peer, since) > since:
            return False
        latest = next(reversed(self._heard_at))
        return self._heard_at[latest] > since

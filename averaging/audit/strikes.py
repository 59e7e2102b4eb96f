"""Strikes: what a peer holds against another one although it proves nothing.

A peer that does not hand out the uploads that it must still have may hide a lie, or have crashed
in between. So each such case counts a little, at the peer that saw it and at no other, and is
forgotten with time. A peer with too many is not trusted with power here until they have faded; it
may still contribute.

One restart is one case, however many audits find nothing of it: several pieces of a round are
audited, and the rounds of several fragments. An honest peer that was back half a second after it
had finished a round had four strikes at once, and was out. A peer that never shows anything is out
after a minute.

A merged slice that does not come, or an own upload that one reducer alone has not got, is often a
slow line or a machine that sleeps, which several rounds notice at once. That counts half, and once
in a while: a peer that does it in every round is out after a minute, one that slept is not.
"""

from __future__ import annotations

from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

HALF_LIFE_S = 1800.0
"""A strike counts half as much after this time."""
LIMIT = 3.0
"""Strikes with which a peer is out of favour."""
DOUBTFUL = 0.5
"""Weight of a failure that a slow line or a sleeping machine may explain, ..."""
DOUBTFUL_EVERY_S = 10.0
"""... at most once in this time."""
MISSING_EVERY_S = 20.0
"""Audits that find nothing count once in this time. A live peer begins an audit at most so long
after its round: all rounds that one restart loses make two strikes at most."""
PEERS_MAX = 1024


class Strikes:
    """The strikes of all peers at one of them. Times are on its own clock."""

    __slots__ = ("_counted", "_doubted_at", "_missing_at")

    def __init__(self) -> None:
        self._doubted_at = BoundedMapping[PeerId, float](PEERS_MAX)
        self._missing_at = BoundedMapping[PeerId, float](PEERS_MAX)
        self._counted = BoundedMapping[PeerId, tuple[float, float]](PEERS_MAX)
        """The count of each peer, and when that was."""

    def __repr__(self) -> str:
        return f"Strikes({len(self._counted)} peers)"

    def count(self, peer: PeerId, now: float) -> float:
        """Return a peer's strikes, faded to the present."""
        if peer not in self._counted:
            return 0.0
        counted, at = self._counted[peer]
        return float(counted * 0.5 ** (max(0.0, now - at) / HALF_LIFE_S))

    def add_doubtful(self, peer: PeerId, now: float) -> float | None:
        """Add a part of one. Returns how many there are; ``None``: it does not count again."""
        if now < self._doubted_at.get(peer, now - DOUBTFUL_EVERY_S) + DOUBTFUL_EVERY_S:
            return None
        self._doubted_at.renew(peer, now)
        return self.add(peer, now, DOUBTFUL)

    def add_missing(self, peer: PeerId, now: float) -> float:
        """Add one for what a peer must have and does not show, if none was added for that lately.

        Returns how many there are.
        """
        if now < self._missing_at.get(peer, now - MISSING_EVERY_S) + MISSING_EVERY_S:
            return self.count(peer, now)
        self._missing_at.renew(peer, now)
        return self.add(peer, now)

    def add(self, peer: PeerId, now: float, weight: float = 1.0) -> float:
        """Add one. Returns how many there are."""
        total = self.count(peer, now) + weight
        self._counted.renew(peer, (total, now))
        return total

    def is_out(self, peer: PeerId, now: float) -> bool:
        return self.count(peer, now) >= LIMIT

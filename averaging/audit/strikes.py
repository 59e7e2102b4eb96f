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

import math
from dataclasses import dataclass

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
ROUNDING_S = 1.0
PEERS_MAX = 1024
"""Peers whose strikes are remembered; those of the peer with the fewest are forgotten first."""


@dataclass(slots=True)
class _Record:
    """The strikes of one peer."""

    counted: float = 0.0
    at: float = 0.0
    """Time at which they were counted."""
    doubted_at: float = -math.inf
    """Time of the last doubtful failure that counted."""
    missing_at: float = -math.inf
    """Time of the last audit without a result that counted."""

    def faded(self, now: float) -> float:
        return float(self.counted * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))


class Strikes:
    """The strikes of all peers at one of them. Times are on its own clock."""

    __slots__ = ("_out_until", "_records")

    def __init__(self) -> None:
        self._records = BoundedMapping[PeerId, _Record](
            "strikes", PEERS_MAX, worth=lambda peer, _: self.worth(peer)
        )
        self._out_until = -math.inf
        """Time at which the strikes of every peer will have faded so far that none is out."""

    def worth(self, peer: PeerId) -> float:
        """How many strikes a peer has beside the others: a number that fading does not change."""
        record = self._records.get(peer)
        if record is None or not record.counted:
            return -math.inf
        return math.log2(record.counted) + record.at / HALF_LIFE_S

    def count(self, peer: PeerId, now: float) -> float:
        """Return a peer's strikes, faded to the present."""
        record = self._records.get(peer)
        return record.faded(now) if record is not None else 0.0

    def add_doubtful(self, peer: PeerId, now: float) -> float | None:
        """Add a part of one. Returns how many there are; ``None``: it does not count again."""
        record = self._records.get(peer, _Record())
        if now < record.doubted_at + DOUBTFUL_EVERY_S:
            return None
        record.doubted_at = now
        return self._add(peer, record, now, DOUBTFUL)

    def add_missing(self, peer: PeerId, now: float) -> float:
        """Add one for what a peer must have and does not show, if none was added for that lately.

        Returns how many there are.
        """
        record = self._records.get(peer, _Record())
        if now < record.missing_at + MISSING_EVERY_S:
            return record.faded(now)
        record.missing_at = now
        return self._add(peer, record, now, 1.0)

    def add(self, peer: PeerId, now: float, weight: float = 1.0) -> float:
        """Add one. Returns how many there are."""
        return self._add(peer, self._records.get(peer, _Record()), now, weight)

    def _add(self, peer: PeerId, record: _Record, now: float, weight: float) -> float:
        record.counted, record.at = record.faded(now) + weight, now
        self._records[peer] = record
        if record.counted >= LIMIT:
            fades_s = HALF_LIFE_S * math.log2(record.counted / LIMIT) + ROUNDING_S
            self._out_until = max(self._out_until, now + fades_s)
        return record.counted

    def is_out(self, peer: PeerId, now: float) -> bool:
        return self.count(peer, now) >= LIMIT

    def may_have_any_out(self, now: float) -> bool:
        """True if any peer may be out of favour. Hardly ever is one, and then nobody need be looked
        at."""
        return now <= self._out_until

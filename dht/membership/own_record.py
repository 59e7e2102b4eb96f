"""The record that this peer publishes about itself, and the facts in it. Pure.

The wall clock is an argument, and serves only to produce increasing sequence numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace
from multiaddr import Multiaddr

from dht.addresses import pack
from dht.identity import Identity
from dht.records import SEQUENCE_MAX, PeerRecord, Sealed, seal


@dataclass(slots=True)
class OwnRecord:
    """Facts about this peer, which may be replaced at any time; ``renew`` signs them."""

    identity: Identity
    facts: PeerRecord
    """All but the addresses."""

    ttl_s: float
    addresses: tuple[Multiaddr, ...] = ()
    """Announced addresses, best first. The last ones are left out if they do not fit."""

    sequence: int = 0
    """The last sequence number used."""

    def renew(self, key: str, *, wall_time: float) -> bytes:
        """Sign a record that is newer than all earlier ones."""
        facts, addresses = self.facts, [pack(address) for address in self.addresses]
        # Unix milliseconds, so that the numbers increase over restarts. If the clock was set back,
        # the cache on disk or other peers know the last number: see ``learn``.
        wall_ms = int(max(0.0, wall_time) * 1000)
        self.sequence = sequence = min(SEQUENCE_MAX, max(self.sequence + 1, wall_ms))
        while True:
            record = replace(facts, addresses=tuple(addresses))
            try:
                return seal(record, self.identity, key=key, sequence=sequence, ttl_s=self.ttl_s)
            except ValueError:
                if len(addresses) > 1:
                    addresses.pop()
                elif facts.versions:
                    facts = replace(facts, versions=())  # a hint: a round names its version itself
                else:
                    raise

    def learn(self, sealed: Sealed) -> bool:
        """Take a record from elsewhere. Says whether it is an own record, newer than the last."""
        if sealed.peer != self.identity.peer_id or sealed.sequence <= self.sequence:
            return False
        self.sequence = sealed.sequence
        return True

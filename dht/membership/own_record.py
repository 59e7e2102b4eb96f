"""The record that this peer publishes about itself, and the facts in it. Pure.

The wall clock is an argument, and serves only to produce increasing sequence numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from multiaddr import Multiaddr

from dht.addresses import pack
from dht.identity import Identity
from dht.records import (
    SEQUENCE_MAX,
    ContributionCounters,
    PeerRecord,
    Record,
    Role,
    Sealed,
    pack_versions,
    seal,
)


@dataclass(slots=True)
class OwnRecord:
    """Facts about this peer, which may be set at any time; ``renew`` signs them."""

    identity: Identity
    incarnation: int
    protocol_versions: tuple[int, int]
    ttl_s: float
    role: Role = "learner"
    name: str = ""
    site: str = ""
    addresses: tuple[Multiaddr, ...] = ()
    """Announced addresses, best first. The last ones are left out if they do not fit."""

    reachable: bool | None = None
    leaving: bool = False
    trains: bool = False
    step_time_s: float | None = None
    link_bytes_s: float | None = None
    versions: tuple[int, ...] = ()
    counters: ContributionCounters = field(default_factory=ContributionCounters)
    credential: bytes = b""
    release: str = ""
    sequence: int = 0
    """The last sequence number used."""

    def renew(self, key: str, *, wall_time: float) -> bytes:
        """Sign a record that is newer than all earlier ones.

        Raises ``ValueError`` for a fact that no record can hold.
        """
        addresses = [pack(address) for address in self.addresses]
        versions = pack_versions(self.versions)
        while True:
            record = PeerRecord(
                protocol=self.protocol_versions,
                role=self.role,
                incarnation=self.incarnation,
                addresses=tuple(addresses),
                reachable=self.reachable,
                leaving=self.leaving,
                name=self.name,
                site=self.site,
                trains=self.trains,
                step_time_s=self.step_time_s,
                link_bytes_s=self.link_bytes_s,
                versions=versions,
                counters=self.counters,
                credential=self.credential,
                release=self.release,
            )
            try:
                return self.seal(record, key, ttl_s=self.ttl_s, wall_time=wall_time)
            except ValueError:
                if len(addresses) > 1:
                    addresses.pop()
                elif versions:
                    versions = b""  # a hint too: a round names its version itself
                else:
                    raise

    def seal(self, record: Record, key: str, *, ttl_s: float, wall_time: float) -> bytes:
        """Sign any record of this peer with its next sequence number."""
        # Unix milliseconds, so that the numbers increase over restarts. If the clock was set back,
        # the cache on disk or other peers know the last number: see ``learn``.
        wall_ms = int(max(0.0, wall_time) * 1000)
        self.sequence = min(SEQUENCE_MAX, max(self.sequence + 1, wall_ms))
        return seal(record, self.identity, key=key, sequence=self.sequence, ttl_s=ttl_s)

    def learn(self, sealed: Sealed) -> bool:
        """Take a record from elsewhere. Says whether it is an own record, newer than the last."""
        if sealed.peer != self.identity.peer_id or sealed.sequence <= self.sequence:
            return False
        self.sequence = sealed.sequence
        return True

    def set_versions(self, versions: Sequence[int]) -> None:
        """Set the versions of the fragments. Raises ``ValueError`` for an impossible one."""
        pack_versions(versions)
        self.versions = tuple(versions)

"""Connections to other peers, and the record of which side opened them.

A connection that this peer opened itself proves nothing about whether others can dial it, so every
dial passes through here and is noted for ``dht.presence.dial_back``.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from dht.addresses import network_of, peer_of, with_peer
from dht.bounded_mapping import BoundedMapping
from dht.errors import PeerUnreachable
from dht.host import Connection
from dht.identity import PeerId
from dht.membership.reachability import Reachability
from dht.presence.this_peer import ThisPeer

ANSWERED_MAX = 4096


class Dialler:
    """Opens connections, and knows which peers are connected and which ones answered a dial."""

    def __init__(
        self, this: ThisPeer, seeds: Sequence[Multiaddr], reachability: Reachability
    ) -> None:
        self.connected: dict[PeerId, bool] = {}
        """Connected peers; the value says whether the connection is relayed."""

        self.awaited: PeerId | None = None
        """Peer that has cut its connection in order to dial this one. It must not be dialled."""

        self.not_fresh: set[PeerId] = set()
        """Peers whose connection is no proof of a dial-back: they were connected when it was
        requested, or this peer has dialled them since."""

        self._this = this
        self._seed_peers = frozenset(peer_of(seed) for seed in seeds)
        self._reachability = reachability
        self._networks: dict[PeerId, str | None] = {}
        """Networks from which peers were connected at the last look."""

        self._answered = BoundedMapping[PeerId, None](ANSWERED_MAX)

    async def look(self) -> tuple[Connection, ...]:
        """Take note of the present connections. Raises ``HostClosed``."""
        connections = await self._this.host.connections()
        self.connected = {c.peer: c.relayed for c in connections}
        self._networks = {c.peer: network_of(c.address) for c in connections}
        return connections

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        """Make sure that a peer is connected, by the addresses in its record.

        Raises ``PeerUnreachable`` or ``HostClosed``.
        """
        if any(connection.peer == peer for connection in await self._this.host.connections()):
            return
        addresses = [with_peer(address, peer) for address in self._this.runs.addresses_of(peer)]
        await self.dial(peer, addresses, timeout_s=timeout_s)

    async def dial(self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float) -> None:
        """Open a connection. Raises ``PeerUnreachable`` or ``HostClosed``."""
        if peer == self.awaited:
            raise PeerUnreachable(peer, "it is about to dial this peer")
        self.not_fresh.add(peer)
        await self._this.host.connect(peer, addresses, timeout_s=timeout_s)
        self._answered.renew(peer, None)

    def network_of(self, peer: PeerId) -> str | None:
        """The network from which a peer is connected, as of the last look."""
        return self._networks.get(peer)

    def is_known(self, peer: PeerId) -> bool:
        """Say whether this peer dials others for ``peer``: for members and peers it has dialled."""
        return peer in self._answered or self._this.runs.is_member(peer)

    def is_seed(self, peer: PeerId) -> bool:
        """Say whether a peer is one of those that this peer was given to begin with."""
        return peer in self._seed_peers

    def can_dial(self, peer: PeerId) -> bool:
        """Say whether a peer may be asked to dial others: not one that can only dial out itself.

        The dial of such a peer would meet one of ours halfway.
        """
        if peer == self._this.id:
            return self._reachability.reachable is not False
        member = self._this.runs.member(peer)
        if member is not None:
            return member.reachable is not False
        return peer in self._answered or self.is_seed(peer)

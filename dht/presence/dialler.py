"""Connections to other peers, and the record of which side opened them.

A connection that this peer opened itself proves nothing about whether others can dial it, so every
dial passes through here and is noted for ``dht.presence.dial_back``. Streams and calls of other
parts dial as well if a connection was cut. They go through ``Dialler.noted``, which notes that.

A record names any addresses that its author likes, and all members dial them. So dials are limited
at each IP address from which no peer was connected, and at host names together.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from dht.addresses import Scope, ip_of, network_of, peer_of, place_of, scope_of, with_peer
from dht.bounded_mapping import BoundedMapping
from dht.errors import PeerUnreachable
from dht.forwarding_host import ForwardingHost
from dht.host import Connection, Host, Stream
from dht.identity import PeerId
from dht.membership.call_budget import CallBudget
from dht.membership.reachability import Reachability
from dht.presence.this_peer import ThisPeer

ANSWERED_MAX = 4096

DIALS_PER_MINUTE = 16
"""Limit of dials at an IPv4 address, or in an IPv6 network (/48), as records name them."""

AT_ONE_PLACE_MAX = 2
"""Addresses of one record that are dialled there: honest peers have one or two."""

MET_MAX = 4096


class DialLimited(PeerUnreachable):
    """The peer was not dialled, because of the limit of dials at its address."""


class NotingHost(ForwardingHost):
    """The host of all parts but presence. Notes for the dialler what they may dial."""

    def __init__(self, host: Host, dialler: Dialler) -> None:
        super().__init__(host)
        self._dialler = dialler

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        self._dialler.note(peer)
        await super().connect(peer, addresses, timeout_s=timeout_s)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        self._dialler.note(peer)
        return await super().call(peer, protocol, request, timeout_s=timeout_s)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if not bulk:
            self._dialler.note(peer)
            return await super().open_stream(peer, protocol, timeout_s=timeout_s)
        # Nothing is dialled where bulk data goes over a direct lane, or the peer is connected.
        connected = await self._dialler.is_connected(peer)
        stream = await super().open_stream(peer, protocol, timeout_s=timeout_s, bulk=True)
        if not connected and await self._dialler.is_connected(peer):
            self._dialler.not_fresh.add(peer)
        return stream


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

        self.noted = NotingHost(this.host, self)
        """The host of everything that is not part of presence."""

        self._this = this
        self._seed_peers = frozenset(peer_of(seed) for seed in seeds)
        self._reachability = reachability
        self._networks: dict[PeerId, str | None] = {}
        """Networks from which peers were connected at the last look."""

        self._answered = BoundedMapping[PeerId, None](ANSWERED_MAX)
        self._dials = CallBudget(DIALS_PER_MINUTE)
        self._met_at = BoundedMapping[str, None](MET_MAX)
        """IP addresses from which peers were connected."""

    async def look(self) -> tuple[Connection, ...]:
        """Take note of the present connections. Raises ``HostClosed``."""
        connections = await self._this.host.connections()
        self.connected = {c.peer: c.relayed for c in connections}
        self._networks = {c.peer: network_of(c.address) for c in connections}
        for connection in connections:
            if (ip := ip_of(connection.address)) is not None:
                self._met_at.renew(ip, None)
        return connections

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        """Make sure that a peer is connected, by the addresses in its record.

        Raises ``PeerUnreachable`` or ``HostClosed``.
        """
        if await self.is_connected(peer):
            return
        addresses = self.addresses_to_dial(peer)
        if not addresses and self._this.runs.addresses_of(peer):
            reason = f"{DIALS_PER_MINUTE} dials at its address in this minute are the most"
            raise DialLimited(peer, reason)
        await self.dial(peer, addresses, timeout_s=timeout_s)

    async def is_connected(self, peer: PeerId) -> bool:
        """Say whether there is a connection with a peer now. Raises ``HostClosed``."""
        return any(connection.peer == peer for connection in await self._this.host.connections())

    def addresses_to_dial(self, peer: PeerId) -> list[Multiaddr]:
        """The addresses of a member's record that may be dialled now. They count as dialled.

        A peer that has answered a dial may be dialled freely: no other member's record takes its
        turns.
        """
        found = []
        left: dict[str, int] = {}
        for address in self._this.runs.addresses_of(peer):
            place = None if peer in self._answered else self._limited_place(address)
            if place is not None:
                if place not in left:
                    may = self._dials.spend(place, self._this.now())
                    left[place] = AT_ONE_PLACE_MAX if may else 0
                if not left[place]:
                    continue
                left[place] -= 1
            found.append(with_peer(address, peer))
        return found

    def _limited_place(self, address: Multiaddr) -> str | None:
        """The place at which dials are counted; ``None`` if dials there are not limited."""
        ip = ip_of(address)
        if scope_of(address) is not Scope.INTERNET or ip in self._met_at:
            return None
        return "a name" if ip is None else place_of(ip)

    async def dial(self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float) -> None:
        """Open a connection. Raises ``PeerUnreachable`` or ``HostClosed``."""
        self.note(peer)
        await self._this.host.connect(peer, addresses, timeout_s=timeout_s)
        self._answered.renew(peer, None)

    def note(self, peer: PeerId) -> None:
        """Note that this peer may dial another now. Raises ``PeerUnreachable`` if it must not."""
        if peer == self.awaited:
            raise PeerUnreachable(peer, "it is about to dial this peer")
        self.not_fresh.add(peer)

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

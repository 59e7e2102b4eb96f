"""Connections to other peers.

A record names any addresses that its author likes, and all members dial them. So dials are limited
at each IP address from which no peer was connected, and at host names together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from multiaddr import Multiaddr

from dht.addresses import (
    Scope,
    ip_of,
    is_loopback,
    is_relayed,
    network_of,
    place_of,
    scope_guessed,
    scope_of,
    with_peer,
    without_peer,
)
from dht.bounded_mapping import BoundedMapping, by_age
from dht.errors import PeerUnreachable
from dht.host import Connection
from dht.identity import PeerId
from dht.limits import Rate
from dht.presence.this_peer import ThisPeer

ANSWERED_MAX = 4096

DIALS_PER_MINUTE = 16
"""Limit of dials at an IPv4 address, or in an IPv6 network (/48), as records name them."""

AT_ONE_PLACE_MAX = 2
"""Addresses of one record that are dialled there: honest peers have one or two."""

MET_MAX = 4096

TRY_AGAIN_S = 600.0
"""Pause before direct addresses that did not answer are tried again."""


class DialLimited(PeerUnreachable):
    """The peer was not dialled, because of the limit of dials at its address."""


class Dialler:
    """Opens connections, and knows which peers are connected and which ones answered a dial."""

    def __init__(self, this: ThisPeer) -> None:
        self.connected: dict[PeerId, str | None] = {}
        """Connected peers, as of the last look and of what was dialled since, and the network of
        each, if that is known."""

        self._this = this
        self._answered = BoundedMapping[PeerId, None]("answered", ANSWERED_MAX, worth=by_age)
        self._tried = BoundedMapping[PeerId, tuple[object, float]](
            "tried addresses", MET_MAX, worth=by_age
        )
        """This peer's addresses and the direct ones of a peer connected by a relay when those were
        tried, and until when they are not tried again."""

        self._dials = Rate[str].in_a_minute(DIALS_PER_MINUTE)
        self._met_at = BoundedMapping[str, None]("met addresses", MET_MAX, worth=by_age)
        """IP addresses from which peers were connected."""

    async def look(self) -> tuple[Connection, ...]:
        """Take note of the present connections. Raises ``HostClosed``."""
        connections = await self._this.host.connections()
        self.connected = {c.peer: network_of(c.address) for c in connections}
        for connection in connections:
            if (ip := ip_of(connection.address)) is not None:
                self._met_at.renew(ip, None)
        return connections

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        """Make sure that a peer is connected, by the addresses in its record, directly if possible.

        Raises ``PeerUnreachable`` or ``HostClosed``.
        """
        there = [c for c in await self._this.host.connections() if c.peer == peer]
        if there:
            if there[0].relayed and (better := self._untried(peer)):
                with suppress(PeerUnreachable):  # it can be reached by the relay all the same
                    await self._this.host.improve(peer, better, timeout_s=timeout_s)
            return
        addresses = self.addresses_to_dial(peer)
        if not addresses and self._this.table.addresses_of(peer):
            reason = f"{DIALS_PER_MINUTE} dials at its address in this minute are the most"
            raise DialLimited(peer, reason)
        await self.dial(peer, addresses, timeout_s=timeout_s)

    def _untried(self, peer: PeerId) -> list[Multiaddr]:
        """Direct addresses at which a peer that is connected by a relay may answer.

        They are in this peer's own network, or those of a peer that others can dial. None, if they
        were tried in vain a while ago, and neither side has moved since.
        """
        this = self._this
        member = this.table.get(peer)
        if member is None:
            return []
        direct = [
            address
            for address in member.addresses
            if not is_relayed(address)
            and (member.reachable or scope_of(address) is not Scope.INTERNET)
            and self._may_lead(address)
        ]
        tried = direct, [address for address in this.addresses if not is_relayed(address)]
        before = self._tried.get(peer)
        if not direct or (before and before[0] == tried and this.now() < before[1]):
            return []
        self._tried.renew(peer, (tried, this.now() + TRY_AGAIN_S))
        return [a for a in self.addresses_to_dial(peer) if without_peer(a) in direct]

    def addresses_to_dial(self, peer: PeerId) -> list[Multiaddr]:
        """The addresses of a member's record that may be dialled now. They count as dialled.

        A peer that has answered a dial may be dialled freely: no other member's record takes its
        turns.
        """
        found = []
        left: dict[str, int] = {}
        addresses = self._this.table.addresses_of(peer)
        for address in [at for at in addresses if self._may_lead(at)] or addresses:
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

    def _may_lead(self, address: Multiaddr) -> bool:
        """Say whether an address may lead to another peer from here.

        Private addresses of other networks, and those of this machine, do not: who dialled them was
        told that the other machine is up and refuses connections, by a machine of its own network.
        """
        own = self._this.addresses
        if is_relayed(address) or scope_of(address) is Scope.INTERNET:
            return True
        near = scope_guessed((address,), own) is not Scope.INTERNET
        return near and not is_loopback(address) and address not in own

    def _limited_place(self, address: Multiaddr) -> str | None:
        """The place at which dials are counted; ``None`` if dials there are not limited."""
        ip = ip_of(address)
        if scope_of(address) is not Scope.INTERNET or ip in self._met_at:
            return None
        return "a name" if ip is None else place_of(ip)

    async def dial(self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float) -> None:
        """Open a connection. Raises ``PeerUnreachable`` or ``HostClosed``."""
        await self._this.host.connect(peer, addresses, timeout_s=timeout_s)
        self._answered.renew(peer, None)

    def network_of(self, peer: PeerId) -> str | None:
        """The network from which a peer is connected, as of the last look."""
        return self.connected.get(peer)

    def is_known(self, peer: PeerId) -> bool:
        """Say whether this peer dials others for ``peer``: for members and peers it has dialled."""
        return peer in self._answered or peer in self._this.table

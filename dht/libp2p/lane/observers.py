"""Peers outside, which tell what the router in front of this machine does.

A port of this machine has another address outside, which only the other end of a connection sees.
So a connection from that port to a peer outside is opened and kept while the address is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dht.errors import DhtError
from dht.identity import PeerId
from dht.libp2p.lane.connection import Connection, Outside, Path
from dht.libp2p.lane.lane import Lane
from dht.libp2p.lane.punching import Opening
from dht.libp2p.lane.wire import LANE_PROTOCOL, SEEN_PROTOCOL, LaneOffer, decode, is_outer

OBSERVERS_MAX = 2
"""Number of peers that are asked for the outer address of a port."""

ROUTER_OBSERVERS_MAX = 4

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RouterView:
    """Behaviour of the router in front of this machine, as peers outside see it."""

    port: int
    """A port of this machine."""

    seen: tuple[tuple[str, int], ...] = ()
    """The peer's address as each of a few others sees it."""

    has_ipv6: bool = False
    """This machine has a public IPv6 address, too."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Asks peers outside."""

    outside: Outside
    lane: Lane

    async def examine_router(self) -> RouterView:
        """Find out with the help of peers outside what the router does to IPv4.

        Raises ``DhtError``.
        """
        opening, connections, seen = Opening(), [], []
        try:
            observers = [each for each in await self.outside.observers() if _is_ipv4(each[1])]
            for peer, ip in observers[:ROUTER_OBSERVERS_MAX]:
                observed = await self._observe(opening, peer, ip)
                if observed is not None:
                    connections.append(observed[0])
                    seen.append(observed[1])
            return RouterView(opening.port, tuple(seen), has_ipv6=bool(opening.ipv6))
        finally:
            for connection in connections:
                connection.cut()
            opening.close()

    @asynccontextmanager
    async def outer_addresses(self, opening: Opening) -> AsyncIterator[tuple[Address, ...]]:
        """The outer addresses of a port, one or two. Raises ``OSError`` if there is none.

        One of IPv4 that a peer outside sees, which a connection to that peer keeps open, and this
        machine's own of IPv6, which needs nobody: routers translate no address of IPv6.
        """
        ipv6 = (opening.ipv6, opening.port) if opening.ipv6 else None
        async with self._seen_address(opening) as seen:
            known = tuple(address for address in (seen, ipv6) if address is not None)
            if not known:
                raise OSError("no connected peer can tell this peer's outer address")
            yield known

    @asynccontextmanager
    async def _seen_address(self, opening: Opening) -> AsyncIterator[Address | None]:
        """The address of IPv4 that a peer outside sees; ``None`` if no peer can tell.

        Where no peer outside has a lane, the router is taken to keep the port's number. Peers that
        could not be dialled lately are asked last: they are behind routers themselves.
        """
        observers = [each for each in await self.outside.observers() if _is_ipv4(each[1])]
        observers.sort(key=lambda each: self.lane.is_shut(each[0]))
        for peer, host in observers[:OBSERVERS_MAX]:
            observed = await self._observe(opening, peer, host)
            if observed is None:
                continue
            connection, seen = observed
            try:
                yield seen
            finally:
                connection.cut()
            return
        for peer, _ in observers[:OBSERVERS_MAX]:
            ip = ""
            with contextlib.suppress(DhtError):  # not around yield: that of the block passes
                ip = await seen_by(self.outside, peer)
            if is_outer(ip) and _is_ipv4(ip):
                yield ip, opening.port
                return
        yield None

    async def _observe(
        self, opening: Opening, peer: PeerId, host: str
    ) -> tuple[Connection, Address] | None:
        """Connect from a port to a peer outside, which tells the port's outer address."""
        connection = Connection(self.lane, Path.DIRECT, dialled=True)
        try:
            async with asyncio.timeout(self.lane.settings.answer_timeout_s):
                offer = decode(LaneOffer, await self.outside.call(peer, LANE_PROTOCOL, b""))
                dialled = await opening.dial(host, offer.port)
                answer = await connection.show(dialled, offer.ticket)
        except (OSError, TimeoutError, ValueError, DhtError):
            return None
        if is_outer(answer.seen_ip) and answer.seen_port:
            return connection, (answer.seen_ip, answer.seen_port)
        connection.cut()
        return None


async def seen_by(outside: Outside, peer: PeerId) -> str:
    """The IP address at which a connected peer sees this one. Raises ``DhtError``."""
    return (await outside.call(peer, SEEN_PROTOCOL, b"")).decode("ascii", "replace")


def _is_ipv4(ip: str) -> bool:
    return ":" not in ip

"""One TCP port that dials and listens at once, so that two peers behind routers can meet.

A router lets a packet in that answers one which went out. Two peers that know each other's outer
addresses therefore dial each other at the same time, each from the port whose outer address the
other one knows: whichever SYN arrives second passes, and TCP makes one connection of both. The
port listens as well, for a router that lets the first SYN in, and for a peer whose router gives
every connection another port, which arrives from an address that nobody could dial.

Prediction: TCP works for every pair of routers but symmetric ones with symmetric or port-restricted
ones, where one side would have to guess a port. Result, in the namespaces of
``tests/integration/wan`` at 140 ms there and back, each pair with both sides at once and with
either side 80 ms late: exactly these two pairs fail; the others meet within 0.4 s, and within 1.3 s
where the first SYN was lost (address-restricted with a symmetric one). QUIC over UDP would need the
same addresses and fail for the same two pairs, and every byte would pass through Python: both ends
of an aioquic 1.7 connection on one core of a busy machine move 12 MB in a second of its processor
time, those of a lane 1,100 to 1,230 MB (30 MB over loopback, three turns each). That is less than
the 20 MB/s asked of it, and a hundredth of what the sealed frames of ``dht.libp2p.lane.lane`` do,
which go on as they are on these connections. Hence TCP.

Peers that both have IPv6 meet over it as well, whatever their routers do with IPv4: a router of
IPv6 translates nothing, and keeps out only what nobody inside has asked for. So the two pairs that
fail meet over IPv6.

This module knows nothing of peers: everybody who connects is a stranger until the lane has seen a
ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network

from dht.libp2p.lane.wire import is_outer

ATTEMPT_S = 1.0
"""Time after which a dial is begun anew, as the kernel sends its next SYN late."""

AGAIN_S = 0.1
"""Pause after a dial that was refused: the other side was not ready. It is doubled each time, up to
``ATTEMPT_S``, as the address may be that of somebody who has nothing to do with this."""

BACKLOG = 4

ANYWHERE_IPV6 = "2000::1"
"""An address that stands for all public ones, to learn the own one. Nothing is sent there."""


class Opening:
    """One TCP port of this machine, of IPv4 and as far as possible of IPv6.

    To be closed by its owner; connections outlive it.
    """

    def __init__(self) -> None:
        self._listeners = [_listening(socket.AF_INET, 0)]
        with contextlib.suppress(OSError):  # no IPv6 here, or somebody else has its port
            self._listeners.append(_listening(socket.AF_INET6, self.port))
        self.ipv6 = own_ipv6() if len(self._listeners) > 1 else ""
        """This machine's public IPv6 address; empty without one, or if the port is of IPv4 only."""

    @property
    def port(self) -> int:
        port: int = self._listeners[0].getsockname()[1]
        return port

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def dial(self, ip: str, port: int) -> socket.socket:
        """A connection from this port. Raises ``OSError``."""
        # A machine may have several addresses of IPv6. Only the one that the other side dials gets
        # its packets through the router.
        family, own = (socket.AF_INET6, self.ipv6) if ":" in ip else (socket.AF_INET, "")
        dialling = _bound(family, self.port, own)
        try:
            await asyncio.get_running_loop().sock_connect(dialling, (ip, port))
        except BaseException:
            dialling.close()
            raise
        return dialling

    @asynccontextmanager
    async def meeting(
        self, addresses: Sequence[tuple[str, int]]
    ) -> AsyncIterator[asyncio.Queue[socket.socket]]:
        """Dial all of these addresses and listen, as long as the block runs.

        The queue receives every connection. Those that nobody took from it are closed.
        """
        found: asyncio.Queue[socket.socket] = asyncio.Queue(BACKLOG)
        accepting = [self._accept(listener, found) for listener in self._listeners]
        dialling = [self._dial_until_met(ip, port, found) for ip, port in addresses]
        tasks = [
            asyncio.create_task(work, name="meeting at an opening")
            for work in (*accepting, *dialling)
        ]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            while not found.empty():
                found.get_nowait().close()

    async def _accept(self, listener: socket.socket, found: asyncio.Queue[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # it was gone before it was accepted
                await asyncio.sleep(AGAIN_S)
                continue
            await _hand_over(accepted, found)

    async def _dial_until_met(
        self, ip: str, port: int, found: asyncio.Queue[socket.socket]
    ) -> None:
        pause_s = AGAIN_S
        while True:
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    dialled = await self.dial(ip, port)
            except TimeoutError:
                continue
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, ATTEMPT_S)
                continue
            await _hand_over(dialled, found)
            return


async def _hand_over(connected: socket.socket, found: asyncio.Queue[socket.socket]) -> None:
    try:
        await found.put(connected)
    except BaseException:
        connected.close()
        raise


def own_ipv6() -> str:
    """The public IPv6 address from which this machine reaches others; empty: it has none."""
    own = own_address_towards(ANYWHERE_IPV6)
    return own if is_outer(own) else ""


def is_near(ip: str) -> bool:
    """Say whether an address is this machine's own, or one of IPv6 in its network (/64).

    A router keeps others away from services there, and would not keep this machine away.
    """
    own = own_address_towards(ip).partition("%")[0]
    network = f"{own}/{64 if ':' in own else 32}"
    return own != "" and ip_address(ip) in ip_network(network, strict=False)


def own_address_towards(ip: str) -> str:
    """The address from which this machine would reach another one; empty: it could not."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 9))  # sends nothing
        own: str = probe.getsockname()[0]
        return own
    return ""


def _listening(family: socket.AddressFamily, port: int) -> socket.socket:
    listener = _bound(family, port)
    try:
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bound(family: socket.AddressFamily, port: int, own: str = "") -> socket.socket:
    """A socket for one end of a connection from this port, which others may share.

    ``own``: the address, if only one is meant.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind((own, port))
    except BaseException:
        made.close()
        raise
    return made

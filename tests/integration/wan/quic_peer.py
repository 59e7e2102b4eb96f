"""A seed beside a sniffer for ``test_quic``: ``ADDRESS STRANGER STRANGER_ADDRESS [unconfined]``.

When the stranger has connected, the seed closes the connection and dials the stranger at the
address of TCP that it was given. Then it tells how many packets of UDP it has sent to others.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvloop
from multiaddr import Multiaddr

from dht.identity import PeerId
from dht.libp2p import hivemind_daemon
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from tests.integration.loopback import identity
from tests.processes import say

ETH_IP, UDP = b"\x08\x00", 17
LISTEN_S = 5.0
"""A daemon that dials over QUIC as well does so at once, and repeats its first packet."""


class Sniffer:
    """Counts the packets of UDP that leave by the line."""

    def __init__(self) -> None:
        self.sent = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        self._socket.bind(("outer", 0))
        self._socket.setblocking(False)

    def look(self) -> None:
        while True:
            try:
                packet, (_, _, kind, *_) = self._socket.recvfrom(64)
            except BlockingIOError:
                return
            if kind == socket.PACKET_OUTGOING and packet[12:14] == ETH_IP and packet[23] == UDP:
                self.sent += 1


async def seed(address: str, stranger: PeerId, at: str) -> None:
    sniffer = Sniffer()
    asyncio.get_running_loop().add_reader(sniffer._socket, sniffer.look)
    daemon = DaemonSettings(
        listen=(Multiaddr(address),), serve_as_relay=True, is_public=True, port_mapping=False
    )
    async with await HivemindHost.open(identity(1), HostSettings(daemon=daemon)) as host:
        say("seed", (await host.addresses())[0])
        while not any(c.peer == stranger for c in await host.connections()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)  # each tells the other its addresses meanwhile
        await host.disconnect(stranger)
        await host.connect(stranger, [Multiaddr(at)], timeout_s=20)
        await asyncio.sleep(LISTEN_S)
        connected = [str(c.address) for c in await host.connections() if c.peer == stranger]
        say("sent", sniffer.sent, "over", *connected)


def main() -> None:
    address, stranger, at, *unconfined = sys.argv[1:]
    if unconfined:
        hivemind_daemon._guard = lambda: ()
    uvloop.run(seed(address, PeerId(stranger), at))


if __name__ == "__main__":
    main()

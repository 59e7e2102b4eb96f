"""One host of ``test_port_mapping``, started as a process of its own.

``home LANE_PORT OUTSIDE`` asks its router for the lane's port, connects to the peer outside, and
serves until SIGTERM. ``outside ADDRESS`` dials the lane of every peer that connects.
Each step is a line on stdout.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop
from multiaddr import Multiaddr

from dht.addresses import ip_of, peer_of
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from dht.libp2p.lane.wire import is_outer
from tests.integration.loopback import identity
from tests.processes import say


async def home(lane_port: int, outside: str) -> None:
    at = Multiaddr(outside)
    peer = peer_of(at)
    assert peer is not None
    daemon = DaemonSettings(listen=(Multiaddr("/ip4/0.0.0.0/tcp/0"),))
    settings = HostSettings(daemon=daemon, lane=LaneSettings(port=lane_port))
    async with await HivemindHost.open(identity(2), settings) as host:
        assert host.lane is not None
        for _ in range(150):  # until the router has answered twice, if it does
            if host.lane.told_port != lane_port and host._mapped_port is not None:
                break
            await asyncio.sleep(0.1)
        await host.connect(peer, [at], timeout_s=30)
        outer = [a for a in await host.addresses() if is_outer(ip_of(a) or "")]
        say("dialled at", *outer)
        say("home", host.lane.told_port)
        told_to_end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
        await told_to_end.wait()
    say("closed", lane_port)


async def outside(address: str) -> None:
    listen = (Multiaddr(address),)
    daemon = DaemonSettings(listen=listen, is_public=True, port_mapping=False)
    host = await HivemindHost.open(identity(1), HostSettings(daemon=daemon, lane=LaneSettings()))
    assert host.lane is not None
    say("outside", (await host.addresses())[0])
    tried = set()
    while True:
        await asyncio.sleep(0.2)
        for connection in await host.connections():
            if connection.peer not in tried:
                tried.add(connection.peer)
                reason = await host.lane.reach(connection.peer)
                # By then the home has closed the connection with which it asked for its address.
                await asyncio.sleep(1.0)
                path = host.lane.paths().get(connection.peer)
                say("reached" if reason is None else "apart", reason if path is None else path.name)


def main() -> None:
    role, *arguments = sys.argv[1:]
    uvloop.run(
        outside(arguments[0]) if role == "outside" else home(int(arguments[0]), arguments[1])
    )


if __name__ == "__main__":
    main()

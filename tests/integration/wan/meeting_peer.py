"""One host of ``test_meetings``, started as a process of its own.

``relay ADDRESSES LANE`` relays control messages, has a lane if LANE is ``on`` or ``relaying``, and
relays bulk data if it is ``relaying``.
``home NUMBER RELAYS OTHERS...`` can be reached only through the relay. It opens a direct connection
to each of the others, one after the other, and sends a megabyte over it.
``look NUMBER OUTSIDE...`` is connected with these peers outside and prints the kind of its router.
Several addresses of one host are separated by commas. Each step is a line on stdout.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop
from multiaddr import Multiaddr

from dht.addresses import peer_of
from dht.errors import DhtError
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import PeerId
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from peer.extras.doctor.network import describe_router
from tests.integration.loopback import identity
from tests.processes import say

BULK = "/test/bulk"
CONNECT_WITHIN_S = 30.0
RELAY_RATE = 10e6


async def everybody(peer: PeerId, other: PeerId) -> str | None:
    return None


def addresses(text: str) -> tuple[Multiaddr, ...]:
    return tuple(map(Multiaddr, text.split(",")))


async def relay(listen: str, lane: str, number: str = "1") -> None:
    daemon = DaemonSettings(
        listen=addresses(listen), serve_as_relay=True, is_public=True, port_mapping=False
    )
    settings = HostSettings(daemon=daemon, lane=None if lane == "off" else LaneSettings())
    host = await HivemindHost.open(identity(int(number)), settings)
    if host.lane is not None and lane == "relaying":
        host.lane.relay.judge = everybody
        host.lane.relay.set_rate(RELAY_RATE)
    say("relay", ",".join(map(str, await host.addresses())))
    await asyncio.Event().wait()


async def home(number: int, relays: str, others: list[int]) -> None:
    through = addresses(relays)
    relay_peer = peer_of(through[0])
    assert relay_peer is not None
    daemon = DaemonSettings(listen=(Multiaddr("/ip4/0.0.0.0/tcp/0"),), port_mapping=False)
    settings = HostSettings(
        daemon=daemon, relays=through, is_hidden=True, serve_directory=False, lane=LaneSettings()
    )
    host = await HivemindHost.open(identity(number), settings)

    async def swallow(stream: Stream) -> None:
        size = 0
        while (frame := await stream.receive(timeout_s=10)) is not None:
            size += len(frame)
        say("swallowed", stream.remote, size, f"relayed={stream.relayed}")

    await host.serve_streams(BULK, swallow)
    await host.connect(relay_peer, through, timeout_s=10)
    say("home", number)
    for other in others:
        await meet(host, other, through[0])
    say("finished", number)
    await asyncio.Event().wait()


async def look(number: int, outside: list[str]) -> None:
    """Print what the doctor says about the router."""
    daemon = DaemonSettings(listen=(Multiaddr("/ip4/0.0.0.0/tcp/0"),), port_mapping=False)
    settings = HostSettings(daemon=daemon, serve_directory=False, lane=LaneSettings())
    async with await HivemindHost.open(identity(number), settings) as host:
        assert host.lane is not None
        for address in map(Multiaddr, outside):
            peer = peer_of(address)
            assert peer is not None
            await host.connect(peer, [address], timeout_s=30)
        say("router", describe_router(await host.lane.examine_router(), []).text)


async def meet(host: HivemindHost, number: int, through: Multiaddr) -> None:
    """Connect to another home through the relay, then directly."""
    other = identity(number).peer_id
    circuit = Multiaddr(f"{through}/p2p-circuit/p2p/{other}")
    give_up_at = time.monotonic() + CONNECT_WITHIN_S
    while True:
        try:
            await host.connect(other, [circuit], timeout_s=10)
            break
        except DhtError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.5)  # it may not have started yet
    assert host.lane is not None
    began = time.monotonic()
    reason = await host.lane.reach(other)
    if reason is not None:
        say("apart", number, reason)
        return
    took_s = time.monotonic() - began
    stream = await host.open_stream(other, BULK, timeout_s=10, bulk=True)
    await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=10)
    await stream.finish(timeout_s=10)
    stream.abort()
    say("met", number, f"{took_s:.2f}", host.lane.paths()[other].name, f"relayed={stream.relayed}")


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "relay":
        uvloop.run(relay(*arguments))
    elif role == "look":
        uvloop.run(look(int(arguments[0]), arguments[1:]))
    else:
        others = [int(other) for other in arguments[2:]]
        uvloop.run(home(int(arguments[0]), arguments[1], others))


if __name__ == "__main__":
    main()

"""One host of ``test_politeness``, started as a process of its own.

``sink ADDRESS`` listens and swallows what it is sent.
``source SINK_ADDRESS SECONDS POLITE`` sends for so long over the lane, and prints bytes per second;
POLITE is ``yes`` or ``no``.
"""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop
from multiaddr import Multiaddr

from dht.addresses import peer_of
from dht.host import FRAME_MAX_BYTES, Stream
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from tests.integration.loopback import identity
from tests.processes import say

BULK = "/test/bulk"
STREAMS = 2
TIMEOUT_S = 60.0


def settings(listen: str, *, polite: bool = True) -> HostSettings:
    daemon = DaemonSettings(listen=(Multiaddr(listen),), is_public=True, port_mapping=False)
    return HostSettings(daemon=daemon, lane=LaneSettings(polite=polite, wait_s=5.0))


async def sink(address: str) -> None:
    host = await HivemindHost.open(identity(1), settings(address))

    async def swallow(stream: Stream) -> None:
        while await stream.receive(timeout_s=TIMEOUT_S) is not None:
            pass

    await host.serve_streams(BULK, swallow)
    say("sink", (await host.addresses())[0])
    await asyncio.Event().wait()


async def source(address: str, seconds: float, *, polite: bool) -> None:
    at = Multiaddr(address)
    peer = peer_of(at)
    assert peer is not None
    host = await HivemindHost.open(identity(2), settings("/ip4/0.0.0.0/tcp/0", polite=polite))
    await host.connect(peer, [at], timeout_s=TIMEOUT_S)
    # Random bytes are not packed, so that the bytes sent are those on the line.
    loop, frame, sent = asyncio.get_running_loop(), os.urandom(FRAME_MAX_BYTES // 2), 0

    async def send() -> None:
        nonlocal sent
        stream = await host.open_stream(peer, BULK, timeout_s=TIMEOUT_S, bulk=True)
        while loop.time() < until:
            await stream.send(frame, timeout_s=TIMEOUT_S)
            sent += len(frame)
        stream.abort()

    say("sending", "now")
    began = loop.time()
    until = began + seconds
    await asyncio.gather(*(send() for _ in range(STREAMS)))
    say("sent", f"{sent / (loop.time() - began):.0f}")
    await host.close()


def main() -> None:
    role, address, *rest = sys.argv[1:]
    uvloop.run(
        sink(address)
        if role == "sink"
        else source(address, float(rest[0]), polite=rest[1] == "yes")
    )


if __name__ == "__main__":
    main()

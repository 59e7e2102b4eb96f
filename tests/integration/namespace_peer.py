"""One host inside a network namespace, for ``test_namespaces``. Started as a process of its own.

``relay ADDRESS`` is the public host: it relays, and accepts bulk streams.
``hidden NUMBER OTHER RELAY`` cannot be dialled: it joins the run through
the relay, finds the other hidden peer in the membership, sends it a message, and
opens a bulk stream to the public host. Each step is a line on stdout.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import uvloop
from multiaddr import Multiaddr

from dht.addresses import peer_of
from dht.errors import DhtError
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import PeerId, RunId
from dht.libp2p.hivemind_daemon import DaemonSettings
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.settings import LaneSettings
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from dht.presence.this_peer import Events
from tests.integration.loopback import identity

RUN = RunId("c0ffee")
BULK_FRAMES = 8
BULK = "/test/bulk"
ECHO = "/test/echo"
LANE = LaneSettings(wait_s=10.0)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def eventually(name: str, condition: Callable[[], bool], *, timeout_s: float) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"{name}: not within {timeout_s:g} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def relay(address: str) -> None:
    daemon = DaemonSettings(
        listen=(Multiaddr(address),), serve_as_relay=True, is_public=True, port_mapping=False
    )
    host = await HivemindHost.open(identity(1), HostSettings(daemon=daemon, lane=LANE))

    async def swallow(stream: Stream) -> None:
        size = 0
        while (frame := await stream.receive(timeout_s=10)) is not None:
            size += len(frame)
        say("swallowed", stream.remote, size, f"relayed={stream.relayed}")

    await host.serve_streams(BULK, swallow)
    presence = Presence(host, identity(1), Profile(None))
    await presence.start()
    say("relay", (await host.addresses())[0])
    await presence.watch()


async def hidden(number: int, other_number: int, relay_address: str) -> None:
    relays = (Multiaddr(relay_address),)
    public = peer_of(relays[0])
    other = identity(other_number).peer_id
    assert public is not None
    daemon = DaemonSettings(
        # As behind NAT: other hosts have no route to its own address.
        listen=(Multiaddr(f"/ip4/11.88.0.{number}/tcp/0"),),
        port_mapping=False,
    )
    settings = HostSettings(
        daemon=daemon,
        relays=relays,
        # One of the two knows that it cannot be dialled; the other has to find out.
        is_hidden=number == 2,
        serve_directory=number != 2,
        lane=LANE,
    )
    host = await HivemindHost.open(identity(number), settings)

    async def echo(peer: PeerId, request: bytes) -> bytes:
        return request

    await host.serve_calls(ECHO, echo, request_max_bytes=100)
    presence = Presence(
        host,
        identity(number),
        Profile(RUN),
        seeds=relays,
        events=Events(lambda event: say(event.name, event.text), host.set_reachable),
    )
    await presence.start()
    await eventually("dial-out only", lambda: presence.reachable is False, timeout_s=60)

    found_s = await eventually(
        "found in the membership",
        lambda: other in {m.peer for m in presence.table.live(asyncio.get_running_loop().time())},
        timeout_s=60,
    )
    say("found", other, f"after_s={found_s:.1f}")
    began = time.monotonic()
    while True:
        try:
            await presence.connect(other, timeout_s=10)
            answer = await host.call(other, ECHO, b"from the other side", timeout_s=10)
            break
        except DhtError as error:
            say("again", error)
            if time.monotonic() - began > 60:
                raise
            await asyncio.sleep(0.5)
    assert answer == b"from the other side"
    (connection,) = (c for c in await host.connections() if c.peer == other)
    say("answered", f"relayed={connection.relayed}", f"after_s={time.monotonic() - began:.1f}")

    assert host.lane is not None
    say("lane to the other:", await host.lane.reach(other))
    stream = await host.open_stream(public, BULK, timeout_s=10, bulk=True)
    say("direct", host.lane.counters["streams_opened"])
    for _ in range(BULK_FRAMES):
        await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=10)
    await stream.finish(timeout_s=10)
    stream.abort()
    say("bulk", BULK_FRAMES * FRAME_MAX_BYTES, f"relayed={stream.relayed}")
    await presence.watch()  # until the test ends this process: the other may still need it


def main() -> None:
    role, *arguments = sys.argv[1:]
    uvloop.run(
        relay(arguments[0])
        if role == "relay"
        else hidden(int(arguments[0]), int(arguments[1]), arguments[2])
    )


if __name__ == "__main__":
    main()

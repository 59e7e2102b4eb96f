"""A stranger on the network, in no run, that sends garbage or a flood on every protocol."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec
import numpy as np
from multiaddr import Multiaddr

from averaging.live.states.fetch_server import fetch_protocol
from averaging.live.streams.links import bulk_protocol, control_protocol
from dht import addresses as address_rules
from dht.errors import DhtError
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.framing.frame_stream import HEADER, FrameType
from dht.libp2p.framing.sealing import NUMBER_BYTES
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from dht.libp2p.lane.wire import LANE_PROTOCOL, LaneOffer
from dht.membership.hello import (
    CONFIRM_PROTOCOL,
    DIAL_BACK_PROTOCOL,
    HELLO_PROTOCOL,
    RUN_FILE_PROTOCOL,
)
from peer import status

CALLS = (
    HELLO_PROTOCOL,
    DIAL_BACK_PROTOCOL,
    CONFIRM_PROTOCOL,
    RUN_FILE_PROTOCOL,
    status.CALL.protocol,
    "DHTProtocol.rpc_ping",
    "DHTProtocol.rpc_store",
    "DHTProtocol.rpc_find",
    LANE_PROTOCOL,
)
FLOOD_STREAMS = 200
"""Number of streams opened at once, per protocol and peer."""
KNOCKS = 64
"""Number of silent connections to the port of a lane, besides those streams."""
TIMEOUT_S = 5.0
HOST = HostSettings(
    listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),),
    serve_directory=False,
    lane=LaneSettings(wait_s=1.0),
)


def streams_of(run: RunId) -> tuple[str, ...]:
    return control_protocol(run), bulk_protocol(run), fetch_protocol(run)


async def garbage(
    host: HivemindHost,
    peers: Mapping[PeerId, str],
    run: RunId,
    rng: np.random.Generator,
    done: Counter[str],
) -> None:
    """Send garbage on each protocol of each peer, and to the port of its lane."""
    for peer, ip in peers.items():
        for protocol in CALLS:
            try:
                await host.call(
                    peer, protocol, rng.bytes(int(rng.integers(0, 2000))), timeout_s=TIMEOUT_S
                )
                done["calls_answered"] += 1
            except (DhtError, ValueError):
                done["calls_refused"] += 1
        await _babble(host, peer, ip, rng, done)
        for protocol in streams_of(run):
            try:
                # Also over the lane, correctly sealed.
                stream = await host.open_stream(
                    peer, protocol, timeout_s=TIMEOUT_S, bulk=bool(rng.integers(0, 2))
                )
            except DhtError:
                done["streams_refused"] += 1
                continue
            try:
                for _ in range(20):
                    # A valid first byte is frequent, so that the rest is parsed as well.
                    head = bytes([1, 1][: int(rng.integers(0, 3))])
                    data = head + rng.bytes(int(rng.integers(0, 3000)))
                    await stream.send(data, timeout_s=TIMEOUT_S)
                    done["frames"] += 1
            except DhtError:
                done["streams_broken"] += 1
            finally:
                stream.abort()


async def _lane_of(host: HivemindHost, peer: PeerId) -> LaneOffer | None:
    """The port of a peer's lane with a ticket for it, which every peer gets."""
    try:
        answer = await host.call(peer, LANE_PROTOCOL, b"", timeout_s=TIMEOUT_S)
        return msgspec.msgpack.decode(answer, type=LaneOffer)
    except (DhtError, msgspec.MsgspecError):
        return None


async def _connected(ip: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (ip, port))
    except BaseException:
        made.close()
        raise
    return made


async def _babble(
    host: HivemindHost, peer: PeerId, ip: str, rng: np.random.Generator, done: Counter[str]
) -> None:
    """Send garbage to the port of a lane: at once, and after a valid ticket."""
    offer = await _lane_of(host, peer)
    if offer is None:
        done["lanes_refused"] += 1
        return
    loop = asyncio.get_running_loop()
    ticket = bytes((NUMBER_BYTES,)) + offer.ticket.number
    for before in (b"", ticket, HEADER.pack(2**32 - 1, FrameType.DATA)):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                with await _connected(ip, offer.port) as knocker:
                    data = before + rng.bytes(int(rng.integers(0, 3000)))
                    await loop.sock_sendall(knocker, data)
                    done["lane_babble"] += 1
                    await loop.sock_recv(knocker, 1000)  # until the peer hangs up
        except (OSError, TimeoutError):
            done["lane_breaks"] += 1


async def knock_silently(ip: str, port: int, done: Counter[str]) -> None:
    """Open silent connections to the port of a lane, again and again."""
    while True:
        with ExitStack() as knocking:
            for _ in range(KNOCKS):
                with suppress(OSError):
                    knocking.enter_context(await _connected(ip, port))
                    done["knocks"] += 1
            await asyncio.sleep(TIMEOUT_S)


async def flood(
    host: HivemindHost,
    peers: Mapping[PeerId, str],
    run: RunId,
    rng: np.random.Generator,
    done: Counter[str],
) -> None:
    """Open as many streams as possible, with large frames or announcements of impossible ones."""

    async def one(peer: PeerId, protocol: str, *, bulk: bool) -> None:
        try:
            stream = await host.open_stream(peer, protocol, timeout_s=TIMEOUT_S, bulk=bulk)
        except DhtError:
            done["streams_refused"] += 1
            return
        done["streams"] += 1
        try:
            if rng.random() < 0.3:
                announce_too_much(stream)
                done["frames_too_large"] += 1
                await stream.receive(timeout_s=TIMEOUT_S)
            else:
                for _ in range(4):
                    await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=TIMEOUT_S)
                    done["frames"] += 1
        except DhtError:
            done["streams_broken"] += 1
        finally:
            stream.abort()

    # Asked first: a flooded peer may not answer any more.
    offers = {peer: await _lane_of(host, peer) for peer in peers}
    async with asyncio.TaskGroup() as tasks:
        knocking = [
            tasks.create_task(knock_silently(peers[peer], offer.port, done))
            for peer, offer in offers.items()
            if offer is not None
        ]
        for protocol in streams_of(run):
            for peer in peers:
                await asyncio.gather(
                    *(one(peer, protocol, bulk=number % 8 == 0) for number in range(FLOOD_STREAMS))
                )
        for task in knocking:
            task.cancel()


def announce_too_much(stream: Stream) -> None:
    """Write the header of a frame of four gigabytes."""
    transport = getattr(stream, "_transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        transport.write(b"\xff\xff\xff\xff\x00" + bytes(1000))


async def attack(
    what: str, run: RunId, at: Sequence[Multiaddr], done: Counter[str], *, seed: int
) -> None:
    """Attack these addresses without end. Counts in ``done``."""
    rng = np.random.default_rng(seed)
    act = flood if what == "flood" else garbage
    async with await HivemindHost.open(Identity.generate(), HOST) as host:
        while True:
            try:
                await act(host, await dial(host, at, done), run, rng, done)
            finally:
                assert host.lane is not None
                done["lane_streams"] = host.lane.counters["streams_opened"]
            done["turns"] += 1
            await asyncio.sleep(0.1)


async def dial(
    host: HivemindHost, at: Sequence[Multiaddr], done: Counter[str]
) -> dict[PeerId, str]:
    """Connect to all addresses; returns the IP address of each peer that was reached."""
    peers: dict[PeerId, str] = {}
    for address in at:
        peer = address_rules.peer_of(address)
        assert peer is not None
        try:
            await host.connect(peer, [address], timeout_s=TIMEOUT_S)
            peers[peer] = address_rules.ip_of(address) or "127.0.0.1"
        except DhtError:
            done["dials_failed"] += 1
    return peers

"""One host of a test in network namespaces, started as a process of its own with a role.

Hosts with an address outside, which print it after their role:

- ``relay ADDRESSES LANE [NUMBER]`` relays control messages, has a lane if LANE is ``on`` or
  ``relaying``, and relays bulk data if it is ``relaying``;
- ``outside ADDRESS`` dials the lane of every peer that connects;
- ``sink ADDRESS`` swallows what it is sent;
- ``seed ADDRESS STRANGER STRANGER_ADDRESS [unconfined]`` closes the connection of the stranger, as
  soon as there is one, and dials it at the address of TCP that was given. Then it tells how many
  packets of UDP its machine has sent to others.

Hosts in homes:

- ``home NUMBER RELAYS OTHERS...`` can be reached only through the relay. It opens a direct
  connection to each of the others, one after the other, and sends a megabyte over it;
- ``look NUMBER OUTSIDE...`` is connected with these peers outside, and prints the kind of its
  router;
- ``mapped LANE_PORT OUTSIDE`` asks its router for the lane's port, connects to the peer outside,
  and serves until SIGTERM;
- ``source SINK SECONDS POLITE`` sends for so long over the lane, and prints bytes per second;
  POLITE is ``yes`` or ``no``.

Several addresses of one host are separated by commas. Each step is a line on stdout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import uvloop
from multiaddr import Multiaddr

from dht.addresses import ip_of, peer_of
from dht.errors import DhtError
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import PeerId
from dht.libp2p import hivemind_daemon
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from dht.libp2p.lane.wire import is_outer
from peer.extras.doctor.network import describe_router
from tests.integration.loopback import identity
from tests.processes import Processes, say

BULK = "/test/bulk"
CONNECT_WITHIN_S = 30.0
RELAY_RATE = 10e6
STREAMS = 2
TIMEOUT_S = 60.0
ANYWHERE = Multiaddr("/ip4/0.0.0.0/tcp/0")


def start(processes: Processes, at: Sequence[str], *words: str) -> subprocess.Popen[bytes]:
    """Start a host with this role. ``at``: what begins a command on its computer."""
    return processes.start([*at, sys.executable, "-m", __name__, *words])


def listening(
    processes: Processes, at: Sequence[str], role: str, *words: str
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a host outside, and wait for its addresses."""
    host = start(processes, at, role, *words)
    return host, processes.wait_for_line(host, f"{role} ", timeout_s=60).split()[1]


def addresses(text: str) -> tuple[Multiaddr, ...]:
    return tuple(map(Multiaddr, text.split(",")))


def public(listen: str, lane: LaneSettings | None = None) -> HostSettings:
    return HostSettings(listen=addresses(listen), is_bootstrap=True, port_mapping=False, lane=lane)


IN_A_HOME = HostSettings(listen=(ANYWHERE,), port_mapping=False)


async def told(role: str, host: HivemindHost) -> None:
    say(role, ",".join(map(str, await host.addresses())))


async def connected(host: HivemindHost, text: str) -> PeerId:
    """Connect to a peer with these addresses."""
    at = addresses(text)
    peer = peer_of(at[0])
    assert peer is not None
    await host.connect(peer, at, timeout_s=TIMEOUT_S)
    return peer


# --- outside ---------------------------------------------------------------------------------


async def everybody(peer: PeerId, other: PeerId) -> str | None:
    return None


async def relay(listen: str, lane: str, number: str = "1") -> None:
    settings = public(listen, None if lane == "off" else LaneSettings())
    host = await HivemindHost.open(identity(int(number)), settings)
    if host.lane is not None and lane == "relaying":
        host.lane.relay.judge = everybody
        host.lane.relay.set_rate(RELAY_RATE)
    await told("relay", host)
    await asyncio.Event().wait()


async def outside(listen: str) -> None:
    settings = public(listen, LaneSettings())
    host = await HivemindHost.open(identity(1), settings)
    assert host.lane is not None
    await told("outside", host)
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


async def sink(listen: str) -> None:
    settings = public(listen, LaneSettings(wait_s=5.0))
    host = await HivemindHost.open(identity(1), settings)

    async def swallow(stream: Stream) -> None:
        while await stream.receive(timeout_s=TIMEOUT_S) is not None:
            pass

    await host.serve_streams(BULK, swallow)
    await told("sink", host)
    await asyncio.Event().wait()


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
        asyncio.get_running_loop().add_reader(self._socket, self._look)

    def _look(self) -> None:
        while True:
            try:
                packet, (_, _, kind, *_) = self._socket.recvfrom(64)
            except BlockingIOError:
                return
            if kind == socket.PACKET_OUTGOING and packet[12:14] == ETH_IP and packet[23] == UDP:
                self.sent += 1


async def seed(listen: str, name: str, at: str, unconfined: str = "") -> None:
    if unconfined:
        hivemind_daemon._guard = lambda: ()
    sniffer, stranger = Sniffer(), PeerId(name)
    settings = public(listen)
    async with await HivemindHost.open(identity(1), settings) as host:
        await told("seed", host)
        while not any(c.peer == stranger for c in await host.connections()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)  # each tells the other its addresses meanwhile
        await host.disconnect(stranger)
        await host.connect(stranger, [Multiaddr(at)], timeout_s=20)
        await asyncio.sleep(LISTEN_S)
        over = [str(c.address) for c in await host.connections() if c.peer == stranger]
        say("sent", sniffer.sent, "over", *over)


# --- in homes --------------------------------------------------------------------------------


async def home(number: str, relays: str, *others: str) -> None:
    settings = replace(
        IN_A_HOME,
        relays=addresses(relays),
        serve_directory=False,
        lane=LaneSettings(),
    )
    host = await HivemindHost.open(identity(int(number)), settings)

    async def swallow(stream: Stream) -> None:
        size = 0
        while (frame := await stream.receive(timeout_s=10)) is not None:
            size += len(frame)
        say("swallowed", stream.remote, size, f"relayed={stream.relayed}")

    await host.serve_streams(BULK, swallow)
    await connected(host, relays)
    say("home", number)
    for other in others:
        await meet(host, int(other), addresses(relays)[0])
    say("finished", number)
    await asyncio.Event().wait()


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


async def look(number: str, *others: str) -> None:
    """Print what the doctor says about the router."""
    settings = replace(IN_A_HOME, serve_directory=False, lane=LaneSettings())
    async with await HivemindHost.open(identity(int(number)), settings) as host:
        assert host.meetings is not None
        for other in others:
            await connected(host, other)
        say("router", describe_router(await host.meetings.observers.examine_router(), []).text)


async def mapped(port: str, other: str) -> None:
    lane_port = int(port)
    settings = replace(IN_A_HOME, port_mapping=True, lane=LaneSettings(port=lane_port))
    async with await HivemindHost.open(identity(2), settings) as host:
        assert host.lane is not None
        for _ in range(150):  # until the router has answered twice, if it does
            if host.lane.told_port != lane_port and host._mapped_port is not None:
                break
            await asyncio.sleep(0.1)
        await connected(host, other)
        outer = [a for a in await host.addresses() if is_outer(ip_of(a) or "")]
        say("dialled at", *outer)
        say("mapped", host.lane.told_port)
        told_to_end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
        await told_to_end.wait()
    say("closed", lane_port)


async def source(to: str, seconds: str, polite: str) -> None:
    lane = LaneSettings(polite=polite == "yes", wait_s=5.0)
    settings = replace(IN_A_HOME, is_bootstrap=True, lane=lane)
    host = await HivemindHost.open(identity(2), settings)
    peer = await connected(host, to)
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
    until = began + float(seconds)
    await asyncio.gather(*(send() for _ in range(STREAMS)))
    say("sent", f"{sent / (loop.time() - began):.0f}")
    await host.close()


ROLES = {each.__name__: each for each in (relay, outside, sink, seed, home, look, mapped, source)}

if __name__ == "__main__":
    uvloop.run(ROLES[sys.argv[1]](*sys.argv[2:]))

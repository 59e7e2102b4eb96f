"""The host works in spite of each fact about hivemind that ``dht.libp2p`` lists."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht import addresses
from dht.errors import CallRefused, HostClosed, PeerUnreachable, StreamBroken
from dht.host import UNARY_MAX_BYTES, Stream
from dht.identity import PeerId
from dht.libp2p.dialling import why_silent
from dht.libp2p.hivemind_daemon import Daemon
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.hivemind_imports import P2PHandlerError, PeerID
from dht.records import PeerRecord, seal
from tests.integration.loopback import (
    LOOPBACK,
    WAIT_S,
    Pair,
    dial_out_only,
    hosts,
    identity,
    run,
    until,
)

RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
KEY = "run/peers/0"
"""Nothing here takes so long, however busy the machine."""


OF_HIVEMIND = pytest.mark.slow
"""A fact that changes with the version of hivemind, which ``constraints.txt`` pins."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


async def echo(peer: PeerId, request: bytes) -> bytes:
    return request


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/udp/4001/quic-v1", "/ip4/127.0.0.1/udp/1"])
def test_other_transports_than_tcp_are_refused(address: str) -> None:
    at = (Multiaddr(address),)
    with pytest.raises(ValueError, match="only /tcp"):
        HostSettings(listen=at)
    with pytest.raises(ValueError, match="only /tcp"):
        HostSettings(announce=at)
    with pytest.raises(ValueError, match="over /tcp only"):
        HostSettings(relays=at)


@pytest.mark.skipif(sys.platform != "linux", reason="there are no filters elsewhere")
def test_the_daemon_runs_under_a_filter_that_leaves_it_no_udp(pair: Pair) -> None:
    """QUIC of 2023 would be dialled wherever a stranger's address names it."""

    async def scenario(host: HivemindHost, _: HivemindHost) -> None:
        pids.append(host.daemon_pid)

    pids: list[int | None] = []
    pair.run(scenario)
    status = Path(f"/proc/{pids[0]}/status").read_text()
    told = dict(line.split(":\t", 1) for line in status.splitlines())
    assert (told["Seccomp"], told["NoNewPrivs"], told["Name"]) == ("2", "1", "p2pd")


def test_a_peer_is_dialled_by_the_name_of_its_host(pair: Pair) -> None:
    """The daemon itself can look up no name."""

    async def scenario(host: HivemindHost, other: HivemindHost) -> None:
        port = addresses.port_of((await other.addresses())[0])
        named = Multiaddr(f"/dns4/localhost/tcp/{port}")
        async with host.stranger() as stranger:  # nobody dials it meanwhile
            await stranger.connect(other.peer_id, [named], timeout_s=WAIT_S)
            connections = await stranger.connections()
        # The other one may dial back, too.
        assert f"/ip4/127.0.0.1/tcp/{port}" in [str(each.address) for each in connections]

    pair.run(scenario)


def test_streams_dropped_right_after_the_last_frame_arrive_whole(pair: Pair) -> None:
    async def scenario(receiver: HivemindHost, sender: HivemindHost) -> None:
        arrived: list[int] = []

        async def count(stream: Stream) -> None:
            size = 0
            while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
                size += len(frame)
            arrived.append(size)

        await receiver.serve_streams("/test/count", count)

        async def send(size: int) -> None:
            stream = await sender.open_stream(receiver.peer_id, "/test/count", timeout_s=WAIT_S)
            await stream.send(bytes(size), timeout_s=WAIT_S)
            await stream.finish(timeout_s=WAIT_S)
            stream.abort()

        sizes = [1_000, 100_000] * 30
        await asyncio.gather(*(send(size) for size in sizes))
        await until(lambda: len(arrived) == len(sizes), timeout_s=WAIT_S)
        assert sorted(arrived) == sorted(sizes)

    pair.run(scenario)


def test_the_last_acknowledgement_arrives_although_its_sender_lets_go_at_once(pair: Pair) -> None:
    async def scenario(server: HivemindHost, client: HivemindHost) -> None:
        finished: list[bool] = []

        async def say(stream: Stream) -> None:
            await stream.send(b"all of it", timeout_s=WAIT_S)
            await stream.finish(timeout_s=WAIT_S)
            finished.append(True)

        await server.serve_streams("/test/say", say)

        async def listen() -> None:
            stream = await client.open_stream(server.peer_id, "/test/say", timeout_s=WAIT_S)
            assert await stream.receive(timeout_s=WAIT_S) == b"all of it"
            assert await stream.receive(timeout_s=WAIT_S) is None  # this sends the ACK
            stream.abort()

        await asyncio.gather(*(listen() for _ in range(50)))
        await until(lambda: len(finished) == 50, timeout_s=WAIT_S)

    pair.run(scenario)


async def test_a_stream_that_merely_stops_is_broken() -> None:
    async with hosts(2) as (server, client):

        async def stop_half_way(end: str, stream: Stream) -> None:
            await stream.receive(timeout_s=WAIT_S)  # by now the other side knows of the stream
            await stream.send(b"half", timeout_s=WAIT_S)
            if end == "abort":
                stream.abort()
            elif end == "raise":
                raise StreamBroken(stream.remote, "as if")
            elif end == "daemon":
                assert server.daemon_pid is not None
                os.kill(server.daemon_pid, signal.SIGKILL)

        for end in ("abort", "raise", "return", "daemon"):
            protocol = f"/test/half/{end}"
            await server.serve_streams(protocol, partial(stop_half_way, end))
            stream = await client.open_stream(server.peer_id, protocol, timeout_s=WAIT_S)
            await stream.send(b"go", timeout_s=WAIT_S)
            with pytest.raises(StreamBroken):  # the frame itself may or may not arrive before
                for _ in range(2):
                    assert await stream.receive(timeout_s=WAIT_S) == b"half", end
            stream.abort()


@OF_HIVEMIND
def test_large_messages_pass_and_no_part_of_hivemind_that_forks_is_there() -> None:
    script = """
import asyncio, sys
import uvloop
from tests.integration.loopback import hosts

async def echo(peer, request):
    return request

async def main():
    async with hosts(2) as (server, client):
        await server.serve_calls("/test/echo", echo, request_max_bytes=1 << 20)
        for size in (130_000, 300_000, 1 << 20):
            message = bytes(size)
            assert await client.call(server.peer_id, "/test/echo", message, timeout_s=30) == message

uvloop.run(main())
loaded = {"torch", "hivemind.dht.dht", "hivemind.utils.mpfuture"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@OF_HIVEMIND
async def test_the_routing_table_is_filled_again_after_it_was_emptied() -> None:
    async with hosts(3) as opened:
        client = opened[2]
        await client.connect(opened[1].peer_id, await opened[1].addresses(), timeout_s=WAIT_S)
        await until(lambda: client.directory.neighbours == 2, timeout_s=WAIT_S)
        protocol = client.directory._protocol
        for host in opened[:2]:  # what hivemind does after one reply that was late
            other = PeerID.from_base58(host.peer_id)
            await protocol.update_routing_table(None, other, responded=False)
        assert client.directory.neighbours == 0
        await until(lambda: client.directory.neighbours == 2, timeout_s=WAIT_S)
        assert await publish(client, 3) == 2


@OF_HIVEMIND
async def test_a_silent_peer_costs_one_time_out_and_comes_back() -> None:
    async with hosts(2) as (stalled, client):
        assert stalled.daemon_pid is not None
        os.kill(stalled.daemon_pid, signal.SIGSTOP)
        try:
            assert await publish(client, 2, timeout_s=0.3) == 0
            await client.directory._protocol.update_routing_table(
                None, PeerID.from_base58(stalled.peer_id), responded=False
            )
            assert client.directory.neighbours == 0
        finally:
            os.kill(stalled.daemon_pid, signal.SIGCONT)
        await until(lambda: client.directory.neighbours == 1, timeout_s=2 * WAIT_S)
        assert await publish(client, 2, sequence=2) == 1


async def publish(
    host: HivemindHost, number: int, *, sequence: int = 1, timeout_s: float = WAIT_S
) -> int:
    record = seal(RECORD, identity(number), key=KEY, sequence=sequence, ttl_s=30)
    return await host.directory.publish(KEY, record, timeout_s=timeout_s)


@OF_HIVEMIND
async def test_a_record_that_nobody_else_stored_counts_as_stored_on_nobody() -> None:
    async with hosts(1) as (alone,):
        assert await publish(alone, 1) == 0, "its own copy does not count"
        assert list(await alone.directory.look_up(KEY, timeout_s=WAIT_S)) == [alone.peer_id]
    async with hosts(dial_out_only()) as (client,):
        assert await publish(client, 1) == 0
        assert await client.directory.look_up(KEY, timeout_s=WAIT_S) == {}
    async with hosts(1, dial_out_only()) as (server, client):
        assert await publish(client, 2) == 1
        assert list(await server.directory.look_up(KEY, timeout_s=WAIT_S)) == [client.peer_id]


@OF_HIVEMIND
async def test_an_oversized_reply_is_refused_at_once() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: reported.append(c["message"]))

    async def flood(peer: PeerId, request: bytes) -> bytes:
        return bytes(int(request))

    async with hosts(2) as (server, client):
        await server.serve_calls("/test/flood", flood, request_max_bytes=10)
        for size in (UNARY_MAX_BYTES + 1, 5 << 20):
            with pytest.raises(CallRefused, match="larger than a message may be"):
                await client.call(server.peer_id, "/test/flood", b"%d" % size, timeout_s=WAIT_S)
    assert reported == ["the handler of /test/flood failed"] * 2


@OF_HIVEMIND
async def test_the_daemons_own_wall_answers_too() -> None:
    """Below our limit of 1 MiB lies hivemind's of 4 MiB, which its own DHT calls can reach."""

    async def flood(request: bytes, peer: PeerID) -> bytes:
        return bytes(5 << 20)

    async with hosts(2) as (server, client):
        assert server._daemon is not None and client._daemon is not None
        await server._daemon.calls.serve("/test/raw", flood)
        async with asyncio.timeout(2):
            with pytest.raises(P2PHandlerError, match="larger than a message may be"):
                await client._daemon.calls.call(
                    PeerID.from_base58(server.peer_id), "/test/raw", b""
                )


async def test_the_daemons_death_is_noticed_at_once_and_repaired() -> None:
    async with hosts(2) as (server, client):
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        async def never(peer: PeerId, request: bytes) -> bytes:
            asked.set()
            await asyncio.sleep(60)
            return b""

        async def hold(stream: Stream) -> None:
            await stream.receive(timeout_s=60)

        await server.serve_calls("/test/never", never, request_max_bytes=10)
        await server.serve_calls("/test/echo", echo, request_max_bytes=10)
        await server.serve_streams("/test/hold", hold)
        before = await client.addresses()
        stream = await client.open_stream(server.peer_id, "/test/hold", timeout_s=WAIT_S)
        reading = asyncio.ensure_future(stream.receive(timeout_s=60))
        calling = asyncio.ensure_future(
            client.call(server.peer_id, "/test/never", b"", timeout_s=60)
        )
        await asked.wait()

        assert client.daemon_pid is not None
        os.kill(client.daemon_pid, signal.SIGKILL)
        killed_at = loop.time()
        with pytest.raises(StreamBroken):
            await reading
        with pytest.raises(HostClosed):
            await calling
        assert loop.time() - killed_at < WAIT_S  # not the 60 s that they would have waited
        with pytest.raises(HostClosed):
            await client.call(server.peer_id, "/test/echo", b"", timeout_s=WAIT_S)

        await until(lambda: client.restarts == 1, timeout_s=2 * WAIT_S)
        assert await client.addresses() == before  # same key, same port
        await client.connect(server.peer_id, await server.addresses(), timeout_s=WAIT_S)
        await until(lambda: client.directory.neighbours == 1, timeout_s=2 * WAIT_S)
        assert await client.call(server.peer_id, "/test/echo", b"hi", timeout_s=WAIT_S) == b"hi"
        stream.abort()


async def test_protocols_are_served_again_after_a_restart() -> None:
    async with hosts(2) as (server, client):

        async def greet(stream: Stream) -> None:
            await stream.send(b"hello", timeout_s=WAIT_S)
            await stream.finish(timeout_s=WAIT_S)

        await server.serve_calls("/test/echo", echo, request_max_bytes=10)
        await server.serve_streams("/test/greet", greet)
        assert await publish(client, 2) == 1
        assert server.daemon_pid is not None
        os.kill(server.daemon_pid, signal.SIGKILL)
        await until(lambda: server.restarts == 1, timeout_s=2 * WAIT_S)

        await client.connect(server.peer_id, await server.addresses(), timeout_s=WAIT_S)
        assert await client.call(server.peer_id, "/test/echo", b"hi", timeout_s=WAIT_S) == b"hi"
        stream = await client.open_stream(server.peer_id, "/test/greet", timeout_s=WAIT_S)
        assert await stream.receive(timeout_s=WAIT_S) == b"hello"
        assert await stream.receive(timeout_s=WAIT_S) is None
        stream.abort()
        # The records that it kept for others outlive the daemon.
        found = await server.directory.look_up(KEY, timeout_s=WAIT_S)
        assert list(found) == [client.peer_id]


RELAY = replace(LOOPBACK, is_bootstrap=True)


@OF_HIVEMIND
async def test_a_static_relay_carries_messages_to_a_peer_nobody_can_dial() -> None:
    loop = asyncio.get_running_loop()
    outcomes: list[int | StreamBroken] = []

    async def swallow(stream: Stream) -> None:
        size = 0
        try:
            while (frame := await stream.receive(timeout_s=0.5)) is not None:
                size += len(frame)
        except StreamBroken as error:
            outcomes.append(error)
        else:
            outcomes.append(size)

    async with hosts(RELAY) as (relay,):
        relays = await relay.addresses()
        async with hosts(dial_out_only(relays=relays[:1]), first=8) as (hidden,):
            await hidden.serve_calls("/test/echo", echo, request_max_bytes=10)
            await hidden.serve_streams("/test/swallow", swallow)
            began = loop.time()
            while not (circuits := await hidden.addresses()):
                assert loop.time() - began < 2 * WAIT_S, "not connected to its relay"
                await asyncio.sleep(0.05)
            # A circuit's address holds the relay's Ed25519 id in its middle.
            assert str(circuits[0]) == f"{relays[0]}/p2p-circuit/p2p/{hidden.peer_id}"

            # Opened late: the hidden peer would find it by itself, and dial it directly.
            async with hosts(1, first=9) as (caller,):
                while True:  # it has a place at the relay within seconds, not minutes
                    try:
                        await caller.connect(hidden.peer_id, circuits, timeout_s=WAIT_S)
                        break
                    except PeerUnreachable:
                        assert loop.time() - began < 2 * WAIT_S, "no place at the relay"
                        await asyncio.sleep(0.1)
                (connection,) = (c for c in await caller.connections() if c.peer == hidden.peer_id)
                assert connection.relayed and addresses.is_relayed(connection.address)
                answer = await caller.call(hidden.peer_id, "/test/echo", b"hi", timeout_s=WAIT_S)
                assert answer == b"hi"

                # A circuit is cut after 128 KiB, or not: the daemon runs two relay
                # services and either may win. Whole on both sides, or on neither: cut early,
                # the hidden peer may never have heard of the stream at all.
                stream = await caller.open_stream(hidden.peer_id, "/test/swallow", timeout_s=WAIT_S)
                assert stream.relayed
                try:
                    for _ in range(64):
                        await stream.send(bytes(16_384), timeout_s=WAIT_S)
                    await stream.finish(timeout_s=WAIT_S)
                    arrived = True
                except StreamBroken:
                    arrived = False
                stream.abort()
                if arrived:
                    await until(lambda: len(outcomes) == 1, timeout_s=WAIT_S)
                assert (64 * 16_384 in outcomes) is arrived


def test_a_failed_dial_says_in_a_few_words_what_happened_at_the_address_that_was_asked_for(
    pair: Pair,
) -> None:
    async def scenario(host: HivemindHost, other: HivemindHost) -> None:
        nobody = identity(99).peer_id
        taken = addresses.without_peer((await other.addresses())[0])
        # The daemon remembers the addresses of a peer, and dials and lists them all.
        for place, reason in (
            (Multiaddr("/ip4/127.0.0.1/tcp/9"), "connection refused"),
            (taken, f"another peer answers there: {other.peer_id}"),
            (Multiaddr("/ip4/127.0.0.1/tcp/10"), "connection refused"),
            (Multiaddr("/dns4/no.such.host.invalid/tcp/10"), "host.invalid cannot be resolved ("),
        ):
            with pytest.raises(PeerUnreachable) as failure:
                await host.connect(nobody, [place], timeout_s=WAIT_S)
            said = failure.value.reason
            assert reason in said
            assert "failed to dial" not in said, said
            assert "\n" not in said
            assert ("refused" in said) == (reason == "connection refused"), said

    pair.run(scenario)


def test_the_daemon_dials_a_peer_that_is_away_once_and_again_when_it_listens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dials nobody for 5 + n² seconds after n dials in vain: two peers that were apart for a
    minute stayed so for another one."""
    dialled: list[PeerId] = []

    async def connect(
        daemon: Daemon, peer: PeerId, at: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        dialled.append(peer)
        await really(daemon, peer, at, timeout_s=timeout_s)

    really = Daemon.connect
    monkeypatch.setattr(Daemon, "connect", connect)

    async def scenario(host: HivemindHost, neighbour: HivemindHost) -> None:
        other = identity(97)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        at = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
        for _ in range(4):
            with pytest.raises(PeerUnreachable, match="connection refused"):
                await host.connect(other.peer_id, [at], timeout_s=WAIT_S)
        assert dialled == [other.peer_id]

        settings = replace(LOOPBACK, listen=(at,))
        async with await HivemindHost.open(other, settings):
            while other.peer_id not in {c.peer for c in await host.connections()}:
                with suppress(PeerUnreachable):  # the first dial counts for up to 6 s
                    await host.connect(other.peer_id, [at], timeout_s=WAIT_S)
                await asyncio.sleep(0.2)

    pair.run(scenario)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_only_what_speaks_libp2p_listens(says: bytes | None) -> None:
    async def scenario() -> None:
        left = asyncio.Event()

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if says is None:
                await reader.read()  # silent until the other end is closed
            else:
                writer.write(says)
            writer.close()
            left.set()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            at = Multiaddr(f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}")
            assert await why_silent([at], within_s=0.2) is not None
            await left.wait()

    run(scenario())


def test_a_peer_that_is_not_there_is_reported_in_time(pair: Pair) -> None:
    async def scenario(host: HivemindHost, _: HivemindHost) -> None:
        nobody = identity(98).peer_id
        with pytest.raises(PeerUnreachable):
            await host.call(nobody, "/test/echo", b"", timeout_s=2)
        with pytest.raises(PeerUnreachable):
            await host.open_stream(nobody, "/test/echo", timeout_s=2)
        with pytest.raises(PeerUnreachable):
            await host.connect(nobody, [Multiaddr("/ip4/127.0.0.1/tcp/9")], timeout_s=2)
        with pytest.raises(PeerUnreachable, match="no peer id"):
            await host.call(PeerId("not an id"), "/test/echo", b"", timeout_s=2)

    pair.run(scenario)

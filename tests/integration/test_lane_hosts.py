"""The direct lane between real hosts, with the daemon as fallback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import psutil
import pytest
from multiaddr import Multiaddr

from dht.errors import CallRefused, StreamBroken
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import PeerId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings, parse_lane
from dht.libp2p.lane.wire import LANE_PROTOCOL, PUNCH_PROTOCOL
from peer.rules.rented import container_of, public_ports
from peer.storage.address import is_free, listen_briefly
from tests.integration.loopback import ANYWHERE, LOOPBACK, WAIT_S, dial_out_only, hosts, run, until

LANE = LaneSettings(wait_s=WAIT_S)
WITH_LANE = replace(LOOPBACK, lane=LANE)


async def swallow(stream: Stream) -> None:
    target = memoryview(bytearray(FRAME_MAX_BYTES))
    while await stream.receive_into(target, timeout_s=WAIT_S) is not None:
        pass


async def bulk(host: HivemindHost, other: HivemindHost) -> int:
    """Open and use a stream; returns the number of streams over the lane so far."""
    stream = await host.open_stream(other.peer_id, "/bulk", timeout_s=WAIT_S, bulk=True)
    await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=WAIT_S)
    await stream.finish(timeout_s=WAIT_S)
    stream.abort()
    assert host.lane is not None
    return host.lane.counters["streams_opened"]


def test_a_peer_that_the_run_does_not_admit_gets_no_ticket() -> None:
    async def refusal(peer: PeerId) -> str | None:
        return f"{peer} is not admitted"

    async def scenario() -> None:
        async with hosts(WITH_LANE, WITH_LANE) as (anna, boris):
            await anna.serve_streams("/bulk", swallow)
            anna.lane_refusal = refusal
            for protocol in (LANE_PROTOCOL, PUNCH_PROTOCOL):
                with pytest.raises(CallRefused, match="is not admitted"):
                    await boris.call(anna.peer_id, protocol, b"", timeout_s=WAIT_S)
            assert await bulk(boris, anna) == 0, "the daemon's streams have a guard of their own"

    run(scenario())


def test_bulk_streams_use_the_lane_if_possible_and_the_daemon_otherwise() -> None:
    async def scenario() -> None:
        async with hosts(WITH_LANE, dial_out_with_lane(), LOOPBACK) as (anna, boris, clara):
            for host in (anna, clara):
                await host.serve_streams("/bulk", swallow)
            assert anna.lane is not None
            assert boris.lane is not None
            lane = boris.lane
            assert await bulk(boris, anna) == 1
            await until(lambda: len(lane._known(anna.peer_id).idle) == 1, timeout_s=WAIT_S)
            assert await bulk(boris, anna) == 2
            assert anna.lane.counters["accepted"] == 1, "the second took the same connection"

            small = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=WAIT_S)
            await small.finish(timeout_s=WAIT_S)
            small.abort()
            assert boris.lane.counters["streams_opened"] == 2, "what is small goes as ever"

            assert await bulk(anna, clara) == 0
            assert anna.lane.is_doubted(clara.peer_id)
            await until(lambda: not anna.served.open, timeout_s=WAIT_S)

    run(scenario())


class PublicPort:
    """A port outside that leads to one inside, as a provider of rented containers makes it."""

    def __init__(self) -> None:
        self.inner = listen_briefly(ANYWHERE)
        self.passed = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._lead, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.passed += 1
        inside, back = await asyncio.open_connection("127.0.0.1", self.inner)
        await asyncio.gather(_pass_on(reader, back), _pass_on(inside, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def test_a_rented_container_is_dialled_through_public_ports_that_are_not_its_own() -> None:
    """The one of the daemon, and that of bulk data."""

    async def scenario() -> None:
        doors = sorted((PublicPort(), PublicPort()), key=lambda door: door.inner)
        async with doors[0].open() as first, doors[1].open() as second:
            variables = {
                "RUNPOD_PUBLIC_IP": "127.0.0.1",
                f"RUNPOD_TCP_PORT_{doors[0].inner}": str(first),
                f"RUNPOD_TCP_PORT_{doors[1].inner}": str(second),
            }
            container = container_of(variables)
            assert container is not None
            ports = public_ports(
                container, listen=(str(ANYWHERE),), announce=(), lane="auto", is_free=is_free
            )
            assert ports is not None
            (listen,), (announce,) = map(Multiaddr, ports.listen), map(Multiaddr, ports.announce)
            lane = parse_lane(ports.lane)
            assert lane is not None
            rented = replace(
                LOOPBACK,
                listen=(listen,),
                announce=(announce,),
                lane=replace(lane, wait_s=WAIT_S),
            )
            async with hosts(rented, WITH_LANE) as (anna, boris):
                await anna.serve_streams("/bulk", swallow)
                assert await bulk(boris, anna) == 1
                assert all(door.passed for door in doors)

    run(scenario())


def dial_out_with_lane() -> HostSettings:
    return replace(dial_out_only(), lane=LANE)


@pytest.mark.slow
def test_a_host_that_closes_leaves_nothing_of_its_lane_behind() -> None:
    async def scenario() -> None:
        me = psutil.Process()
        before = me.num_fds()
        async with hosts(WITH_LANE, WITH_LANE) as (anna, boris):

            async def wait(stream: Stream) -> None:
                await stream.receive(timeout_s=WAIT_S)

            await anna.serve_streams("/bulk", wait)
            stream = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=WAIT_S, bulk=True)
            receiving = asyncio.ensure_future(stream.receive(timeout_s=WAIT_S))
            await asyncio.sleep(0)
            await anna.close()
            with pytest.raises(StreamBroken):
                await receiving
        await until(lambda: me.num_fds() <= before, timeout_s=WAIT_S)

    run(scenario())


@pytest.mark.slow
def test_a_peer_that_is_cut_off_loses_the_streams_of_its_lane() -> None:
    async def scenario() -> None:
        async with hosts(WITH_LANE, WITH_LANE) as (anna, boris):
            await anna.serve_streams("/bulk", swallow)
            cut = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=WAIT_S, bulk=True)
            assert anna.lane is not None
            assert anna.lane.counters["accepted"] == 1
            await boris.disconnect(anna.peer_id)
            with pytest.raises(StreamBroken):
                await cut.finish(timeout_s=WAIT_S)

    run(scenario())


@pytest.mark.slow
def test_streams_of_the_lane_outlive_the_daemon() -> None:
    async def scenario() -> None:
        async with hosts(WITH_LANE, WITH_LANE) as (anna, boris):
            await anna.serve_streams("/bulk", swallow)
            stream = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=WAIT_S, bulk=True)
            assert boris.daemon_pid is not None
            psutil.Process(boris.daemon_pid).kill()
            await until(lambda: boris.restarts == 1, timeout_s=WAIT_S)
            await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=WAIT_S)
            await stream.finish(timeout_s=WAIT_S)
            stream.abort()

    run(scenario())

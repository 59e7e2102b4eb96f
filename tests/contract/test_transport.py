"""Links, bulk streams, fetching and whole rounds: the same tests in memory and on real daemons."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from averaging.errors import BulkRefused
from averaging.guard.door import Defences
from averaging.live.averager import Averager
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.live.states.fetch_server import FetchServer
from averaging.live.states.fetcher import Fetcher
from averaging.live.streams.bulk import Bulk
from averaging.live.streams.threads import Threads
from averaging.rules.peer_view import PeerView
from dht.errors import StreamBroken
from tests.averaging.live.links import introduce, linked
from tests.averaging.live.quadratic import LAYOUT, POLICY, RUN, QuadraticLearner, start_of
from tests.averaging.live.served_states import EVERYBODY, Shelf, same, state_of
from tests.contract.worlds import World, essential

DATA = bytes(range(256)) * 10_000
"""2.5 MB: several pieces, more than any buffer on the way."""


async def _until(condition: object, *, seconds: float = 10.0) -> None:
    assert callable(condition)
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come true in time")


@essential
async def test_messages_go_both_ways_over_a_link_that_one_side_opened(world: World) -> None:
    hosts = await world.host("anna"), await world.host("boris")
    await introduce(*hosts)
    async with linked(*hosts) as (anna, boris):
        for number in range(100):
            anna.transport.send(boris.peer, bytes([number]))
        await _until(lambda: len(boris.heard) == 100)
        boris.transport.send(anna.peer, b"all here")
        await _until(lambda: anna.heard)
        assert boris.said() == [bytes([number]) for number in range(100)]
        assert anna.said() == [b"all here"]
        assert not anna.lost and not boris.lost


async def test_a_peer_that_is_gone_is_reported_lost(world: World) -> None:
    hosts = await world.host("anna"), await world.host("boris")
    await introduce(*hosts)
    async with linked(*hosts) as (anna, boris):
        anna.transport.send(boris.peer, b"hello")
        await _until(lambda: boris.heard)
        await hosts[1].close()
        await _until(lambda: anna.lost)
        assert {peer for peer, _ in anna.lost} == {boris.peer}


@essential
async def test_bulk_goes_out_in_pieces_and_the_answer_comes_back_on_the_same_stream(
    world: World,
) -> None:
    async def reverse(bulk: Bulk, header: bytes) -> None:
        received = bytearray(len(DATA))
        await bulk.receive_into(memoryview(received))
        bulk.grant()
        await bulk.send(received[::-1])
        await bulk.finish()

    hosts = await world.host("anna"), await world.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=reverse) as (anna, boris):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await bulk.send(DATA)
        await bulk.granted(timeout_s=10.0)
        answer = bytearray(len(DATA))
        await bulk.receive_into(memoryview(answer))
        await bulk.finished()
        assert answer == DATA[::-1]
        bulk.abort()


async def test_a_refusal_is_heard_by_a_sender_that_has_more_to_send(world: World) -> None:
    async def refuse(bulk: Bulk, header: bytes) -> None:
        await bulk.refuse("not in my rounds")

    hosts = await world.host("anna"), await world.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=refuse) as (anna, boris):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        hearing = asyncio.ensure_future(bulk.granted(timeout_s=10.0))
        await bulk.send(DATA)
        with pytest.raises(BulkRefused, match="not in my rounds"):
            await hearing
        bulk.abort()


async def test_a_sender_that_hangs_up_half_way_breaks_the_stream_and_nothing_else(
    world: World,
) -> None:
    broken: list[str] = []

    async def expect(bulk: Bulk, header: bytes) -> None:
        try:
            await bulk.receive_into(memoryview(bytearray(len(DATA))))
        except StreamBroken as error:
            broken.append(error.peer)
            raise

    hosts = await world.host("anna"), await world.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=expect) as (anna, boris):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await bulk.send(DATA[: len(DATA) // 2])
        bulk.abort()
        await _until(lambda: broken)
        assert broken == [anna.peer]
        anna.transport.send(boris.peer, b"still here")
        await _until(lambda: boris.heard)


async def test_a_state_is_fetched_from_two_sources_at_once(world: World) -> None:
    state = state_of(1, 2_000_000)
    me, *sources = [await world.host(name) for name in ("me", "anna", "boris")]
    await introduce(me, *sources)
    threads = Threads(1)
    servers = []
    for host in sources:
        server = FetchServer(host, run=RUN, library=Shelf(state), threads=threads)
        await server.start()
        servers.append(server)
    fetcher = Fetcher(me, RUN, threads)
    peers = [host.peer_id for host in sources]
    got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=30.0)
    assert same(got, state)
    assert sum(server.counters["pieces_served"] for server in servers) == 32
    threads.close()


async def test_learners_merge_fragment_after_fragment_and_hold_the_same_bits(world: World) -> None:
    names = ("anna", "boris", "clara")
    hosts = [await world.host(name) for name in names]
    await introduce(*hosts)
    loop = asyncio.get_running_loop()
    averagers = []
    running: list[asyncio.Task[None]] = []
    for name, host in zip(names, hosts, strict=True):
        states = start_of(LAYOUT)
        learner = QuadraticLearner(LAYOUT, seed=len(running), step_time_s=0.05, states=states)
        averager = Averager(
            host,
            learner,
            me=Participant(identity=world.identity(name), incarnation=1),
            terms=RunTerms(RUN, LAYOUT, replace(POLICY, margin_s=0.5)),
            around=Surroundings(
                guard=Defences(),
                view={
                    other.peer_id: PeerView(
                        first_seen=loop.time() - 1000.0, heard_at=loop.time(), step_time_s=0.05
                    )
                    for other in hosts
                    if other is not host
                },
            ),
            states=states,
            settings=AveragerSettings(progress_s=0.02),
        )
        averagers.append(averager)
        running.append(asyncio.create_task(averager.run()))
        running.append(asyncio.create_task(learner.train()))

    def versions() -> list[int]:
        return [s.version for a in averagers for s in a.states if s is not None]

    await _until(lambda: min(versions()) >= 2, seconds=25.0)
    for averager in averagers:
        await averager.drain(timeout_s=10.0)
    bits: dict[bytes, bytes] = {}
    for averager in averagers:
        for state in averager.states:
            assert state is not None
            assert bits.setdefault(state.lineage, state.digest()) == state.digest()
    for task in running:
        task.cancel()
    await asyncio.wait(running)

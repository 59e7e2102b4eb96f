"""Hosts in memory under weather that real hosts cannot be put into at will."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from hashlib import sha256
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.errors import DhtError, HostClosed, PeerUnreachable, StreamBroken
from dht.host import Stream
from dht.identity import PeerId
from dht.memory.directory import REPLICAS, _place
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.memory.network import CALM, Weather
from dht.memory.virtual_loop import run
from dht.records import PeerRecord, seal
from tests.dht.memory.weather import STORM

KEY = "run/peers/0"
STILL = Weather(latency_s=(0.05, 0.05))


async def echo(peer: PeerId, request: bytes) -> bytes:
    return request


async def return_frames(stream: Stream) -> None:
    while (frame := await stream.receive(timeout_s=60)) is not None:
        await stream.send(frame, timeout_s=60)
    await stream.finish(timeout_s=60)


async def connected(network: MemoryNetwork, *names: str) -> list[MemoryHost]:
    """Hosts that serve an echo, all connected to the first one."""
    hosts = [network.host(name) for name in names]
    for host in hosts:
        await host.serve_calls("/echo", echo, request_max_bytes=1000)
        await host.serve_streams("/frames", return_frames)
        if host is not hosts[0]:
            at = await hosts[0].addresses()
            await host.connect(hosts[0].peer_id, at, timeout_s=5)
    return hosts


def seconds(work: Callable[[], Coroutine[Any, Any, object]]) -> Coroutine[Any, Any, float]:
    async def measured() -> float:
        started = asyncio.get_running_loop().time()
        with pytest.raises((PeerUnreachable, StreamBroken)):
            await work()
        return asyncio.get_running_loop().time() - started

    return measured()


def record(name: str, sequence: int = 1, ttl_s: float = 60.0) -> bytes:
    content = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, name=name)
    return seal(content, identity_of(name), key=KEY, sequence=sequence, ttl_s=ttl_s)


async def test_a_partition_makes_calls_time_out_and_breaks_streams_after_a_while() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    stream = await anna.open_stream(boris.peer_id, "/frames", timeout_s=5)
    network.partition([[anna.peer_id]])

    call = seconds(lambda: anna.call(boris.peer_id, "/echo", b"", timeout_s=2))
    assert await call == pytest.approx(2)
    # The connection is given up 10 s after the first message that nobody answers.
    assert await seconds(lambda: stream.receive(timeout_s=60)) == pytest.approx(8)
    assert await boris.connections() == ()
    dial = seconds(lambda: anna.call(boris.peer_id, "/echo", b"", timeout_s=60))
    assert await dial == pytest.approx(5)

    network.heal()
    assert await anna.call(boris.peer_id, "/echo", b"again", timeout_s=5) == b"again"


async def test_a_short_partition_only_delays() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    stream = await anna.open_stream(boris.peer_id, "/frames", timeout_s=5)
    network.partition([[anna.peer_id], [boris.peer_id]])
    network.heap.call_in(8.0, network.heal)
    await stream.send(b"late", timeout_s=5)
    assert await stream.receive(timeout_s=9) == b"late"
    stream.abort()
    await asyncio.sleep(1)


async def test_an_idle_connection_across_a_partition_is_noticed_by_both_sides() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    network.partition([[anna.peer_id]])
    await asyncio.sleep(9.9)
    assert len(await anna.connections()) == len(await boris.connections()) == 1
    await asyncio.sleep(0.2)
    assert await anna.connections() == await boris.connections() == ()


async def test_a_paused_peer_answers_late() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    network.simulated.pause(boris.peer_id)
    network.heap.call_in(30.0, network.simulated.resume, boris.peer_id)
    started = asyncio.get_running_loop().time()
    assert await anna.call(boris.peer_id, "/echo", b"zzz", timeout_s=60) == b"zzz"
    assert asyncio.get_running_loop().time() - started == pytest.approx(30.05)


async def test_a_crashed_host_is_gone_without_goodbye_and_comes_back_as_a_stranger() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    network.crash(boris.peer_id)
    assert len(await anna.connections()) == 1  # nobody has told her
    with pytest.raises(HostClosed, match="crashed"):
        await boris.call(anna.peer_id, "/echo", b"", timeout_s=5)
    call = seconds(lambda: anna.call(boris.peer_id, "/echo", b"", timeout_s=60))
    assert await call == pytest.approx(10)
    dial = seconds(lambda: anna.call(boris.peer_id, "/echo", b"", timeout_s=60))
    assert await dial == pytest.approx(5)

    again = network.host("boris")
    await again.serve_calls("/echo", echo, request_max_bytes=10)
    assert await again.connections() == ()
    assert await anna.call(boris.peer_id, "/echo", b"hello", timeout_s=5) == b"hello"


async def test_a_host_restarted_at_once_resets_the_connections_of_its_former_self() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    network.crash(boris.peer_id)
    network.host("boris")
    call = seconds(lambda: anna.call(boris.peer_id, "/echo", b"", timeout_s=60))
    assert await call == pytest.approx(0.1, rel=1e-3)


async def test_a_closed_host_refuses_at_once() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    at = await boris.addresses()
    await boris.close()
    await asyncio.sleep(1)
    assert await anna.connections() == ()
    dial = seconds(lambda: anna.connect(boris.peer_id, at, timeout_s=60))
    assert await dial == pytest.approx(0.1, rel=1e-3)


async def test_a_dial_out_only_host_is_reached_over_its_own_connection_and_no_other() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = await connected(network, "anna", "boris")
    clara = network.host("clara")
    await clara.serve_calls("/echo", echo, request_max_bytes=10)
    network.simulated.dial_out_only(clara.peer_id)
    at = await clara.addresses()
    dial = seconds(lambda: boris.connect(clara.peer_id, at, timeout_s=60))
    assert await dial == pytest.approx(5)

    await clara.connect(anna.peer_id, await anna.addresses(), timeout_s=5)
    assert await anna.call(clara.peer_id, "/echo", b"hi", timeout_s=5) == b"hi"
    stream = await clara.open_stream(anna.peer_id, "/frames", timeout_s=5)
    await stream.send(b"bulk", timeout_s=5)
    assert await stream.receive(timeout_s=5) == b"bulk"
    with pytest.raises(PeerUnreachable):
        await boris.call(clara.peer_id, "/echo", b"hi", timeout_s=60)
    stream.abort()
    await asyncio.sleep(1)


async def test_a_moved_host_is_found_at_its_new_address_only() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = network.host("anna"), network.host("boris")
    old = await boris.addresses()
    network.move(boris.peer_id)
    assert await boris.addresses() != old
    with pytest.raises(PeerUnreachable, match="belongs to no peer"):
        await anna.connect(boris.peer_id, old, timeout_s=5)
    await anna.connect(boris.peer_id, [*old, *await boris.addresses()], timeout_s=5)


async def test_two_who_dial_each_other_at_once_have_one_connection() -> None:
    network = MemoryNetwork(STILL)
    anna, boris = network.host("anna"), network.host("boris")
    async with asyncio.TaskGroup() as tasks:
        for one, other in ((anna, boris), (boris, anna)):
            at = await other.addresses()
            tasks.create_task(one.connect(other.peer_id, at, timeout_s=5))
    assert len(network._wires) == 1


async def test_clocks_are_as_wrong_as_they_were_made() -> None:
    network = MemoryNetwork()
    right, wrong = network.host("anna"), network.host("boris", wall_offset_s=-90.0)
    await asyncio.sleep(5)
    assert right.wall_time() - wrong.wall_time() == 90.0


async def test_a_stream_is_as_fast_as_the_slower_line_and_held_up_by_its_window() -> None:
    network = MemoryNetwork(Weather(latency_s=(0.01, 0.01), bandwidth_bytes_s=100e6))
    anna, boris = await connected(network, "anna", "boris")
    network.simulated.set_link(boris.peer_id, down_bytes_s=10e6)
    received = 0

    async def swallow(stream: Stream) -> None:
        nonlocal received
        while (frame := await stream.receive(timeout_s=60)) is not None:
            received += len(frame)

    await boris.serve_streams("/swallow", swallow)
    stream = await anna.open_stream(boris.peer_id, "/swallow", timeout_s=5)
    started = asyncio.get_running_loop().time()
    for _ in range(50):
        await stream.send(bytes(1_000_000), timeout_s=60)
    await stream.finish(timeout_s=60)
    stream.abort()
    assert received == 50_000_000
    assert asyncio.get_running_loop().time() - started == pytest.approx(5.0, rel=0.05)


async def test_values_on_a_bulk_stream_weigh_as_much_as_those_of_a_large_model() -> None:
    """A frame of values may stand for more than the window holds, and take minutes."""
    network = MemoryNetwork(Weather(latency_s=(0.01, 0.01), bandwidth_bytes_s=1e6), bulk_factor=1e6)
    anna, boris = await connected(network, "anna", "boris")
    for bulk, seconds_long in ((True, 200.0), (False, 0.0)):
        stream = await anna.open_stream(boris.peer_id, "/frames", timeout_s=5, bulk=bulk)
        started = asyncio.get_running_loop().time()
        await stream.send(bytes(1000), timeout_s=20)
        await stream.send(memoryview(bytes(200)), timeout_s=20)
        await stream.finish(timeout_s=20)
        frames = [await stream.receive(timeout_s=20) for _ in range(3)]
        stream.abort()
        assert frames == [bytes(1000), bytes(200), None]
        took_s = asyncio.get_running_loop().time() - started
        assert took_s == pytest.approx(seconds_long, abs=0.2), "other bytes have their own size"
    for host in (anna, boris):
        await host.close()


# The directory.


async def test_records_survive_all_but_their_last_holder() -> None:
    network = MemoryNetwork()
    hosts = await connected(network, *(f"host-{number}" for number in range(20)))
    writer = hosts[0]
    sealed = record("host-0")
    stored = await writer.directory.publish(KEY, sealed, timeout_s=5)
    assert stored in (REPLICAS - 1, REPLICAS)  # it may be among the nearest itself
    holders = [host for host in hosts if host.directory._read(KEY)]
    readers = [host for host in hosts if host not in holders]

    for holder in holders[1:]:
        network.crash(holder.peer_id)
    # The dead are asked once more, in vain, before others are.
    await readers[0].directory.look_up(KEY, timeout_s=5)
    await asyncio.sleep(20)
    found = await readers[0].directory.look_up(KEY, timeout_s=5)
    assert found == {writer.peer_id: sealed}
    network.crash(holders[0].peer_id)
    assert await readers[0].directory.look_up(KEY, timeout_s=5) == {}


SQUATTERS = 8


def squatters(network: MemoryNetwork, first_of: int) -> list[MemoryHost]:
    """Hosts with keys made for the places nearest to the record: they say that they store it."""
    names = [f"evil-{number}" for number in range(first_of)]
    names.sort(key=lambda name: _place(identity_of(name).peer_id) ^ _place(KEY))
    evil = [network.host(name) for name in names[:SQUATTERS]]
    for host in evil:
        host.directory._store = lambda *arguments: True
        host.directory._read = lambda key: []
    return evil


async def squatted(network: MemoryNetwork) -> list[MemoryHost]:
    """Fifty honest hosts, and squatters, all connected to the first of them."""
    hosts = await connected(network, *(f"host-{number}" for number in range(50)))
    at = await hosts[0].addresses()
    for host in squatters(network, first_of=2000):
        await host.connect(hosts[0].peer_id, at, timeout_s=5)
    return hosts


async def found_by_others(hosts: list[MemoryHost]) -> int:
    """The number of hosts that find a record of the last one."""
    writer = hosts[-1]
    await writer.directory.publish(KEY, record("host-49"), timeout_s=5)
    readers = hosts[1:-1]
    found = [await host.directory.look_up(KEY, timeout_s=5) for host in readers]
    return sum(writer.peer_id in each for each in found)


@pytest.mark.parametrize("keeps_seeds", [False, True])
async def test_records_of_peers_with_a_seed_are_found_whoever_has_the_nearest_places(
    keeps_seeds: bool,
) -> None:
    hosts = await squatted(MemoryNetwork())
    if keeps_seeds:
        for host in hosts:
            host.directory.set_seeds([hosts[0].peer_id])
    assert await found_by_others(hosts) == (48 if keeps_seeds else 0)


@pytest.mark.parametrize("network_of_squatters", ["198.51.100", None])
async def test_squatters_of_one_network_do_not_hold_all_replicas(
    network_of_squatters: str | None,
) -> None:
    network = MemoryNetwork()
    hosts = await squatted(network)
    everybody = list(hosts[0].directory.neighbourhood.nodes)
    honest = {host.peer_id for host in hosts}
    for number, peer in enumerate(everybody):
        at = f"9.{number}.0"
        if peer not in honest and network_of_squatters is not None:
            at = network_of_squatters
        network.place(peer, Multiaddr(f"/ip4/{at}.{1 + number}/tcp/7700"))
    assert await found_by_others(hosts) == (0 if network_of_squatters is None else 48)


async def test_a_seed_that_is_gone_delays_no_look_up() -> None:
    network = MemoryNetwork()
    hosts = await connected(network, *(f"host-{number}" for number in range(20)))
    for host in hosts:
        host.directory.set_seeds([hosts[0].peer_id])
    network.crash(hosts[0].peer_id)
    await asyncio.sleep(40)
    await hosts[1].directory.look_up(KEY, timeout_s=5)
    began = asyncio.get_running_loop().time()
    await hosts[1].directory.look_up(KEY, timeout_s=5)
    assert asyncio.get_running_loop().time() - began < 1.0


async def test_a_partition_splits_the_directory_and_healing_alone_does_not_join_it() -> None:
    network = MemoryNetwork()
    hosts = await connected(network, *(f"host-{number}" for number in range(20)))
    left, right = hosts[:10], hosts[10:]
    network.partition([[host.peer_id for host in left]])
    assert await left[0].directory.publish(KEY, record("host-0"), timeout_s=5) > 0
    assert await left[1].directory.look_up(KEY, timeout_s=5) != {}
    assert await right[0].directory.look_up(KEY, timeout_s=5) == {}

    await asyncio.sleep(40)
    network.heal()
    newer = record("host-0", sequence=2)
    await left[0].directory.publish(KEY, newer, timeout_s=5)
    assert await right[0].directory.look_up(KEY, timeout_s=5) == {}
    await right[5].connect(left[5].peer_id, await left[5].addresses(), timeout_s=5)
    assert list(await right[0].directory.look_up(KEY, timeout_s=5)) == [left[0].peer_id]


async def test_losing_the_one_who_introduced_them_does_not_part_the_others() -> None:
    network = MemoryNetwork()
    seed, anna, boris = await connected(network, "seed", "anna", "boris")
    network.crash(seed.peer_id)
    await anna.directory.publish(KEY, record("anna"), timeout_s=5)
    assert list(await boris.directory.look_up(KEY, timeout_s=5)) == [anna.peer_id]


async def test_forged_records_are_counted_where_they_were_to_be_stored() -> None:
    network = MemoryNetwork()
    _, boris = await connected(network, "anna", "boris")
    forged = bytearray(record("anna"))
    forged[-1] ^= 1
    assert not boris.directory._store(bytes(forged))
    assert boris.keeper.rejected["forged"] == 1


async def test_a_record_forged_by_a_hostile_node_is_not_believed_by_readers() -> None:
    network = MemoryNetwork()
    anna, boris = await connected(network, "anna", "boris")
    forged = bytearray(record("anna"))
    forged[-1] ^= 1
    boris.directory._read = lambda key: [bytes(forged)]
    assert await anna.directory.look_up(KEY, timeout_s=5) == {}
    assert anna.keeper.rejected["forged"] == 1


# Determinism, storms and speed.


def stormy_day(seed: int, hosts_count: int = 12) -> tuple[str, dict[str, int]]:
    """Everybody calls and streams to everybody in a storm; returns a hash of all that happened."""
    trace = sha256()
    outcomes: dict[str, int] = {}

    def note(what: str, *details: object) -> None:
        now = asyncio.get_running_loop().time()
        outcomes[what] = outcomes.get(what, 0) + 1
        trace.update(f"{now!r} {what} {details}\n".encode())

    async def talk(network: MemoryNetwork, me: int, hosts: list[MemoryHost]) -> None:
        rng = network.simulated.rng
        host = hosts[me]
        for turn in range(12):
            await asyncio.sleep(rng.random() * 3)
            other = hosts[(me + 1 + rng.randrange(len(hosts) - 1)) % len(hosts)]
            try:
                at = await other.addresses() if other._ended is None else ()
                await host.connect(other.peer_id, at, timeout_s=3)
                reply = await host.call(other.peer_id, "/echo", bytes([turn]), timeout_s=3)
                note("call", me, reply)
                stream = await host.open_stream(other.peer_id, "/frames", timeout_s=3)
                sent = [rng.randbytes(rng.randrange(100_000)) for _ in range(5)]
                got = []
                for frame in sent:
                    await stream.send(frame, timeout_s=20)
                    got.append(await stream.receive(timeout_s=20))
                await stream.finish(timeout_s=20)
                assert await stream.receive(timeout_s=20) is None
                stream.abort()
                assert got == sent
                note("stream", me, sum(map(len, sent)))
            except DhtError as error:
                note(type(error).__name__, me, str(error))
            found = await host.directory.look_up(KEY, timeout_s=3) if not host._ended else {}
            note("look_up", me, sorted(found))

    async def main() -> None:
        network = MemoryNetwork(STORM)
        hosts = [network.host(f"host-{number}") for number in range(hosts_count)]
        for host in hosts:
            await host.serve_calls("/echo", echo, request_max_bytes=1000)
            await host.serve_streams("/frames", return_frames)
        for number, host in enumerate(hosts):
            sealed = record(f"host-{number}", ttl_s=600)
            await host.directory.publish(KEY, sealed, timeout_s=3)
        heap, peers = network.heap, [host.peer_id for host in hosts]
        network.simulated.dial_out_only(peers[0])
        heap.call_at(10, network.partition, [peers[:4]])
        heap.call_at(13, network.simulated.pause, peers[5])
        heap.call_at(18, network.heal)
        heap.call_at(20, network.simulated.resume, peers[5])
        heap.call_at(22, network.crash, peers[6])
        async with asyncio.TaskGroup() as tasks:
            for me in range(hosts_count):
                tasks.create_task(talk(network, me, hosts))
        for host in hosts:
            await host.close()
        await asyncio.sleep(120)
        assert not network._wires, "connections of closed hosts are remembered"

    run(main(), seed=seed)
    return trace.hexdigest(), outcomes


@pytest.mark.parametrize("seed", range(8))
def test_in_a_storm_everything_ends_and_streams_arrive_whole_or_break(seed: int) -> None:
    _, outcomes = stormy_day(seed)
    assert outcomes["call"] > 20, f"seed {seed}: {outcomes}"
    assert outcomes["stream"] > 10, f"seed {seed}: {outcomes}"
    assert outcomes["PeerUnreachable"] > 5, f"seed {seed}: {outcomes}"
    assert outcomes["look_up"] == 12 * 12


def test_the_same_seed_gives_the_same_day_to_the_last_bit() -> None:
    assert stormy_day(3) == stormy_day(3)
    assert stormy_day(3) != stormy_day(4)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_many_hosts_with_heartbeats_take_seconds(count: int) -> None:
    async def beat(host: MemoryHost, name: str, seed: MemoryHost, offset_s: float) -> int:
        await asyncio.sleep(offset_s)
        if host is not seed:
            await host.connect(seed.peer_id, await seed.addresses(), timeout_s=5)
        seen = 0
        for sequence in range(6):
            sealed = record(name, sequence=sequence, ttl_s=30)
            await host.directory.publish(KEY, sealed, timeout_s=5)
            seen = len(await host.directory.look_up(KEY, timeout_s=5))
            await asyncio.sleep(10)
        return seen

    async def main() -> list[int]:
        network = MemoryNetwork(CALM)
        names = [f"host-{number}" for number in range(count)]
        hosts = [network.host(name) for name in names]
        return await asyncio.gather(
            *(
                beat(host, name, hosts[0], number * 0.05)
                for number, (host, name) in enumerate(zip(hosts, names, strict=True))
            )
        )

    started = time.process_time()
    assert run(main()) == [count] * count
    assert time.process_time() - started < 30

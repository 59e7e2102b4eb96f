"""The directory on real hosts: what liars, clocks and floods can do to it, which is nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count, cycle
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity
from dht.libp2p.directory_wire import read_records, write_records
from dht.libp2p.hivemind_directory import KEYS_SLACK, RecordStorage, id_of
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.hivemind_imports import PeerID, ValueWithExpiration
from dht.record_keeper import KeeperLimits, RecordKeeper
from dht.records import PeerRecord, seal
from tests.integration.loopback import LOOPBACK, WAIT_S, Pair, hosts, identity, until

RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
KEY = "run/peers/0"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


RUNS = count()


@pytest.fixture
def key() -> str:
    """A key of the directory that no other test uses."""
    return f"run{next(RUNS)}/peers/0"


def sealed(number: int, *, sequence: int = 1, key: str = KEY, ttl_s: float = 30) -> bytes:
    return seal(RECORD, identity(number), key=key, sequence=sequence, ttl_s=ttl_s)


async def store_by_force(
    at: HivemindHost, by: HivemindHost, record: bytes, *, until: float = 0.0
) -> bool:
    """Ask a peer to store something as hivemind would, without our own checks."""
    answer = await by.directory._protocol.call_store(
        PeerID.from_base58(at.peer_id), [id_of(KEY)], [record], [until]
    )
    assert answer is not None, "it did not answer"
    return bool(answer[0])


async def test_a_record_is_renewed_without_a_search_until_a_place_is_gone_or_new() -> None:
    async with hosts(3) as (writer, boris, clara), hosts(1, first=4) as (late,):
        for host in (boris, clara):
            await writer.connect(host.peer_id, await host.addresses(), timeout_s=WAIT_S)
        protocol = writer.directory._protocol
        asked: list[Any] = []
        ask = protocol.call_find

        async def find(peer: Any, keys: Any) -> Any:
            asked.append(peer)
            return await ask(peer, keys)

        protocol.call_find = find

        async def renew(sequence: int) -> int:
            asked.clear()
            record = sealed(1, sequence=sequence)
            return await writer.directory.publish(KEY, record, timeout_s=WAIT_S)

        assert (await renew(1), len(asked)) == (2, 2)
        assert (await renew(2), len(asked)) == (2, 0)
        assert boris.directory.stored_bytes and clara.directory.stored_bytes
        await writer.connect(late.peer_id, await late.addresses(), timeout_s=WAIT_S)
        assert (await renew(3), len(asked)) == (3, 3), "there is one place more"
        await clara.close()
        assert (await renew(4), len(asked)) == (2, 0)
        await renew(5)
        assert asked, "it searches again after a place has failed"


def test_what_is_no_record_is_rejected_and_counted(pair: Pair, key: str) -> None:
    async def scenario(server: HivemindHost, liar: HivemindHost) -> None:
        stored_bytes = server.directory.stored_bytes
        good = sealed(2, key=key)
        flipped = good[:-1] + bytes([good[-1] ^ 1])
        before = server.keeper.rejected.copy()
        assert not await store_by_force(server, liar, flipped)
        assert not await store_by_force(server, liar, bytes(2000))
        assert server.keeper.rejected - before == {"forged": 1, "oversized": 1}
        assert server.directory.stored_bytes == stored_bytes
        assert await store_by_force(server, liar, good)

    pair.run(scenario)


def answers_with(liar: HivemindHost, monkeypatch: pytest.MonkeyPatch, value: bytes) -> None:
    """A node that runs other code than ours puts what it likes into its answers."""
    monkeypatch.setattr(
        liar.directory._storage, "get", lambda place: ValueWithExpiration(value, 0.0)
    )


def test_one_bad_record_in_an_answer_does_not_hide_the_good_ones(
    pair: Pair, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(liar: HivemindHost, reader: HivemindHost) -> None:
        good, elsewhere = sealed(7, key=key), sealed(6, key="run/peers/1")
        answers_with(liar, monkeypatch, write_records([b"rubbish", elsewhere, good]))
        found = await reader.directory.look_up(key, timeout_s=WAIT_S)
        assert found == {identity(7).peer_id: good}
        assert reader.keeper.rejected["malformed"] == reader.keeper.rejected["misplaced"] == 1

    pair.run(scenario)


@pytest.mark.parametrize("until", [0.0, 1e300])
def test_the_times_of_hiveminds_messages_do_not_matter(pair: Pair, key: str, until: float) -> None:
    """They are of another clock, or of none."""

    async def scenario(server: HivemindHost, client: HivemindHost) -> None:
        assert await store_by_force(server, client, sealed(2, key=key), until=until)
        found = await client.directory.look_up(key, timeout_s=WAIT_S)
        assert list(found) == [client.peer_id]

    pair.run(scenario)


async def test_the_storage_is_bounded_per_key() -> None:
    size = len(sealed(1))
    keeper = RecordKeeper(limits=KeeperLimits(key_max_bytes=8 * size, bytes_max=12 * size))
    storage = RecordStorage(keeper)
    place = id_of(KEY)
    for number in range(1, 40):
        storage.store(place, sealed(number), 0)
        storage.store(place, sealed(number, key="run/peers/1"), 0)
    found = storage.get(place)
    assert found is not None
    stored = read_records(found.value)
    assert len(stored) <= 8 and keeper.stored_bytes(now=0.0) == 12 * size
    assert {sealed(n) for n in (1, 2, 3)} <= set(stored), "the first keep their places"
    assert keeper.rejected["full"]
    assert storage.store(place, sealed(1, sequence=2), 0)  # in its own place
    assert list(storage.items()) == []  # hivemind would send it all to each new node


async def test_the_places_of_keys_that_are_forgotten_are_forgotten_as_well() -> None:
    keeper = RecordKeeper(limits=KeeperLimits(records_max=10))
    storage = RecordStorage(keeper)
    for number in range(1000):
        storage.store(None, sealed(1, key=f"run{number}/peers/"), 0)
    assert len(keeper.known_keys) <= 10 and len(storage._key_at) <= 2 * 10 + KEYS_SLACK
    for key in keeper.known_keys:
        assert storage.get(id_of(key)) is not None


def test_a_peer_that_becomes_dial_out_only_ceases_to_store_for_others(pair: Pair, key: str) -> None:
    async def scenario(seed: HivemindHost, peer: HivemindHost) -> None:
        await peer.set_reachable(False)
        assert peer.directory.neighbours == 1
        assert await peer.directory.publish(key, sealed(2, key=key), timeout_s=WAIT_S) == 1
        assert key not in peer.keeper.known_keys
        target = PeerID.from_base58(peer.peer_id)
        record = sealed(1, key=key)
        assert (
            await seed.directory._protocol.call_store(target, [id_of(key)], [record], [0.0]) is None
        )
        await peer.set_reachable(True)
        await until(lambda: seed.directory.neighbours == 1, timeout_s=WAIT_S)
        assert await store_by_force(peer, seed, record)

    pair.run(scenario)


async def test_a_look_up_ends_in_time_although_peers_are_silent() -> None:
    async with hosts(3) as (first, second, silent):
        await first.connect(second.peer_id, await second.addresses(), timeout_s=WAIT_S)
        assert await second.directory.publish(KEY, sealed(2), timeout_s=WAIT_S) >= 1
        assert silent.daemon_pid is not None
        os.kill(silent.daemon_pid, signal.SIGSTOP)
        try:
            began = asyncio.get_running_loop().time()
            # That a request is not answered is known to hivemind itself only after this.
            first.directory._protocol.wait_timeout = 2 * WAIT_S
            found = await first.directory.look_up(KEY, timeout_s=3)
            assert asyncio.get_running_loop().time() - began < WAIT_S
            assert list(found) == [second.peer_id]
        finally:
            os.kill(silent.daemon_pid, signal.SIGCONT)


async def test_a_reader_outlives_a_reply_that_is_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(3) as (liar, reader, honest):
        assert await honest.directory.publish(KEY, sealed(3), timeout_s=WAIT_S)
        answers_with(liar, monkeypatch, b"\x91" * 200_000)
        await reader.connect(honest.peer_id, await honest.addresses(), timeout_s=WAIT_S)
        found = await reader.directory.look_up(KEY, timeout_s=WAIT_S)
        assert list(found) == [honest.peer_id]
        assert reader.keeper.rejected["malformed"] >= 1


SQUATTERS = 8


def ground(count: int) -> list[Identity]:
    """Identities whose places are the nearest to the key among many that were tried."""
    tried = [identity(number) for number in range(10_000, 12_000)]
    key_id = id_of(KEY)
    return sorted(tried, key=lambda each: key_id.xor_distance(id_of(each.peer_id)))[:count]


def turn_hostile(host: HivemindHost, others: dict[Any, Any]) -> None:
    """Say that every record is stored, store none, and name only the other hostile peers."""
    storage: Any = host.directory._storage
    storage.store = lambda *arguments: True
    storage.get = lambda place: None
    table = host.directory._protocol.routing_table
    table.get_nearest_neighbors = lambda *arguments, **options: list(others.items())


def listening(network: int) -> HostSettings:
    """A host in one of the networks of the loopback interface."""
    at = Multiaddr(f"/ip4/127.0.{network}.1/tcp/0")
    return replace(LOOPBACK, listen=(at,))


@asynccontextmanager
async def squatted(*networks: int) -> AsyncIterator[list[HivemindHost]]:
    """A server and two honest peers, and hostile ones with the places nearest to the key.

    ``networks``: those of the hostile peers, in turn.
    """
    async with hosts(*(listening(n) for n in range(3))) as honest, AsyncExitStack() as stack:
        seed = await honest[0].addresses()
        evil = []
        for each, number in zip(ground(SQUATTERS), cycle(networks)):
            host = await HivemindHost.open(each, listening(number))
            evil.append(await stack.enter_async_context(host))
        others = {id_of(host.peer_id): PeerID.from_base58(host.peer_id) for host in evil}
        for host in evil:
            turn_hostile(host, others)
            await host.connect(honest[0].peer_id, seed, timeout_s=WAIT_S)
        await until(lambda: honest[0].directory.neighbours >= SQUATTERS + 2)
        yield honest


async def is_found(honest: list[HivemindHost]) -> bool:
    """Say whether one honest peer finds the record of another one."""
    _, writer, reader = honest
    await writer.directory.publish(KEY, sealed(2), timeout_s=WAIT_S)
    return writer.peer_id in await reader.directory.look_up(KEY, timeout_s=WAIT_S)


@pytest.mark.slow
async def test_a_record_is_found_although_eight_keys_were_made_for_the_places_near_it() -> None:
    async with squatted(*range(10, 10 + SQUATTERS)) as honest:
        assert not await is_found(honest)
        for host in honest[1:]:
            host.directory.set_seeds([honest[0].peer_id])
        await until(lambda: all(honest[0].peer_id in h.directory._connected for h in honest[1:]))
        assert await is_found(honest)


@pytest.mark.slow
async def test_eight_keys_of_one_network_do_not_hold_all_replicas_without_any_seed() -> None:
    async with squatted(9) as honest:
        assert await is_found(honest)

"""Fetching states and replays on the in-memory network, from sources that die and lie."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import Struct

from averaging.history.chain import Chain
from averaging.history.manifest import Manifest, describe, read_manifest
from averaging.history.standing import Standing
from averaging.history.state import PIECE_BYTES, FragmentState, Pieces
from averaging.live.states.fetch_server import (
    SHARE_STATES,
    AskManifest,
    AskPiece,
    AskReplay,
    FetchServer,
    Request,
    _Reader,
    fetch_protocol,
)
from averaging.live.states.fetcher import (
    HURRY_S,
    STRAGGLERS_S,
    Fetcher,
    FetchFailed,
    FetchProgress,
)
from averaging.live.streams.questions import STALL_MAX_S, ask, next_data
from averaging.live.streams.threads import Threads
from averaging.messages import BadMessage, Link
from dht.errors import HostClosed, StreamBroken
from dht.host import Host
from dht.identity import PeerId, RunId
from dht.memory.host import MemoryNetwork
from dht.memory.network import Weather
from dht.memory.stream import MemoryStream
from dht.memory.virtual_loop import run
from dht.wrapped_host import GuardedHost
from tests.averaging.live.links import introduce
from tests.averaging.live.served_states import (
    EVERYBODY,
    VALUES,
    Dripping,
    Everybody,
    Shelf,
    same,
    state_of,
)
from tests.dht.membership.signers import only

RUN = RunId("fetch")
PIECES = Pieces(VALUES, VALUES)


@asynccontextmanager
async def sources(
    network: MemoryNetwork,
    *states: FragmentState | None,
    state_bytes: float = math.inf,
) -> AsyncIterator[tuple[Fetcher, list[PeerId], list[Host], list[FetchServer], list[Shelf]]]:
    """A fetcher, and a source for each state."""
    threads = Threads(1)
    me = network.host("me")
    hosts = [network.host(f"source {index}") for index in range(len(states))]
    await introduce(me, *hosts)
    shelves = [Shelf(state) for state in states]
    servers = []
    for host, shelf in zip(hosts, shelves, strict=True):
        server = FetchServer(
            host,
            run=RUN,
            library=shelf,
            threads=threads,
            state_bytes=state_bytes,
        )
        await server.start()
        servers.append(server)
    fetcher = Fetcher(me, RUN, threads)
    try:
        yield fetcher, [host.peer_id for host in hosts], list(hosts), servers, shelves
    finally:
        for host in (me, *hosts):
            await host.close()
        threads.close()


async def test_a_state_comes_from_all_sources_at_once_and_is_the_same_to_the_last_bit() -> None:
    state = state_of(1, 12 * PIECE_BYTES // 4 + 5)
    async with sources(MemoryNetwork(), state, state, state) as (fetcher, peers, _, servers, _):
        seen: list[FetchProgress] = []
        fetcher.on_progress = seen.append
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=60.0)
        assert same(got, state)
        assert all(server.counters["pieces_served"] for server in servers)
        count = state.pieces.count
        assert sum(server.counters["pieces_served"] for server in servers) == count
        assert [p.verified_pieces for p in seen] == sorted(p.verified_pieces for p in seen)
        assert seen[-1].verified_pieces == seen[-1].pieces == count


async def test_a_reader_of_parameters_alone_fetches_no_momentum() -> None:
    state = state_of(1, 12 * PIECE_BYTES // 4 + 5)
    async with sources(MemoryNetwork(), state, state) as (fetcher, peers, _, servers, _):
        fetcher.parameters_alone = True
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=60.0)
        assert np.array_equal(got.theta, state.theta) and got.momentum.size == 0
        assert (got.lineage, got.merged) == (state.lineage, state.merged)
        served = sum(server.counters["pieces_served"] for server in servers)
        assert served == state.pieces.of_theta


async def test_of_a_run_without_momentum_a_state_is_fetched_in_half_as_many_bytes() -> None:
    network, whole = MemoryNetwork(), state_of(1, 12 * PIECE_BYTES // 4)
    state = replace(whole, momentum=np.zeros(0, np.float32))
    sent = []
    for held in (whole, state):
        async with sources(network, held, held) as (fetcher, peers, _, _, _):
            before = network.sent_bytes[fetch_protocol(RUN)]
            got = await fetcher.state(0, held.pieces, peers, trust=EVERYBODY, timeout_s=60.0)
            sent.append(network.sent_bytes[fetch_protocol(RUN)] - before)
            assert same(got, held)
    assert got.momentum.size == 0
    assert 0.499 < sent[1] / sent[0] < 0.501


@pytest.mark.parametrize("mu", [0.5, 0.0])
async def test_a_state_whose_momentum_is_not_that_of_the_run_is_not_fetched(mu: float) -> None:
    state = replace(state_of(1), momentum=np.zeros(0 if mu else VALUES, np.float32))
    wanted = Pieces(VALUES, VALUES if mu else 0)
    async with sources(MemoryNetwork(), state) as (fetcher, peers, _, servers, _):
        with pytest.raises(FetchFailed, match="bytes of piece digests; the run has"):
            await fetcher.state(0, wanted, peers, trust=EVERYBODY, timeout_s=60.0)
        assert not servers[0].counters["pieces_served"]


async def test_a_source_that_dies_is_left_and_the_others_go_on_where_it_stopped() -> None:
    network = MemoryNetwork()
    state = state_of(2, 40 * PIECE_BYTES // 4)
    async with sources(network, state, state) as (fetcher, peers, hosts, servers, _):
        for host in hosts:
            network.simulated.set_link(host.peer_id, up_bytes_s=2e6)

        async def kill() -> None:
            await asyncio.sleep(8.0)
            network.crash(peers[1])

        killing = asyncio.ensure_future(kill())
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)
        await killing
        assert same(got, state)
        assert servers[1].counters["pieces_served"] > 5
        assert reading_of(network, fetcher, state) < 1.1


class DrippingServer(FetchServer):
    """A server that answers everything, never so slowly that a single frame would be late."""

    drips: type[Struct] = Struct

    async def _answer(self, reader: Any, request: Request) -> None:
        if isinstance(request, self.drips):
            reader = replace(reader, stream=Dripping(reader.stream))
        await super()._answer(reader, request)


class Careful(Everybody):
    """A reader that wants the same bits from two that count."""

    def holders_min(self, manifest: Manifest) -> int:
        return 2

    def __init__(self, counted: list[PeerId], signers: list[PeerId]) -> None:
        self._counted = counted
        self._signers = signers

    def counts(self, peer: PeerId) -> bool:
        return peer in self._counted

    def signers(self, manifest: Manifest) -> list[PeerId]:
        return self._signers


async def test_bits_of_one_source_are_not_taken_and_signers_are_asked_for_theirs() -> None:
    state = state_of(1)

    async with sources(MemoryNetwork(), *[state] * 4) as (fetcher, peers, *_):
        for trust in (Careful(peers[:1], []), Careful(peers[:1], peers[2:])):
            with pytest.raises(FetchFailed, match="1 of 2 peers that must hold the same bits"):
                await fetcher.state(0, PIECES, peers[:2], trust=trust, timeout_s=60.0)
        trust = Careful([peers[0], peers[3]], peers[2:])
        got = await fetcher.state(0, PIECES, peers[:2], trust=trust, timeout_s=60.0)
        assert same(got, state)


@pytest.mark.parametrize("holds", ["the same", "another", "none"])
async def test_a_peer_that_is_reached_over_a_relay_confirms_the_bits_of_others_and_sends_none(
    monkeypatch: pytest.MonkeyPatch, holds: str
) -> None:
    """A home that only one public peer lets in would else never get a state that two must hold."""
    state = state_of(1)
    of_hidden = {"the same": state, "another": state_of(2), "none": None}[holds]

    async with sources(MemoryNetwork(), state, of_hidden) as (fetcher, peers, _, servers, _):
        hidden, me = peers[1], fetcher.host.peer_id

        def is_relayed(stream: MemoryStream) -> bool:
            there = stream.other.remote
            return {stream.remote, there} == {hidden, me}

        monkeypatch.setattr(MemoryStream, "relayed", property(is_relayed))
        trust = Careful(peers, [])
        if holds == "the same":
            got = await fetcher.state(0, PIECES, peers, trust=trust, timeout_s=60.0)
            assert same(got, state)
        else:
            expected = "1 of 2 peers that must hold" if holds == "another" else "no state"
            with pytest.raises(FetchFailed, match=expected):
                await fetcher.state(0, PIECES, peers, trust=trust, timeout_s=60.0)
        assert servers[1].counters["pieces_served"] == 0
        with pytest.raises(FetchFailed, match="relays carry no bulk" if of_hidden else "no state"):
            await fetcher.state(0, PIECES, [hidden], trust=EVERYBODY, timeout_s=60.0)


async def test_a_peer_that_is_reached_over_a_relay_is_sent_no_pieces_and_no_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = state_of(1)
    async with sources(MemoryNetwork(), state) as (fetcher, peers, *_):
        monkeypatch.setattr(MemoryStream, "relayed", property(lambda stream: True))
        for request in (AskPiece(0), AskReplay(0, 0, state.lineage)):
            stream = await fetcher.host.open_stream(peers[0], fetch_protocol(RUN), timeout_s=10.0)
            await stream.send(msgspec.msgpack.encode(request), timeout_s=10.0)
            answer = await stream.receive(timeout_s=10.0)
            assert answer is not None and b"relays carry no bulk" in answer
            stream.abort()


@pytest.mark.parametrize("drips", [AskManifest, AskPiece])
async def test_what_a_source_answers_drop_by_drop_comes_from_another_that_has_nothing_to_do(
    drips: type[Struct],
) -> None:
    network = MemoryNetwork()
    state = state_of(2, 40 * PIECE_BYTES // 4)
    async with sources(network, state, state, state) as (fetcher, peers, _, servers, _):
        dripping: Any = servers[0]
        dripping.__class__, dripping.drips = DrippingServer, drips
        began = asyncio.get_running_loop().time()
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)
        took_s = asyncio.get_running_loop().time() - began
        assert same(got, state)
        # Four pieces in two requests were asked of it: 72 s, and as many for a manifest.
        assert took_s < STRAGGLERS_S + 2 * HURRY_S + 5.0
        assert reading_of(network, fetcher, state) < 1.1


async def test_a_source_may_be_slow_as_long_as_nobody_else_is_waiting_for_it() -> None:
    network = MemoryNetwork()
    state = state_of(2, 40 * PIECE_BYTES // 4)
    async with sources(network, state) as (fetcher, peers, hosts, _, _):
        network.simulated.set_link(hosts[0].peer_id, up_bytes_s=300e3)
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)
        assert same(got, state)
        assert not fetcher.counters["sources_left"]


async def test_a_large_state_comes_whole_though_most_of_its_sources_die_on_the_way() -> None:
    """The one that is left goes on where each of them stopped."""
    network = MemoryNetwork()
    state = state_of(2, 100 * PIECE_BYTES // 4)
    async with sources(network, *[state] * 4) as made:
        fetcher, peers, hosts, servers, _ = made
        lines(network, hosts, 40.0, 40.0, 40.0, 40.0)
        for number, peer in enumerate(peers[1:]):
            asyncio.get_running_loop().call_later(3.0 + 3.0 * number, network.crash, peer)
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)
        assert same(got, state)
        served = [server.counters["pieces_served"] for server in servers]
        assert min(served) > 15, served
        assert reading_of(network, fetcher, state) < 1.1


async def test_verified_pieces_are_kept_when_all_sources_die_and_another_attempt_begins() -> None:
    network = MemoryNetwork()
    state = state_of(3, 40 * PIECE_BYTES // 4)
    async with sources(network, state, state) as (fetcher, peers, hosts, servers, _):
        network.simulated.set_link(hosts[0].peer_id, up_bytes_s=2e6)
        loop = asyncio.get_running_loop()
        loop.call_later(8.0, network.crash, peers[0])
        with pytest.raises(FetchFailed) as failed:
            await fetcher.state(0, state.pieces, peers[:1], trust=EVERYBODY, timeout_s=600.0)
        assert peers[0] in failed.value.reasons
        before = servers[0].counters["pieces_served"]
        assert before > 2
        got = await fetcher.state(0, state.pieces, peers[1:], trust=EVERYBODY, timeout_s=600.0)
        assert same(got, state)
        assert servers[1].counters["pieces_served"] < state.pieces.count


async def test_two_that_want_one_state_at_once_both_get_it() -> None:
    """The second one looked for pieces that only the first had asked for, and failed on that."""
    state = state_of(1, 3 * PIECE_BYTES // 4)
    async with sources(MemoryNetwork(), state, state) as (fetcher, peers, *_):
        wanted = [
            fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=60.0) for _ in range(2)
        ]
        assert all(same(got, state) for got in await asyncio.gather(*wanted))


async def test_the_majority_is_believed_and_a_source_with_other_bits_is_named() -> None:
    state = state_of(4)
    theta = state.theta.copy()
    theta[7] += 1
    odd = replace(state, theta=theta)
    async with sources(MemoryNetwork(), odd, state, state) as (fetcher, peers, _, servers, _):
        blamed: list[tuple[PeerId, int, str]] = []
        fetcher.on_wrong_bits = lambda *told: blamed.append(told)
        got = await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)
        assert same(got, state)
        assert servers[0].counters["pieces_served"] == 0
        assert fetcher.counters["digests_disagree"] == 1
        assert [peer for peer, _, _ in blamed] == peers[:1]


async def test_sources_with_one_state_and_other_older_links_agree() -> None:
    """Peers come to one state from several groups, each with the links of its own way."""
    state = state_of(4, 12 * PIECE_BYTES // 4)
    ways = [
        replace(state, version=2, chain=Chain([Link(1, bytes([way]) * 32, 5), tip]))
        for tip in [Link(2, state.lineage, 9)]
        for way in (1, 2, 2)
    ]
    async with sources(MemoryNetwork(), *ways) as (fetcher, peers, _, servers, _):
        blamed: list[PeerId] = []
        fetcher.on_wrong_bits = lambda peer, fragment, reason: blamed.append(peer)
        got = await fetcher.state(0, state.pieces, peers, trust=AllOfThem(), timeout_s=60.0)
        assert same(got, ways[1])
        assert all(server.counters["pieces_served"] for server in servers)
        assert fetcher.counters["digests_disagree"] == 0 and not blamed


class AllOfThem(Everybody):
    """A reader that takes what three hold."""

    def holders_min(self, manifest: Manifest) -> int:
        return 3


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_sources_that_contradict_each_other_neither_is_blamed(first: int) -> None:
    """Each of the two may be the one that is right."""
    state = state_of(4)
    odd = replace(state, theta=state.theta + np.float32(1 + first))
    pair = (odd, state) if first else (state, odd)
    async with sources(MemoryNetwork(), *pair) as (fetcher, peers, _, _, _):
        blamed: list[PeerId] = []
        fetcher.on_wrong_bits = lambda peer, fragment, reason: blamed.append(peer)
        await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)
        assert fetcher.counters["digests_disagree"] == 1
        assert not blamed


async def test_a_piece_with_other_bits_than_its_manifest_ends_that_source_only() -> None:
    state = state_of(5)
    liar = replace(state, theta=state.theta.copy())
    async with sources(MemoryNetwork(), liar, state) as (fetcher, peers, _, _, _):
        loop = asyncio.get_running_loop()
        # It told the manifest of good numbers, and changes them before they travel.
        loop.call_later(0.15, lambda: liar.theta.fill(0))
        got = await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)
        assert same(got, state)
        assert fetcher.counters["pieces_refused"] == 1


def is_kept(state: FragmentState) -> bool:
    """True if a server keeps this state for somebody who reads it."""
    return any(isinstance(each, _Reader) for each in gc.get_referrers(state))


async def test_a_state_that_is_being_read_stays_readable_when_a_newer_one_replaces_it() -> None:
    network = MemoryNetwork()
    state = state_of(6, 40 * PIECE_BYTES // 4)
    async with sources(network, state) as (fetcher, peers, hosts, _, shelves):
        network.simulated.set_link(hosts[0].peer_id, up_bytes_s=2e6)
        newer = replace(state_of(7, state.theta.size), version=1)

        def move_on() -> None:
            assert is_kept(state) and not is_kept(newer)
            shelves[0].held = newer

        asyncio.get_running_loop().call_later(8.0, move_on)
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)
        assert same(got, state)
        assert not is_kept(state)


MBIT = 125e3


def lines(network: MemoryNetwork, hosts: list[Host], *mbit: float) -> None:
    for host, up in zip(hosts, mbit, strict=True):
        network.simulated.set_link(host.peer_id, up_bytes_s=up * MBIT)


def reading_of(network: MemoryNetwork, fetcher: Fetcher, state: FragmentState) -> float:
    """Bytes that the reader received, over those of the state."""
    _, received = network.simulated.traffic(fetcher.host.peer_id)
    return received / (state.theta.nbytes + state.momentum.nbytes)


@pytest.mark.parametrize(("down_mbit", "home_share"), [(200.0, 0.15), (50.0, 0.25)])
async def test_a_download_is_spread_over_the_sources_by_their_lines(
    down_mbit: float, home_share: float
) -> None:
    """A newcomer took 89 of 118 MB from one home on 20 Mbit/s.

    On a line that is slower than all sources together, no source shows how fast it could be.
    """
    network = MemoryNetwork(Weather(latency_s=(0.02, 0.07)))
    state = state_of(11, 40 * PIECE_BYTES // 4)
    async with sources(network, *[state] * 5) as made:
        fetcher, peers, hosts, servers, _ = made
        lines(network, hosts, 20.0, 50.0, 100.0, 20.0, 20.0)
        network.simulated.set_link(fetcher.host.peer_id, down_bytes_s=down_mbit * MBIT)
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)

        assert same(got, state)
        served = [server.counters["pieces_served"] for server in servers]
        assert sum(served) <= 1.15 * state.pieces.count, served
        assert reading_of(network, fetcher, state) < 1.15
        homes = served[0], served[3], served[4]
        assert max(homes) <= home_share * sum(served), served


async def test_a_reader_on_a_slow_line_gives_up_no_source_and_reads_nothing_twice() -> None:
    """A reader at 1 Mbit/s found that each source "took over 18.8 s for 16 pieces"."""
    network = MemoryNetwork(Weather(latency_s=(0.02, 0.07)))
    state = state_of(12, 10 * PIECE_BYTES // 4)
    async with sources(network, *[state] * 5) as made:
        fetcher, peers, hosts, _, _ = made
        lines(network, hosts, 20.0, 50.0, 100.0, 20.0, 20.0)
        network.simulated.set_link(fetcher.host.peer_id, down_bytes_s=1 * MBIT)
        got = await fetcher.state(0, state.pieces, peers, trust=EVERYBODY, timeout_s=600.0)

        assert same(got, state)
        assert fetcher.counters["sources_left"] == 0
        assert reading_of(network, fetcher, state) < 1.15


async def test_a_state_is_kept_for_a_reader_that_waits_for_the_manifests_of_others() -> None:
    """ "That state is no longer kept here": rounds went on between manifest and pieces."""
    network = MemoryNetwork()
    state = state_of(13)
    async with sources(network, state, state) as (fetcher, peers, hosts, _, shelves):
        network.simulated.set_link(hosts[1].peer_id, latency_extra_s=2.0)

        async def rounds_go_on() -> None:
            while True:
                await asyncio.sleep(1.0)
                shelves[0].held = replace(state_of(14), version=1)

        going_on = asyncio.ensure_future(rounds_go_on())
        got = await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)
        going_on.cancel()

        assert same(got, state)
        assert fetcher.counters["sources_left"] == 0


async def test_a_slow_reader_keeps_its_state_when_others_ask_for_newer_ones() -> None:
    network = MemoryNetwork()
    state = state_of(15)
    async with sources(network, state) as (fetcher, peers, hosts, _, shelves):
        network.simulated.set_link(fetcher.host.peer_id, down_bytes_s=1 * MBIT)
        other = network.host("another reader")
        await introduce(other, *hosts)
        others = Fetcher(other, RUN, fetcher.threads)

        async def others_read() -> None:
            for version in range(1, 8):
                await asyncio.sleep(4.0)
                shelves[0].held = state_of(15 + version)
                await others.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)

        reading = asyncio.ensure_future(others_read())
        got = await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=600.0)
        await reading
        assert same(got, state)
        await other.close()


async def test_a_stream_keeps_the_one_state_that_it_asked_for_last() -> None:
    async with sources(MemoryNetwork(), None) as (fetcher, peers, _, _, shelves):
        states = [state_of(31 + number) for number in range(3)]
        stream = await fetcher.host.open_stream(peers[0], fetch_protocol(RUN), timeout_s=5.0)
        for state in states:
            shelves[0].held = state
            await ask(stream, AskManifest(0))
            while len(await next_data(stream)):
                pass
        for _ in range(3):  # a stream on which nothing is asked for longer is ended
            await asyncio.sleep(0.4 * STALL_MAX_S)
            await ask(stream, AskPiece(0))
            await next_data(stream)
        assert [is_kept(state) for state in states] == [False, False, True]
        stream.abort()
        await asyncio.sleep(1.0)
        assert not is_kept(states[-1])


async def test_nobody_to_ask_and_nobody_who_has_it_are_told_apart() -> None:
    async with sources(MemoryNetwork(), None) as (fetcher, peers, _, _, _):
        with pytest.raises(FetchFailed, match="nobody to ask"):
            await fetcher.state(0, PIECES, [], trust=EVERYBODY, timeout_s=60.0)
        with pytest.raises(FetchFailed, match="no state of fragment 0"):
            await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0)


@pytest.mark.parametrize("seed", range(3))
async def test_requests_of_any_bytes_are_refused_and_the_server_goes_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = state_of(8)
    async with sources(MemoryNetwork(), state) as (fetcher, peers, *_):
        for _ in range(50):
            size = int(rng.integers(0, 300))
            stream = await fetcher.host.open_stream(peers[0], fetch_protocol(RUN), timeout_s=5.0)
            await stream.send(rng.bytes(size), timeout_s=5.0)
            answer = await stream.receive(timeout_s=5.0)
            assert answer is not None and answer[:1] == b"\x02"
            stream.abort()
        assert same(await fetcher.state(0, PIECES, peers, trust=EVERYBODY, timeout_s=60.0), state)


def test_a_manifest_is_read_strictly() -> None:
    state = state_of(9, 1000)
    good = describe(state)
    pieces = Pieces(1000, 1000)
    manifest = read_manifest(good, fragment=0, pieces=pieces)
    assert manifest.standing() == Standing.of(state)
    for fragment, wrong in ((1, pieces), (0, Pieces(10_000_000, 10_000_000)), (0, Pieces(1000, 0))):
        with pytest.raises(BadMessage):
            read_manifest(good, fragment=fragment, pieces=wrong)
    # A chain that goes on beyond its version cannot be extended: the next round ended the averager.
    root, other = manifest.links[0], bytes(32)
    for before in (Link(root.version + 7, other, 0), Link(root.version, other, 0), root):
        links = [before, root]
        astray = msgspec.msgpack.encode(msgspec.structs.replace(manifest, links=links))
        with pytest.raises(BadMessage, match="not in order"):
            read_manifest(astray, fragment=0, pieces=pieces)
    rng = np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        cut = bytes(data[: int(rng.integers(len(data) + 1))])
        try:
            read = read_manifest(cut, fragment=0, pieces=pieces)
        except BadMessage:
            continue
        assert len(read.digests) == 2 * 32


async def test_four_identities_do_not_hold_all_places_of_a_source() -> None:
    """Each holds its two streams with a request now and then."""

    async def hold(host: Host, source: PeerId) -> None:
        while True:
            try:
                stream = await host.open_stream(source, fetch_protocol(RUN), timeout_s=5.0)
                while True:
                    await stream.send(msgspec.msgpack.encode(AskManifest(0)), timeout_s=5.0)
                    while len(await stream.receive(timeout_s=5.0) or b"") > 1:
                        pass
                    await asyncio.sleep(5.0)
            except (StreamBroken, HostClosed):
                await asyncio.sleep(5.0)

    network = MemoryNetwork()
    state = state_of(6)
    async with sources(network, state) as (fetcher, ids, (source,), (server,), _):
        holders = [network.host(f"holder {number}") for number in range(4)]
        await introduce(source, *holders)
        async with asyncio.TaskGroup() as group:
            holding = [group.create_task(hold(h, ids[0])) for h in holders for _ in range(2)]
            await asyncio.sleep(1.0)
            got = await fetcher.state(0, PIECES, ids, trust=EVERYBODY, timeout_s=5.0)
            for task in holding:
                task.cancel()
        assert same(got, state)
        assert server.counters["fetches_refused"] == 0
        for host in holders:
            await host.close()


SLOW_LINE_BYTES_S = 2e6


async def fetched_after(fetcher: Fetcher, source: PeerId) -> float:
    """Seconds in which a state is here, with the pauses of a peer that begins from nothing."""
    loop = asyncio.get_running_loop()
    began, pause_s = loop.time(), 1.0
    while True:
        try:
            await fetcher.state(0, PIECES, [source], trust=EVERYBODY, timeout_s=300.0)
            return loop.time() - began
        except FetchFailed:
            await asyncio.sleep(pause_s)
            pause_s = min(30.0, 2 * pause_s)


async def fetch_for_ever(host: Host, source: PeerId, threads: Threads) -> None:
    fetcher = Fetcher(host, RUN, threads)
    while True:
        await fetched_after(fetcher, source)


async def newcomer_beside(greedy: int, *, since_s: float) -> float:
    """Seconds in which a newcomer has a state from a source that others use without end."""
    network = MemoryNetwork()
    async with sources(network, state_of(6), state_bytes=8 * VALUES) as (fetcher, ids, hosts, *_):
        network.simulated.set_link(ids[0], up_bytes_s=SLOW_LINE_BYTES_S)
        others = [network.host(f"greedy {number}") for number in range(greedy)]
        await introduce(hosts[0], *others)
        async with asyncio.TaskGroup() as group:
            using = [
                group.create_task(fetch_for_ever(host, ids[0], fetcher.threads))
                for host in others
                for _ in range(2)
            ]
            await asyncio.sleep(since_s)
            took_s = await fetched_after(fetcher, ids[0])
            for task in using:
                task.cancel()
        for host in others:
            await host.close()
    return took_s


@pytest.mark.parametrize(
    ("greedy", "since_s"), [(4, 60.0), pytest.param(40, 300.0, marks=pytest.mark.slow)]
)
def test_greedy_identities_hardly_delay_a_newcomer_once_they_had_their_share(
    greedy: int, since_s: float
) -> None:
    """Eight places, all of them taken by peers that download quickly, again and again."""
    alone_s = run(newcomer_beside(0, since_s=0.0))
    assert run(newcomer_beside(greedy, since_s=since_s)) < 2.5 * alone_s


def test_a_newcomer_gets_its_turn_beside_forty_identities_that_are_new_as_well() -> None:
    """The forty come at once, and each has its share first."""
    shares_s = 41 * SHARE_STATES * 8 * VALUES / SLOW_LINE_BYTES_S
    assert run(newcomer_beside(40, since_s=0.0)) < 1.2 * shares_s


async def test_a_peer_that_is_not_admitted_is_refused_whatever_it_asks() -> None:
    network = MemoryNetwork()
    threads = Threads(1)
    server_host, listed, stranger = (network.host(name) for name in ("anna", "boris", "mal"))
    await introduce(server_host, listed, stranger)
    state = state_of(5)
    shelf = Shelf(state)
    guarded = GuardedHost(server_host, only(listed.peer_id))
    server = FetchServer(guarded, run=RUN, library=shelf, threads=threads)
    await server.start()
    sources = [server_host.peer_id]
    with pytest.raises(FetchFailed, match="admits only the peers it lists"):
        await Fetcher(stranger, RUN, threads).state(
            0, state.pieces, sources, trust=EVERYBODY, timeout_s=30.0
        )
    asked: list[Request] = [
        AskManifest(0),
        AskPiece(0),
        AskReplay(0, 0, state.lineage),
    ]
    for request in asked:
        stream = await stranger.open_stream(server_host.peer_id, fetch_protocol(RUN), timeout_s=5.0)
        await stream.send(msgspec.msgpack.encode(request), timeout_s=5.0)
        answer = await stream.receive(timeout_s=5.0)
        assert answer is not None and b"admits only the peers it lists" in answer
        assert await stream.receive(timeout_s=5.0) is None
    assert guarded.refused == 4
    assert not server.counters
    got = await Fetcher(listed, RUN, threads).state(
        0, state.pieces, sources, trust=EVERYBODY, timeout_s=30.0
    )
    assert same(got, state)
    for host in (server_host, listed, stranger):
        await host.close()
    threads.close()

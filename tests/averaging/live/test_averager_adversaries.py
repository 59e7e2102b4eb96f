"""One peer sends anything: the others finish their rounds, and say who did what."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from averaging import messages as said
from averaging.history.claims import Subject, claim, encode_statement
from averaging.history.replay import ReplayEntry
from averaging.live.slices.exchange import Exchange
from averaging.live.slices.parts import Parts
from averaging.live.slices.reducing import Reducing
from averaging.live.slices.uploading import Uploading
from averaging.live.states.fetcher import Fetcher, FetchFailed
from averaging.live.streams.buffers import GrowingBytes
from averaging.live.streams.bulk import Bulk
from averaging.live.streams.links import Transport, bulk_protocol, control_protocol
from averaging.live.streams.threads import Threads
from averaging.numbers.chunks import Chunk, digests_of, root_of
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.contributing import Contribution
from averaging.round.traffic import Route, Traffic
from dht.errors import StreamBroken
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from dht.wrapped_host import GuardedHost
from tests.averaging.live.quadratic import LAYOUT, POLICY, RUN, Peer, Swarm, start_of, swarm
from tests.averaging.live.served_states import EVERYBODY
from tests.dht.membership.signers import only

ANNA, MALLORY = identity_of("anna").peer_id, identity_of("mallory").peer_id


async def honest(made: Swarm) -> list[Peer]:
    return [await made.add(name) for name in ("anna", "boris", "clara")]


def refusals(peers: list[Peer], kind: str) -> list[Any]:
    return [
        fields
        for peer in peers
        for fields in peer.told("refused")
        if fields["kind"] == kind and fields["peer"] == MALLORY
    ]


def progress(peers: list[Peer]) -> int:
    return min(version or 0 for peer in peers for version in peer.versions())


def tamper(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Uploading, Bulk, int, GrowingBytes], Any]
) -> None:
    """Mallory sends something else than what it has encoded."""
    honest_part = Uploading.send_part

    async def part(self: Uploading, bulk: Bulk, index: int) -> None:
        if self.parts.me != MALLORY or self.parts.own is None:
            await honest_part(self, bulk, index)
            return
        growing = self.parts.own[index]
        while growing.filled < len(growing.data):
            await growing.beyond(growing.filled)
        await spoil(self, bulk, index, growing)

    monkeypatch.setattr(Uploading, "send_part", part)


async def _send_signed(uploading: Uploading, bulk: Bulk, index: int, data: bytearray) -> None:
    """Send a slice with a claim about it, as a liar does that answers for its bytes."""
    evidence, pieces = uploading.parts.evidence, uploading.parts.cutting.pieces(index)
    evidence.own.pop(index, None)
    evidence.own_leaves[index] = digests_of(memoryview(data), (place for _, place in pieces))
    await bulk.send(data)
    claim = evidence.claim_own(index, uploading.parts.traffic.inside or ())
    await bulk.send_frame(encode_statement(claim.statement))


async def _truncated(uploading: Uploading, bulk: Bulk, index: int, growing: GrowingBytes) -> None:
    await bulk.send(growing.data[: len(growing.data) // 2])
    bulk.abort()


async def _too_long(uploading: Uploading, bulk: Bulk, index: int, growing: GrowingBytes) -> None:
    await bulk.send(bytes(growing.data) + b"and more")


async def _not_finite(uploading: Uploading, bulk: Bulk, index: int, growing: GrowingBytes) -> None:
    data = bytearray(growing.data)
    if data:  # a slice may be empty
        data[:4] = np.float32(np.nan).tobytes()  # the first block's scale
    await _send_signed(uploading, bulk, index, data)


async def _absurd(uploading: Uploading, bulk: Bulk, index: int, growing: GrowingBytes) -> None:
    data = bytearray(growing.data)
    if data:
        data[:4] = np.float32(1e30).tobytes()
    await _send_signed(uploading, bulk, index, data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_truncated, "broke off"),
        (_not_finite, "scale nan"),
        (_absurd, "its norm is"),
    ],
)
async def test_a_bad_upload_is_left_out_with_its_reason_and_the_others_are_merged(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Uploading, Bulk, int, GrowingBytes], Any],
    reason: str,
) -> None:
    tamper(monkeypatch, spoil)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.add("mallory")
        await made.live(45.0)
        made.check()
        assert progress(peers) >= 3
        found = refusals(peers, "upload_refused")
        assert any(reason in fields["reason"] for fields in found), found
        # Where it reduces the only slice that has numbers, nobody else sees its upload.
        rounds = [r for peer in peers for r in peer.told("round") if r["contributors"]]
        spoilt = {r["round"] for r in rounds if reason in r["left_out"].get(MALLORY, "")}
        assert len(spoilt) >= 2
        for done in rounds:
            if done["round"] in spoilt:
                assert MALLORY in done["left_out"]
                assert MALLORY not in done["contributors"]
                assert len(done["contributors"]) >= 2
        assert any(each["peer"] == MALLORY for peer in peers for each in peer.told("refused"))


def uploads_of_mallory(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bytes, int]]:
    """Number of times that Mallory sends each slice of each round."""
    tries: Counter[tuple[bytes, int]] = Counter()
    converse = Uploading._converse

    async def counted(self: Uploading, bulk: Bulk, index: int, *, gives: bool) -> None:
        if self.parts.me == MALLORY and gives:
            tries[self.parts.round, index] += 1
        await converse(self, bulk, index, gives=gives)

    monkeypatch.setattr(Uploading, "_converse", counted)
    return tries


@pytest.mark.parametrize("spoil", [_not_finite, _absurd])
async def test_a_bad_upload_is_not_tried_again_and_its_sender_hears_why_and_gets_the_merge(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Uploading, Bulk, int, GrowingBytes], Any]
) -> None:
    tamper(monkeypatch, spoil)
    tries = uploads_of_mallory(monkeypatch)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        ill = await made.add("mallory")
        await made.live(40.0)
        made.check()
        assert progress([ill]) >= progress(peers) - 1 >= 2
        assert not ill.told("upload_failed")
        assert set(tries.values()) == {1}
        reasons = [fields["reason"] for fields in ill.told("not_taken")]
        assert reasons and all("scale nan" in r or "what is usual" in r for r in reasons)
        assert {fields["by"] for fields in ill.told("not_taken")} <= {p.id for p in peers}
        assert not any(peer.told("not_taken") for peer in peers)


async def test_an_upload_whose_stream_broke_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, _truncated)
    tries = uploads_of_mallory(monkeypatch)

    async with swarm(MemoryNetwork()) as made:
        await honest(made)
        await made.add("mallory")
        await made.live(40.0)
        assert max(tries.values()) > 1


async def test_an_upload_longer_than_the_layout_says_never_gets_past_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamper(monkeypatch, _too_long)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.add("mallory")
        await made.live(45.0)
        made.check()
        assert progress(peers) >= 3
        found = refusals(peers, "upload_refused")
        assert any("bytes where" in fields["reason"] for fields in found), found


async def test_a_learner_with_nan_says_which_tensor_and_is_left_out() -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        ill = await made.add("mallory")
        assert ill.learner is not None
        for fragment in range(len(LAYOUT.fragments)):
            ill.learner.parameters(fragment)[0] = np.nan
        await made.live(40.0)
        made.check()
        assert progress(peers) >= 3
        found = refusals(peers, "upload_refused")
        assert any("nothing to give" in fields["reason"] for fields in found)
        assert any("tensor" in fields["reason"] for fields in ill.told("not_finite")), ill.told(
            "not_finite"
        )


@pytest.mark.parametrize("codec", ["f32", "f16", "int8"])
async def test_a_thousandfold_poison_is_kept_out_from_the_first_round_on(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Before anything is usual it is measured by theta, in whatever codec."""
    encode = Exchange._encode_chunk

    def spoilt(self: Exchange, chunk: Chunk, given: Contribution, out: memoryview) -> None:
        if self.parts.me == MALLORY:
            far = given.base - 1000 * (given.base - given.values)
            given = replace(given, values=far)
        encode(self, chunk, given, out)

    monkeypatch.setattr(Exchange, "_encode_chunk", spoilt)

    async with swarm(MemoryNetwork()) as made:
        for name in ("anna", "boris", "clara", "mallory"):
            await made.add(name, policy=replace(POLICY, codec=codec))
        await made.live(25.0)
        rounds = [told for peer in made.peers for told in peer.told("round")]
        assert sum(MALLORY in told["members"] for told in rounds) >= 8
        assert not any(MALLORY in told["contributors"] for told in rounds)


async def test_an_honest_peer_that_is_thousands_of_times_further_at_the_start_is_merged() -> None:
    """Steps as under a warm-up from zero, where the first ones move next to nothing."""
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        for peer in peers[:2]:
            assert peer.learner is not None
            peer.learner.rate = 1e-5
        await made.live(50.0)
        made.check()
        further = peers[2].id
        rounds = [told for peer in peers for told in peer.told("round") if told["contributors"]]
        assert len(rounds) >= 6
        assert all(further in told["contributors"] for told in rounds)
        assert not any(peer.told("refused") for peer in peers)


async def test_a_keeper_that_reduces_leaves_an_absurd_upload_out_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamper(monkeypatch, _absurd)

    async with swarm(MemoryNetwork()) as made:
        helper = await made.add("helper", trains=False, knows_start=False)
        peers = [await made.add(name, reachable=False) for name in ("anna", "boris", "clara")]
        await made.add("mallory", reachable=False)
        await made.live(45.0)
        made.check()
        assert progress(peers) >= 3
        found = refusals([helper], "upload_refused")
        assert any("times what is usual" in fields["reason"] for fields in found), found
        assert any(each["peer"] == MALLORY for each in helper.told("refused"))
        for peer in peers:
            assert peer.learner is not None
            for state in peer.averager.states:
                assert state is not None and np.abs(state.theta).max() < 100.0


@pytest.mark.parametrize("named", ["all others", "one other", "nobody there", "later"])
async def test_a_member_that_carries_others_in_its_upload_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Reducers believed it. Their merge left out whom it named, so an audit convicted them of a
    false one; without any other upload, or where no member has that place, it ended the averager.
    """
    opening = Traffic.opening
    honest_part = Uploading.send_part

    def lie(self: Traffic, route: Route) -> said.Opening:
        told = opening(self, route)
        liar = self.commit.index(MALLORY)
        if liar is None or self.entry != liar or not route.gives or named == "later":
            return told
        others = tuple(i for i in range(len(self.commit.members)) if i != self.entry)
        riders = {"all others": others, "one other": others[:1], "nobody there": (60_000,)}[named]
        if named == "nobody there":
            self.inside = riders  # it signs that they are in it
        return msgspec.structs.replace(told, riders=riders)

    async def lie_later(self: Uploading, bulk: Bulk, index: int) -> None:
        await honest_part(self, bulk, index)
        traffic = self.parts.traffic
        if self.parts.me == MALLORY and named == "later":
            others = tuple(i for i in range(len(traffic.commit.members)) if i != traffic.entry)
            route = Route(index, bulk.remote, True)
            again = msgspec.structs.replace(opening(traffic, route), riders=others)
            await self._transport.open_bulk(bulk.remote, said.encode_opening(again))

    monkeypatch.setattr(Traffic, "opening", lie)
    monkeypatch.setattr(Uploading, "send_part", lie_later)
    policy = replace(POLICY, audit_rate=1.0)
    if named == "nobody there":
        policy = replace(policy, group_size=2)

    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
        await made.add("mallory", policy=policy)
        await made.live(60.0)
        assert progress(peers) >= 1
        reason = "it carries members of other sites"
        found = refusals(peers, "opening_refused")
        assert any(fields["reason"] == reason for fields in found), found
        assert not any(peer.averager.guard.convicted for peer in peers)


class _FalseSlice:
    """A stream that brings another merged slice as soon as the true one is merged here."""

    def __init__(self, parts: Parts, index: int) -> None:
        self.remote = MALLORY
        self._growing = parts.merged[index]
        commit = parts.commit
        self.data = bytearray(len(self._growing.data))  # zeros, which every codec decodes
        places = (place for _, place in parts.cutting.pieces(index, merged=True))
        digest = root_of(digests_of(memoryview(self.data), places))
        subject = Subject(parts.round, index, merged=True)
        inside, sign = range(len(commit.members)), identity_of("mallory").sign
        self._said = claim(subject, commit, MALLORY, inside, digest, sign=sign)

    async def receive_growing(self, target: GrowingBytes) -> None:
        while not self._growing.complete:
            await self._growing.beyond(self._growing.filled)
        target.data[:] = self.data
        target.grow(len(self.data))

    async def receive_frame(self, size_max: int) -> bytes:
        return encode_statement(self._said.statement)

    async def finished(self) -> None:
        return


async def test_what_another_reducer_sends_does_not_go_into_a_slice_that_is_merged_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slice was given to another peer, as this one seemed to be dead. What that one sent was
    written over its own merge: others got bytes that it had not signed, and it applied them."""
    merge, start = Reducing._merge, Uploading.__init__
    uploads: dict[int, Uploading] = {}
    brought = 0

    def remembered(self: Uploading, *given: Any) -> None:
        start(self, *given)
        uploads[id(self.parts)] = self

    async def merged(self: Reducing, index: int, *rest: Any) -> None:
        nonlocal brought
        parts = self.parts
        others = [entry.peer for entry in parts.commit.members]
        if parts.me == ANNA and MALLORY in others and len(parts.merged[index].data):
            bulk: Any = _FalseSlice(parts, index)
            parts.start(uploads[id(parts)]._read_merged(bulk, index), "read")
            await asyncio.sleep(0)
            brought += 1
        await merge(self, index, *rest)

    monkeypatch.setattr(Uploading, "__init__", remembered)
    monkeypatch.setattr(Reducing, "_merge", merged)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.add("mallory")
        await made.live(25.0)
        assert progress(peers) >= 2 and brought
        made.check()


async def test_garbage_other_versions_and_unknown_fragments_only_count() -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        anna = peers[0]
        host = made.memory.host("mallory")
        await host.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
        rng = np.random.default_rng(7)
        control, bulk = control_protocol(RUN), bulk_protocol(RUN)
        link = await host.open_stream(anna.id, control, timeout_s=5.0)
        future = said.encode(said.Ask(0, bytes(32)))
        stranger = said.encode(said.Ask(999, bytes(32)))
        bad = [rng.bytes(int(rng.integers(0, 200))) for _ in range(100)]
        # Arrays, strings and bytes of a gigabyte, of which nothing follows.
        bad += [b"\x01" + kind + b"\x40\x00\x00\x00" for kind in (b"\xdd", b"\xdb", b"\xc6")]
        for data in [b"\x09" + future[1:], stranger, *bad]:
            await link.send(b"\x01" + data, timeout_s=5.0)
        for data in [b"\x09" + future[1:], rng.bytes(100), b""]:
            stream = await host.open_stream(anna.id, bulk, timeout_s=5.0)
            await stream.send(data, timeout_s=5.0)
            refusal = await stream.receive(timeout_s=5.0)
            assert refusal is not None and refusal[:1] == b"\x02"
            stream.abort()
        await made.live(60.0)
        made.check()
        assert progress(peers) >= 3
        assert len(refusals(peers, "bad_message")) >= 103
        assert len(refusals(peers, "unknown_fragment")) == 1
        assert len(refusals(peers, "bad_opening")) == 3
        assert "speaks 1" in refusals(peers, "bad_message")[0]["reason"]
        await host.close()


async def test_a_replay_with_other_bytes_than_were_merged_is_refused_and_its_state_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to_wire = ReplayEntry.to_wire

    def spoiled(entry: ReplayEntry) -> tuple[bytes, bytes]:
        head, payload = to_wire(entry)
        data = bytearray(payload)
        data[len(data) // 2] ^= 1
        return head, bytes(data)

    monkeypatch.setattr(ReplayEntry, "to_wire", spoiled)

    network = MemoryNetwork()
    async with swarm(network) as made:
        anna, _, clara = await honest(made)
        await made.live(18.0)
        network.partition([[clara.id]])
        await made.live(30.0)
        network.heal()
        await made.live(60.0)
        assert clara.averager.fetcher.counters["replays_failed"] > 0
        assert "state" in {told["how"] for told in clara.told("state_adopted")}
        assert progress([clara]) >= progress([anna]) - 1
        made.check()  # equal lineage, equal bits


@pytest.mark.parametrize("mu", [0.0, 0.5])
async def test_merges_with_the_momentum_of_another_run_are_not_replayed_and_stop_no_peer(
    mu: float,
) -> None:
    """Whoever was behind peers that had agreed on such a merge was ended by the exception."""
    async with swarm(MemoryNetwork()) as made:
        for liar in ("anna", "boris"):
            await made.add(liar, policy=replace(POLICY, mu=0.5 - mu))
        await made.live(12.0)
        clara = await made.add("clara", policy=replace(POLICY, mu=mu))
        await made.until(lambda: bool(clara.told("replay_failed")), within_s=60.0)
        await made.live(30.0)
        assert "its mu is" in clara.told("replay_failed")[0]["reason"]
        assert clara.versions() == [0, 0] and not clara.told("state_adopted")


async def test_a_peer_with_another_layout_is_refused_by_name_of_both() -> None:
    other = Layout.build([TensorSpec("matrix", (100, 40))], 1)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        made.layout, made.first = other, start_of(other)
        stranger = await made.add("mallory")
        for peer in peers:
            del peer.view[MALLORY]  # membership shows nobody of another run or layout
        await made.live(60.0)
        assert progress(peers) >= 3
        assert stranger.versions() == [0]
        assert any(peer.averager.counters()["wrong_topic"] for peer in peers)
        refused = [f["reason"] for f in stranger.told("turned_away")]
        assert any("layout" in reason for reason in refused), stranger.events[-20:]


def test_garbage_sent_as_a_commit_by_an_established_peer_is_told_once_per_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def send(sender: Peer, receiver: Peer, *, fragments: int) -> None:
        for fragment in range(fragments):
            for number in range(3):
                garbage = said.Committed(fragment, b"no commit %d" % number, bytes(64))
                sender.averager.transport.send(receiver.id, said.encode(garbage))

    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            anna, boris = [await made.add(name) for name in ("anna", "boris")]
            mallory = await made.add("mallory")
            await made.live(5.0)
            now = asyncio.get_running_loop().time()
            known = anna.view[mallory.id]
            fragments = len(made.layout.fragments)

            anna.view[mallory.id] = msgspec.structs.replace(known, first_seen=now)
            send(mallory, anna, fragments=fragments)
            await made.live(5.0)
            assert anna.averager.counters()["commit_refused"] == 3 * fragments
            assert not anna.told("not_a_commit"), "from newcomers it is counted"

            anna.view[mallory.id] = msgspec.structs.replace(
                anna.view[mallory.id], first_seen=now - 1000.0
            )
            for sender in (mallory, boris):
                send(sender, anna, fragments=fragments)
            await made.live(5.0)
            assert anna.averager.counters()["commit_refused"] == 9 * fragments
            told = anna.told("not_a_commit")
            assert Counter(fields["peer"] for fields in told) == {mallory.id: 1, boris.id: 1}
            assert all("not a commit" in fields["reason"] for fields in told)
            warnings = [r for r in caplog.records if r.message.startswith("not_a_commit")]
            assert len(warnings) == 2 and {r.levelname for r in warnings} == {"WARNING"}


async def test_a_peer_that_is_not_listed_gets_no_weights() -> None:
    async with swarm(MemoryNetwork()) as made:
        names = ("anna", "boris", "clara")
        listed = only(*(identity_of(name).peer_id for name in names))
        peers = [
            await made.add(name, wrap=lambda host: GuardedHost(host, listed)) for name in names
        ]
        await made.live(40.0)
        assert progress(peers) >= 1
        stranger = made.memory.host("mallory")
        threads = Threads(1)
        fetcher = Fetcher(stranger, RUN, threads)
        for peer in peers:
            await stranger.connect(peer.id, await peer.host.addresses(), timeout_s=5.0)
            with pytest.raises(FetchFailed, match="admits only the peers it lists"):
                await fetcher.state(
                    0, made.first[0].pieces, [peer.id], trust=EVERYBODY, timeout_s=10.0
                )
            guarded = peer.averager.host
            assert isinstance(guarded, GuardedHost) and guarded.refused == 1
            assert peer.averager.counters()["manifests_served"] == 0
        await stranger.close()
        threads.close()


def test_commits_of_strangers_that_name_a_peer_as_reducer_do_not_fill_its_memory() -> None:
    """Four identities lead rounds of their own, and send a fragment for each to one reducer."""
    layout = Layout.build([TensorSpec("w", (100, 250))], 1)
    size = 4 * layout.size
    held_max = 0

    async def main() -> None:
        nonlocal held_max
        async with swarm(MemoryNetwork(), layout=layout) as made:
            anna, boris = await made.add("anna"), await made.add("boris")
            for peer in (anna, boris):
                assert peer.learner is not None
                peer.learner.is_noisy = False
            await made.live(12.0)
            work = anna.averager._works[0]
            strangers = [identity_of(f"stranger {number}") for number in range(4)]
            hosts = [made.memory.host(stranger) for stranger in strangers]
            for host in hosts:
                await host.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
            members = tuple(
                said.Entry(one.peer_id, 1, 1, 0, 0, 0, 1, 1, 1, True) for one in strangers
            )
            opened = []
            for number in range(32):
                leader, host = strangers[number % 4], hosts[number % 4]
                commit = said.encode_commit(
                    said.Commit(
                        topic=anna.averager.topic,
                        fragment=0,
                        leader=leader.peer_id,
                        leader_incarnation=1,
                        nonce=number,
                        parents=(said.Link(5, bytes(32), 5),),
                        members=members,
                        reducers=(anna.id,),
                        shares=(1,),
                        codec="f32",
                        merge=POLICY.merge,
                        eta=POLICY.eta,
                        mu=POLICY.mu,
                        batch_tokens_max=1,
                        contributors_min=2,
                        upload_s=10.0,
                        round_s=59.0,
                    )
                )
                opening = said.Opening(
                    fragment=0,
                    round=said.digest(commit),
                    slice=0,
                    commit=commit,
                    signature=leader.sign(commit),
                )
                stream = await host.open_stream(anna.id, bulk_protocol(RUN), timeout_s=5.0)
                with suppress(StreamBroken):
                    await stream.send(said.encode_opening(opening), timeout_s=5.0)
                    await stream.send(np.ones(layout.size, np.float32).tobytes(), timeout_s=20.0)
                opened.append(stream)
                await asyncio.sleep(0.05)
                held = sum(
                    expected.upload.data.nbytes
                    for exchange in work.exchanges.values()
                    if exchange.parts.entry is None
                    for expected in exchange.reducing._expected.values()
                    if expected.upload is not None
                )
                held_max = max(held_max, held)
            for stream in opened:
                stream.abort()
            before = progress([anna, boris])
            await made.live(90.0)
            assert progress([anna, boris]) > before, "the others finish their rounds"
            assert not anna.averager.workshop.outside.held_bytes
            for host in hosts:
                await host.close()

    run(main())
    assert held_max <= 2 * size


def test_one_upload_on_many_streams_takes_the_memory_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stream of a member had room for a whole slice, and a member may have sixteen."""

    async def many(uploading: Uploading, bulk: Bulk, index: int, growing: GrowingBytes) -> None:
        opening = headers[bulk]
        more = []
        for _ in range(8):
            with suppress(StreamBroken):
                other = await uploading._transport.open_bulk(bulk.remote, opening)
                await other.send(growing.data[: len(growing.data) // 2])
                more.append(other)
        await asyncio.sleep(1.0)
        await bulk.send(growing.data)
        for other in more:
            other.abort()

    tamper(monkeypatch, many)
    open_bulk = Transport.open_bulk
    headers: dict[Bulk, bytes] = {}

    async def remembered(self: Transport, peer: PeerId, header: bytes) -> Bulk:
        bulk = await open_bulk(self, peer, header)
        headers[bulk] = header
        return bulk

    monkeypatch.setattr(Transport, "open_bulk", remembered)
    most = 0
    receive = Reducing._receive_own

    async def watched(self: Reducing, bulk: Bulk, index: int, entry: int, *rest: Any) -> None:
        def look() -> None:
            nonlocal most
            expected = self._expected.get((index, entry))
            most = max(most, expected.streams if expected is not None else 0)

        asyncio.get_running_loop().call_later(0.5, look)
        await receive(self, bulk, index, entry, *rest)

    monkeypatch.setattr(Reducing, "_receive_own", watched)

    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            peers = await honest(made)
            await made.add("mallory")
            await made.live(60.0)
            made.check()
            assert progress(peers) >= 2

    run(main())
    assert most == 2

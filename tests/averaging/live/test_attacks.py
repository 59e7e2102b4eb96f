"""Peers that lead, fill rosters or name reducers without the right to, and claims that no honest
peer makes: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from averaging import messages as said
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.following import Following
from averaging.live.learner_port import Snapshot
from averaging.live.slices.parts import Parts
from averaging.live.slices.uploading import Uploading
from averaging.live.states.fetch_server import FetchServer
from averaging.live.streams.threads import Threads
from averaging.messages import Head, Join, Link, Message, Signatures
from averaging.numbers.chunks import digest_of
from averaging.numbers.codec import Scratch
from averaging.round.gathering import leading
from averaging.round.gathering.roster import Leader, compose
from averaging.round.opinions.pacemaker import Claim, Pacemaker
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import ProbationPolicy
from dht.identity import Identity, PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import LAYOUT, POLICY, RUN, Peer, Swarm, swarm

ANNA = identity_of("anna")
MALLORY = identity_of("mallory")
FRAGMENTS = [fragment.index for fragment in LAYOUT.fragments]


class Stranger:
    """A host with a fresh key and a control link to every peer; nobody has a record of it."""

    def __init__(self, made: Swarm, identity: Identity) -> None:
        self.identity = identity
        self.host = made.memory.host(identity)
        self.links: dict[PeerId, Any] = {}
        self.joins: dict[int, dict[PeerId, Join]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, peers: list[Peer]) -> None:
        await self.host.serve_streams(f"shoal/{RUN}/control/1", self._serve)
        for peer in peers:
            await self.host.connect(peer.id, await peer.host.addresses(), timeout_s=5.0)
            link = await self.host.open_stream(peer.id, f"shoal/{RUN}/control/1", timeout_s=5.0)
            self.links[peer.id] = link
            self._tasks.append(asyncio.create_task(self._listen(peer.id, link)))

    async def _serve(self, stream: Any) -> None:
        await self._listen(stream.remote, stream)

    async def _listen(self, peer: PeerId, link: Any) -> None:
        while (frame := await link.receive(timeout_s=1e6)) is not None:
            if frame[0] == 1:
                message = said.decode(frame[1:])
                if isinstance(message, Join):
                    self.joins.setdefault(message.fragment, {})[peer] = message
                    await self.say(peer, said.Noted(message.fragment, message.join))

    async def say(self, peer: PeerId, message: Message) -> None:
        await self.links[peer].send(b"\x01" + said.encode(message), timeout_s=5.0)

    def keep_doing(self, what: Callable[[], Any], every_s: float) -> None:
        async def repeat() -> None:
            while True:
                await what()
                await asyncio.sleep(every_s)

        self._tasks.append(asyncio.create_task(repeat()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.host.close()


def finished(peers: list[Peer]) -> dict[str, Any]:
    """The rounds that any of these peers finished, by name."""
    return {
        fields["round"]: fields
        for peer in peers
        for fields in peer.told("round")
        if fields["outcome"] == "finished"
    }


def largest(peers: list[Peer]) -> float:
    states = [state for peer in peers for state in peer.averager.states if state is not None]
    return max(float(np.abs(state.theta).max()) for state in states)


async def honest(made: Swarm) -> list[Peer]:
    return [await made.add(name) for name in ("anna", "boris", "clara")]


async def rounds_without(seconds: float) -> int:
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.live(20.0 + seconds)
        return len(finished(peers))


def test_a_stranger_that_calls_seals_and_reduces_leads_no_round() -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            peers = await honest(made)
            await made.live(20.0)
            stranger, nonce = Stranger(made, MALLORY), count(1)
            await stranger.open(peers)

            async def lead() -> None:
                for fragment in FRAGMENTS:
                    standing = peers[0].averager.standing(fragment)
                    assert standing is not None
                    for peer in peers:
                        await stranger.say(peer.id, said.Call(fragment, standing.head(), 4.0))
                    by_peer = stranger.joins.pop(fragment, {})
                    if len(by_peer) >= 2:
                        await commit(fragment, by_peer)

            async def commit(fragment: int, joins: dict[PeerId, Join]) -> None:
                me = MALLORY.peer_id
                leader = Leader(
                    peer=me,
                    incarnation=1,
                    topic=peers[0].averager.topic,
                    fragment=fragment,
                    nonce=next(nonce),
                )
                made_of = sorted(joins.items())
                what = compose(leader, made_of, POLICY, encoded_bytes=lambda codec: 1000)
                what = msgspec.structs.replace(what, reducers=(me,), shares=(1,))
                encoded = said.encode_commit(what)
                for peer in joins:
                    signed = said.Committed(fragment, encoded, MALLORY.sign(encoded))
                    await stranger.say(peer, signed)

            stranger.keep_doing(lead, 2.0)
            await made.live(20.0)
            await stranger.close()
            rounds = finished(peers)
            assert not any(fields["leader"] == MALLORY.peer_id for fields in rounds.values())
            assert not stranger.joins, "somebody has joined a stranger"
            assert len(rounds) >= 0.8 * control
            made.check()

    control = run(rounds_without(20.0))
    run(main())


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_peer_that_always_calls_first_leads_no_more_than_its_turn_and_chooses_no_reducer(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    me = MALLORY.peer_id
    ranks, ranks_for = Pacemaker.leader, Pacemaker.leader_for

    def leader(self: Pacemaker, head: Head, now: float) -> PeerId | None:
        return me if self._id.me == me else ranks(self, head, now)

    def leader_for(self: Pacemaker, sender: PeerId, join: Join, now: float) -> Claim:
        if self._id.me == me:
            return Claim(max(join.attempt, self.attempt), me)
        return ranks_for(self, sender, join, now)

    monkeypatch.setattr(Pacemaker, "leader", leader)
    monkeypatch.setattr(Pacemaker, "leader_for", leader_for)
    composes = compose

    def alone(leader: Leader, *args: Any, **facts: Any) -> Any:
        made = composes(leader, *args, **facts)
        if leader.peer == me:
            made = msgspec.structs.replace(made, reducers=(me,), shares=(1,))
        return made

    monkeypatch.setattr(leading, "compose", alone)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.add("mallory")
        if not is_known:
            for peer in peers:
                del peer.view[me]
        await made.live(160.0)
        rounds = finished(peers)
        assert len(rounds) >= 4
        assert not any(fields["leader"] == me for fields in rounds.values())
        declined = [fields["reason"] for peer in peers for fields in peer.told("declined")]
        assert is_known == any("its 'reducers' is not what follows" in why for why in declined)
        assert largest(peers) < 10.0


def _reduce_to(monkeypatch: pytest.MonkeyPatch, value: float, who: PeerId) -> None:
    """A member merges what it reduces to a displacement of its own making."""
    merge = Parts._merge_chunks

    def lie(
        self: Parts, index: int, given: Any, into: Any, leaves: Any, rest: Any, say: Any
    ) -> None:
        if self.me != who:
            return merge(self, index, given, into, leaves, rest, say)
        scratch = Scratch()
        for chunk, place in self.cutting.pieces(index, merged=True):
            out = into.data[place]
            base = np.full(chunk.values.stop, value, np.float32)
            self.numbers.down.codecs[0].encode(base[chunk.values], chunk.sizes, out, scratch)
            leaves.append(digest_of(out))
            say(place.stop)
        return None

    monkeypatch.setattr(Parts, "_merge_chunks", lie)


async def test_a_reducer_that_returns_absurd_numbers_is_refused_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _reduce_to(monkeypatch, 1e30, MALLORY.peer_id)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.add("mallory")
        await made.live(100.0)
        assert largest(peers) < 10.0
        failed = [e["reason"] for peer in peers for e in peer.told("upload_failed")]
        assert any("the merged slice has a norm of" in reason for reason in failed)
        assert len(finished(peers)) >= 4
        made.check()


# Claims


class Forged:
    """The library of a peer that serves states of its own making."""

    def __init__(
        self, states: dict[int, FragmentState], signed: dict[int, Signatures] | None = None
    ) -> None:
        self.states = states
        self.signed = signed or {}

    def state(self, fragment: int) -> FragmentState:
        return self.states[fragment]

    def signatures(self, state: FragmentState) -> Signatures:
        return self.signed.get(state.fragment, ())

    def replay(self, *_: Any) -> None:
        return None


def forged(honest: FragmentState, *, ahead: int, tokens: int, value: float) -> FragmentState:
    """A state of which its author says that it continues the honest one."""
    version, history = honest.version + ahead, bytes([honest.fragment + 1]) * 32
    merged = honest.merged.with_work(MALLORY.peer_id, 1, 1, tokens)
    lineage = bound(history, merged.digest())
    chain = honest.chain.extended(Link(version, lineage, merged.tokens))
    theta = np.full_like(honest.theta, value)
    momentum = np.zeros_like(theta)
    fragment = honest.fragment
    return FragmentState(fragment, version, lineage, chain, theta, momentum, merged, history)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("ahead", "tokens", "value"),
    [
        (100, 10**5, float("nan")),
        (1, 10**5, 1e6),
        (2**52, 10**5, 0.0),
        (10, 10**15, 0.0),
    ],
    ids=["not finite", "far away", "largest version", "tokens of many runs"],
)
async def test_a_forged_state_that_is_shown_to_all_is_taken_by_nobody(
    ahead: int, tokens: int, value: float, is_known: bool
) -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        await made.live(32.0)
        states = [state for state in peers[0].averager.states if state is not None]
        lies = {
            state.fragment: forged(state, ahead=ahead, tokens=tokens, value=value)
            for state in states
        }
        stranger, threads = Stranger(made, MALLORY), Threads(1)
        await FetchServer(stranger.host, run=RUN, library=Forged(lies), threads=threads).start()
        await stranger.open(peers)
        if is_known:
            for peer in peers:
                now = asyncio.get_running_loop().time()
                peer.view[MALLORY.peer_id] = PeerView(
                    first_seen=now - 1e3, heard_at=now, trains=False
                )
        for peer in peers:
            for lie in lies.values():
                head = Standing.of(lie).head()
                await stranger.say(peer.id, said.Compare(lie.fragment, head))
                await stranger.say(peer.id, said.Call(lie.fragment, head, 4.0))
        await made.live(6.0)
        await stranger.close()
        threads.close()
        took = [e for peer in peers for e in peer.told("state_adopted") if e["rebased"]]
        assert not took and largest(peers) < 10.0
        assert {s.version for peer in peers for s in peer.averager.states if s} < set(range(99))
        made.check()


@pytest.mark.parametrize("signs", ["itself", "the others, long ago", "the others, now"])
async def test_no_member_alone_moves_another_however_it_signs(signs: str) -> None:
    """One of the run's members forges a state; it was there from the start and has merged work."""
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made)
        liar = await made.add("mallory")
        await made.live(12.0)
        old = {s.fragment: liar.averager.signatures(s) for s in liar.averager.states if s}
        await made.live(20.0)
        lies, signed = {}, {}
        for state in liar.averager.states:
            assert state is not None
            lie = forged(state, ahead=1, tokens=10**4, value=3.0)
            if signs == "the others, now":  # the lineage is right, its bits are not
                lie = replace(state, theta=lie.theta)
            lies[state.fragment] = lie
            claim = said.link_claim(liar.averager.topic, state.fragment, lie.chain.tip)
            others = {
                "itself": (),
                "the others, long ago": old[state.fragment],
                "the others, now": liar.averager.signatures(state),
            }[signs]
            own = (liar.id, liar.averager.me.identity.sign(claim))
            signed[state.fragment] = (own, *(each for each in others if each[0] != liar.id))
        liar.averager._server._library = Forged(lies, signed)

        async def lie_to(peer: Peer) -> None:
            for fragment, lie in lies.items():
                head = msgspec.structs.replace(Standing.of(lie).head(), signatures=signed[fragment])
                liar.averager.transport.send(peer.id, said.encode(said.Compare(fragment, head)))

        for peer in peers:
            await lie_to(peer)
        newcomer = await made.add("dora", knows_start=False)
        for _ in range(5):
            await made.live(2.0)
            for peer in [*peers, newcomer]:
                await lie_to(peer)
        await made.live(10.0)
        for peer in [*peers, newcomer]:
            assert None not in peer.averager.states
            for taken in peer.averager.states:
                assert taken is not None
                assert (
                    lies[taken.fragment].lineage not in {link.lineage for link in taken.chain}
                    or signs == "the others, now"
                )
        assert newcomer.told("state_fetched")
        assert len({tuple(peer.versions()) for peer in peers}) <= 2, "the others go on"
        made.check()


@pytest.mark.parametrize(("steps", "is_merged"), [(10**10, False), (2000, True)])
async def test_overstated_steps_and_tokens_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, steps: int, is_merged: bool
) -> None:
    """A claim of more steps than fit into the time is refused. Of too many tokens only some
    count."""
    policy = replace(POLICY, tokens_end=10**7, batch_tokens_max=128)

    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
        liar = await made.add("mallory", policy=policy)
        assert liar.learner is not None
        truth = liar.learner.snapshot

        async def lie(fragment: int, *, timeout_s: float) -> Snapshot | None:
            taken = await truth(fragment, timeout_s=timeout_s)
            return taken and replace(taken, steps=steps, tokens=10**12)

        monkeypatch.setattr(liar.learner, "snapshot", lie)
        await made.live(25.0)
        assert not any(peer.averager.final_fragments for peer in peers)
        merged = [s.merged for peer in peers for s in peer.averager.states if s is not None]
        assert any(liar.id in marks for marks in merged) == is_merged
        refused = [e for e in liar.told("turned_away") if "I believe" in str(e["reason"])]
        assert bool(refused) != is_merged
        assert max(marks.tokens for marks in merged) < 10**6
        made.check()


def _of_strangers(merged: MergedMap) -> MergedMap:
    """As many marks as fit a frame, about."""
    return MergedMap({PeerId(f"{index:07d}" + "x" * 50): Mark(0, 0, 0) for index in range(15_000)})


def _of_tokens(merged: MergedMap) -> MergedMap:
    return merged.with_work(PeerId("x"), 1, 1, 10**12)


def _of_one_token(merged: MergedMap) -> MergedMap:
    """One token of another member: no bound on plausible numbers would find it."""
    victim = ANNA.peer_id
    mark = merged.get(victim, Mark(1, 0, 0))
    return merged.with_work(victim, mark.incarnation, mark.step, 1)


@pytest.mark.parametrize("fake", [_of_strangers, _of_tokens, _of_one_token])
async def test_an_invented_merged_map_is_a_bad_upload_and_no_more(
    monkeypatch: pytest.MonkeyPatch, fake: Callable[[MergedMap], MergedMap]
) -> None:
    send = Uploading.send_part

    async def part(self: Uploading, bulk: Any, index: int) -> None:
        own = self.parts.own_maps
        if self.parts.me == MALLORY.peer_id:
            self.parts.own_maps = {
                parent: replace(each, merged=fake(each.merged)) for parent, each in own.items()
            }
        await send(self, bulk, index)
        self.parts.own_maps = own

    monkeypatch.setattr(Uploading, "send_part", part)
    policy = replace(POLICY, group_size=3)

    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
        await made.add("mallory", policy=policy)
        await made.live(100.0)
        assert all(peer.task is not None and not peer.task.done() for peer in peers)
        refused = [e for peer in peers for e in peer.told("refused")]
        assert any(e["peer"] == MALLORY.peer_id and "map" in e["reason"] for e in refused)
        states = [s for peer in peers for s in peer.averager.states if s is not None]
        assert max(s.merged.tokens for s in states) < 10**6


# Ends of rounds


# Newcomers


def test_five_peers_merge_as_soon_with_probation_as_without() -> None:
    def first_merge_s(policy: Any) -> float:
        async def main() -> float:
            async with swarm(MemoryNetwork()) as made:
                names = ("anna", "boris", "clara", "dora", "emil")
                peers = [await made.add(name, policy=policy) for name in names]

                def merged_at() -> list[float]:
                    return [
                        at
                        for peer in peers
                        for at, event, fields in peer.events
                        if event == "round" and fields["outcome"] == "finished"
                    ]

                await made.until(lambda: bool(merged_at()), within_s=40.0)
                return min(merged_at())

        return run(main())

    long = replace(POLICY, probation=ProbationPolicy(rounds=400, seconds=600.0))
    assert first_merge_s(long) == pytest.approx(first_merge_s(POLICY), abs=1.0)


async def test_a_peer_that_downloads_a_state_asks_established_peers_first() -> None:
    policy = replace(POLICY, probation=ProbationPolicy(rounds=400, seconds=600.0))

    async with swarm(MemoryNetwork()) as made:
        old = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
        await made.live(30.0)
        new = [await made.add(f"new {number}", policy=policy) for number in range(4)]
        await made.live(10.0)
        anna, boris, clara = old
        for work in anna.averager._works:
            following = Following(work)
            assert set(following._sources(None)[:2]) == {boris.id, clara.id}
            asked = following._sources(new[0].id)
            assert set(asked[:2]) == {boris.id, clara.id} and asked[2] == new[0].id
            assert set(asked[3:]) == {peer.id for peer in new[1:]}

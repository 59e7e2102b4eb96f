"""Peers that lead, fill rosters or name reducers without the right to: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from averaging import messages as said
from averaging.messages import Join, Message
from averaging.round import leading
from averaging.round.neighbourhood import Neighbourhood
from averaging.round.roster import Leader, compose
from dht.identity import Identity, PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import LAYOUT, POLICY, RUN, Peer, Swarm, swarm

MALLORY = identity_of("mallory")
FRAGMENTS = [fragment.index for fragment in LAYOUT.fragments]


class Stranger:
    """A host with a fresh key and a control link to every peer; nobody has a record of it."""

    def __init__(self, made: Swarm, identity: Identity) -> None:
        self.identity = identity
        self.host = made.network.host(identity)
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
                    await self.say(peer, said.Noted(message.fragment, message.join, 5.0))

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
                    for peer in peers:
                        await stranger.say(peer.id, said.Call(fragment, None, 4.0))
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
def test_a_peer_that_always_calls_first_leads_no_more_than_its_turn_and_chooses_no_reducer(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    me = MALLORY.peer_id
    for name in ("leader", "leader_for"):
        ranks = getattr(Neighbourhood, name)

        def mine(self: Neighbourhood, *args: Any, ranks: Any = ranks, **facts: Any) -> Any:
            return me if self._id.me == me else ranks(self, *args, **facts)

        monkeypatch.setattr(Neighbourhood, name, mine)
    composes = leading.compose

    def alone(leader: Leader, *args: Any, **facts: Any) -> Any:
        made = composes(leader, *args, **facts)
        if leader.peer == me:
            made = msgspec.structs.replace(made, reducers=(me,), shares=(1,))
        return made

    monkeypatch.setattr(leading, "compose", alone)

    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            peers = await honest(made)
            await made.add("mallory")
            if not is_known:
                for peer in peers:
                    del peer.view[me]
            await made.live(40.0)
            rounds = finished(peers)
            assert len(rounds) >= 4
            assert not any(fields["leader"] == me for fields in rounds.values())
            declined = [fields["reason"] for peer in peers for fields in peer.told("declined")]
            assert is_known == any("its reducers are not those" in why for why in declined)
            assert largest(peers) < 10.0

    run(main())


def test_strangers_that_join_everything_and_never_vote_cost_no_round() -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            peers = await honest(made)
            await made.live(20.0)
            strangers = [Stranger(made, identity_of(f"sybil {number}")) for number in range(4)]
            numbers = count(1)
            for stranger in strangers:
                await stranger.open(peers)

            async def join(stranger: Stranger) -> None:
                number = next(numbers)
                for fragment in FRAGMENTS:
                    standing = peers[0].averager.standing(fragment)
                    assert standing is not None
                    plain = Join(
                        fragment=fragment,
                        topic=peers[0].averager.topic,
                        incarnation=1,
                        join=number,
                        head=standing.head(),
                        merged_tokens=0,
                        base_version=standing.version,
                        staleness=0,
                        mark=number,
                        steps=8,
                        tokens=800,
                        batch_tokens_max=100,
                        step_time_s=1.0,
                        bytes_per_s=1e9,
                        reachable=False,
                        codecs=("int8", "f32"),
                    )
                    for peer in peers:
                        claim = said.claim_of(plain, peer.id)
                        signed = msgspec.structs.replace(
                            plain, signature=stranger.identity.sign(claim)
                        )
                        await stranger.say(peer.id, signed)

            for stranger in strangers:
                stranger.keep_doing(lambda stranger=stranger: join(stranger), 2.0)
            await made.live(20.0)
            for stranger in strangers:
                await stranger.close()
            rounds = finished(peers)
            names = {peer.id for peer in peers}
            assert all(names.issuperset(fields["members"]) for fields in rounds.values())
            assert len(rounds) >= 0.8 * control
            made.check()

    control = run(rounds_without(20.0))
    run(main())

"""A swarm of invited peers among strangers: no protocol of the run answers one of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from averaging import messages as said
from averaging.live.states.fetcher import Fetcher, FetchFailed
from averaging.live.streams.threads import Threads
from dht.errors import PeerUnreachable, StreamBroken
from dht.host import Messaging
from dht.identity import PeerId
from dht.membership.admission import NO_INVITE, Admission
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.wrapped_host import REFUSED, GuardedHost
from tests.averaging.live.quadratic import RUN, Peer, Swarm, swarm
from tests.averaging.live.served_states import EVERYBODY
from tests.averaging.message_examples import EXAMPLES
from tests.dht.membership.signers import NOW, admission, banning, credential, invitation

NAMES = ("anna", "boris", "clara")


def door(*names: str) -> Admission:
    """The admission of a run to which these peers have shown a learner's invite, and a keeper."""
    made = admission()
    for name in names:
        peer = identity_of(name).peer_id
        assert made.show(peer, credential(peer), now=NOW) is None
    keeper = identity_of("keeper").peer_id
    shown = credential(keeper, invitation("for keepers", role="keeper"))
    assert made.show(keeper, shown, now=NOW) is None
    return made


async def invited(made: Swarm, admits: Admission) -> list[Peer]:
    async def refusal(peer: PeerId) -> str | None:
        return admits.refusal(peer, now=NOW)

    def guarded(host: Messaging) -> Messaging:
        return GuardedHost(host, refusal)

    return [await made.add(name, wrap=guarded) for name in NAMES]


def rounds(peers: list[Peer]) -> int:
    return min(version or 0 for peer in peers for version in peer.versions())


async def answers(stranger: MemoryHost, peer: PeerId, protocol: str, first: bytes) -> list[Any]:
    """Everything that a peer says on a stream of a stranger, which begins with ``first``."""
    stream = await stranger.open_stream(peer, protocol, timeout_s=5.0)
    heard: list[Any] = []
    try:
        await stream.send(first, timeout_s=5.0)
        while (frame := await stream.receive(timeout_s=30.0)) is not None:
            heard.append(frame)
    except StreamBroken:
        pass
    stream.abort()
    return heard


async def test_a_stranger_gets_no_answer_from_any_protocol_of_an_invited_run() -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await invited(made, door(*NAMES))
        await made.live(40.0)
        assert rounds(peers) >= 1, "the invited peers merge"
        stranger = made.memory.host("mallory")
        (anna, _, _) = peers
        await stranger.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
        guarded = anna.averager.host
        assert isinstance(guarded, GuardedHost)
        served = list(anna.host._served.streams)
        assert {protocol.split("/")[2] for protocol in served} >= {"control", "bulk", "fetch"}
        state = anna.averager.states[0]
        assert state is not None
        for protocol in served:
            for first in (b"", b"\0", b"\1" + said.encode(said.Ask(0, bytes(32)))):
                heard = await answers(stranger, anna.id, protocol, first)
                assert heard in ([REFUSED + NO_INVITE.encode()], []), protocol
        threads = Threads(1)
        with pytest.raises(FetchFailed, match="admits invited peers only"):
            await Fetcher(stranger, RUN, threads).state(
                0, made.first[0].pieces, [anna.id], trust=EVERYBODY, timeout_s=10.0
            )
        assert guarded.refused >= 3 * len(served)
        assert not anna.averager.counters()["manifests_served"]
        assert anna.averager.transport.linked() == tuple(sorted(p.id for p in peers[1:]))
        threads.close()
        await stranger.close()


async def test_a_swarm_goes_on_without_a_peer_that_was_banned_in_the_middle() -> None:
    async with swarm(MemoryNetwork()) as made:
        admits = door(*NAMES)
        peers = await invited(made, admits)
        await made.live(40.0)
        clara = peers[2]
        admits.take(banning(identity_of("clara").public_key), now=NOW)
        for peer in peers[:2]:  # as the presence of each does within a minute
            await peer.host.disconnect(clara.id)
            del peer.view[clara.id]
        before = rounds(peers[:2])
        made.peers.remove(clara)
        await made.live(60.0)
        assert rounds(peers[:2]) >= before + 1
        for peer in peers[:2]:
            assert clara.id not in peer.averager.transport.linked()
            with pytest.raises(PeerUnreachable, match="banned"):
                await peer.averager.host.open_stream(clara.id, "any", timeout_s=1.0)
        await clara.ended()
        await clara.host.close()


async def test_the_join_of_a_peer_that_is_admitted_as_a_keeper_is_refused() -> None:
    async with swarm(MemoryNetwork()) as made:
        admits = door(*NAMES)
        anna = (await invited(made, admits))[0]
        anna.averager.around = replace(
            anna.averager.around,
            may_train=lambda peer: admits.refusal(peer, now=NOW, role="learner") is None,
        )
        keeper = identity_of("keeper").peer_id
        example = next(each for each in EXAMPLES if isinstance(each, said.Join))
        join = said.encode(msgspec.structs.replace(example, fragment=0))
        anna.averager._heard(keeper, join)
        assert anna.averager.stats.refused["join_of_a_keeper"] == 1
        anna.averager._heard(identity_of("boris").peer_id, join)
        assert anna.averager.stats.refused["join_of_a_keeper"] == 1
        await asyncio.sleep(0)

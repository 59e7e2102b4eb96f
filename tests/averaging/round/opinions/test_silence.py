"""A leader that is frozen is waited for once, not once for each fragment."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from averaging import messages as said
from averaging.round.interface.effects import Silent
from averaging.round.interface.inputs import Due, Offered, PeerSilent, Received, Tick
from averaging.round.interface.phase import Phase
from averaging.round.opinions.silence import HEARD_MAX, LastHeard
from averaging.rules.succession import succession
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, Peer, layout_of, swarm
from tests.averaging.round.machines import ANNA, BORIS, machine, of, offer, standing

CLARA = PeerId("clara")


def led_next(peers: list[Peer]) -> Counter[PeerId]:
    """The number of fragments that each peer will lead next, if all peers see each other."""
    names = [peer.id for peer in peers]
    topic = peers[0].averager.topic
    return Counter(
        succession(
            names,
            topic=topic,
            fragment=state.fragment,
            version=state.version,
            lineage=state.lineage,
        )[0]
        for state in peers[0].averager.states
        if state is not None
    )


def test_a_peer_that_is_not_heard_while_another_one_is_counts_as_silent() -> None:
    last_heard = LastHeard()
    last_heard.heard(ANNA, 1.0)
    last_heard.heard(BORIS, 3.0)

    assert last_heard.is_silent(ANNA, since=2.0)
    assert last_heard.is_silent(CLARA, since=2.0), "who was never heard at all"
    assert not last_heard.is_silent(BORIS, since=2.0)


@pytest.mark.parametrize("since", [3.0, 4.0])
def test_when_no_peer_is_heard_this_one_may_have_been_asleep(since: float) -> None:
    last_heard = LastHeard()
    assert not last_heard.is_silent(ANNA, since=since)
    last_heard.heard(ANNA, 1.0)
    last_heard.heard(BORIS, 3.0)

    assert not last_heard.is_silent(ANNA, since=since)


def test_peers_that_never_worked_do_not_make_one_that_did_count_as_silent() -> None:
    last_heard = LastHeard(lambda peer: float(peer == ANNA))
    last_heard.heard(ANNA, 1.0)
    for number in range(3 * HEARD_MAX):
        last_heard.heard(PeerId(f"p{number}"), 2.0)

    assert not last_heard.is_silent(ANNA, since=0.5)
    assert last_heard.is_silent(ANNA, since=1.5)
    assert last_heard.is_silent(PeerId("p0"), since=1.5), "forgotten, as if never heard"
    assert len(last_heard) <= HEARD_MAX


def test_a_leader_that_another_fragment_found_silent_is_left_at_once() -> None:
    rounds = machine(reachable=False)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    attempt = rounds.joining.attempt
    assert attempt is not None
    frozen = attempt.leader

    rounds.handle(PeerSilent(frozen), 1.5)

    assert rounds.phase is Phase.JOINING
    assert rounds.joining.attempt is not None and rounds.joining.attempt.leader != frozen


def test_a_leader_that_noted_a_join_counts_as_silent_since_the_join_was_sent_again() -> None:
    rounds = machine(reachable=False)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    attempt = rounds.joining.attempt
    assert attempt is not None
    leader = attempt.leader
    rounds.handle(Received(leader, said.Noted(0, attempt.join.join, 5.0)), 2.0)
    asked_at = rounds.deadline
    assert asked_at is not None
    assert not of(rounds.handle(Tick(), asked_at), Silent)

    (silent,) = of(rounds.handle(Tick(), asked_at + POLICY.answer_s), Silent)

    assert silent == Silent(leader, asked_at)


async def test_all_fragments_together_wait_for_a_frozen_leader_once() -> None:
    network = MemoryNetwork()
    async with swarm(network, layout=layout_of(4)) as made:
        peers = [await made.add(name) for name in ("anna", "boris", "clara", "dora")]
        await made.live(40.0)
        while max(led_next(peers).values()) < 3:
            await made.live(1.0)
        (frozen, count), *_ = led_next(peers).most_common()
        frozen_at = asyncio.get_running_loop().time()
        network.pause(frozen)
        await made.live(60.0)
        found = 0
        for peer in peers:
            told = [
                (event, at - frozen_at)
                for at, event, fields in peer.events
                # Later its links are given up, and all fragments hear of that anyway.
                if frozen_at < at < frozen_at + 15.0 and fields.get("leader") == frozen
            ]
            joined = [at for event, at in told if event == "joining"]
            left = [at for event, at in told if event == "leader_silent"]
            if peer.id == frozen or len(left) < 2:
                continue  # the others were called away by somebody who knew before
            found += 1
            assert max(joined) - min(joined) > 0.5, "they joined one after the other"
            assert max(left) - min(left) < 0.1, f"{peer.name} waited more than once: {told}"
            assert peer.told("silent")[0]["peer"] == frozen
        assert count >= 3 and found
        made.check()

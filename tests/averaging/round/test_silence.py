"""A leader that is frozen is waited for once, not once for each fragment."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from averaging import messages as said
from averaging.round.effects import Silent
from averaging.round.inputs import Due, Offered, PeerSilent, Received, Tick
from averaging.round.phase import Phase
from averaging.round.silence import HEARD_MAX, KEPT_S, Answering
from averaging.rules.grouping import succession
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, run
from tests.averaging.live.quadratic import POLICY, Peer, swarm
from tests.averaging.round.machines import ANNA, BORIS, machine, of, offer, standing

CLARA = PeerId("clara")


def led_next(peers: list[Peer]) -> Counter[PeerId]:
    """How many fragments each will lead next, where all see all."""
    names = [peer.id for peer in peers]
    topic = peers[0].averager.topic
    return Counter(
        succession(names, topic=topic, fragment=index, version=version or 0)[0]
        for index, version in enumerate(peers[0].versions())
    )


def test_who_is_not_heard_while_another_is_is_silent() -> None:
    answering = Answering()
    answering.heard(ANNA, 1.0)
    answering.heard(BORIS, 3.0)

    assert answering.is_silent(ANNA, since=2.0)
    assert answering.is_silent(CLARA, since=2.0), "who was never heard at all"
    assert not answering.is_silent(BORIS, since=2.0)


@pytest.mark.parametrize("since", [3.0, 4.0])
def test_when_nobody_is_heard_it_may_be_me_who_was_asleep(since: float) -> None:
    answering = Answering()
    assert not answering.is_silent(ANNA, since=since)
    answering.heard(ANNA, 1.0)
    answering.heard(BORIS, 3.0)

    assert not answering.is_silent(ANNA, since=since)


def test_only_so_many_peers_are_remembered() -> None:
    answering = Answering()
    for number in range(HEARD_MAX + 10):
        answering.heard(PeerId(f"p{number}"), number / HEARD_MAX)

    assert answering.is_silent(PeerId("p0"), since=-1.0), "forgotten, as if never heard"
    assert not answering.is_silent(PeerId("p10"), since=0.0)


def test_peers_are_remembered_for_longer_than_anybody_waits_for_an_answer() -> None:
    answering = Answering()
    answering.heard(ANNA, 0.0)
    answering.heard(BORIS, 0.5)
    answering.heard(CLARA, KEPT_S)

    assert 2 * POLICY.answer_s < KEPT_S
    assert not answering.is_silent(ANNA, since=-1.0)

    answering.heard(CLARA, KEPT_S + 0.1)

    assert answering.is_silent(ANNA, since=-1.0), "forgotten, as if never heard"
    assert not answering.is_silent(BORIS, since=-1.0)
    assert len(answering) == 2


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


def test_a_leader_that_noted_me_and_then_falls_silent_is_so_since_i_asked_again() -> None:
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


def test_all_fragments_together_wait_for_a_frozen_leader_once() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with swarm(network) as made:
            peers = [await made.add(name) for name in ("anna", "boris", "clara", "dora")]
            await made.live(40.0)
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
            assert count >= 2 and found
            made.check()

    run(main())

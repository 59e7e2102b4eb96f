"""A machine that wants to be led, or is alone: when it offers, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging import messages as said
from averaging.messages import Join
from averaging.round.effects import Effect, GiveUp, TakeSnapshot
from averaging.round.inputs import CaughtUp, Due, Leave, Offered, Received, StepsCounted, Tick
from averaging.round.machine import FragmentRounds
from averaging.rules.peer_view import PeerView
from tests.averaging.round.machines import (
    ANNA,
    POLICY,
    asks,
    leading,
    machine,
    offer,
    sent,
    standing,
)


def wanted(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, TakeSnapshot)]


def founder_beside(anna: PeerView) -> FragmentRounds:
    rounds = machine(others=(), founder=True)
    rounds.peers.view = {ANNA: anna}
    return rounds


ARRIVING = PeerView(first_seen=0.0, heard_at=0.0, trains=False, arrives=True)


def test_a_founder_keeps_the_state_that_a_newcomer_is_fetching() -> None:
    assert wanted(founder_beside(ARRIVING).handle(Due(), 1.0)) == []


@pytest.mark.parametrize("at", [31.0, 1000.0])
def test_a_founder_folds_again_when_the_newcomer_is_not_heard_any_more(at: float) -> None:
    assert wanted(founder_beside(ARRIVING).handle(Due(), at)) == ["alone, so I fold"]


def test_a_keeper_beside_a_founder_changes_nothing() -> None:
    keeper = replace(ARRIVING, arrives=False)
    assert wanted(founder_beside(keeper).handle(Due(), 1.0)) == ["alone, so I fold"]


def test_a_newcomer_that_never_trains_does_not_stop_a_founder_for_good() -> None:
    rounds = founder_beside(ARRIVING)
    rounds.handle(Due(), 1.0)
    late = 1.0 + POLICY.alone_s
    rounds.peers.view = {ANNA: replace(ARRIVING, heard_at=late)}
    assert wanted(rounds.handle(Due(), late)) == ["alone, so I fold"]


def test_a_leader_that_falls_behind_keeps_no_empty_roster_open() -> None:
    """It joined itself there again and again, and passed when called: its work was never merged."""
    rounds = leading()
    caller = next(iter(rounds.peers.view))
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    assert rounds.gathering is not None

    ahead = standing("start", "one")
    rounds.handle(Received(caller, said.Behind(0, ahead.head(), caller)), 1.1)
    assert rounds.gathering is None
    rounds.handle(CaughtUp(ahead), 1.2)

    rounds.handle(StepsCounted(100), 1.5)
    assert wanted(rounds.handle(Received(caller, said.Call(0, ahead.head(), 10.0)), 2.0))
    effects = rounds.handle(Offered(offer(ahead, mark=100)), 2.1)
    assert [type(message) for message in sent(effects, caller)] == [Join]


def test_an_abandoned_offer_leaves_no_empty_roster_open() -> None:
    rounds = leading()
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)

    rounds.handle(Leave("the learner left"), 2.0)

    assert rounds.gathering is None


def test_a_leader_that_is_no_member_of_its_round_opens_no_second_one() -> None:
    """The other one would make another version of the same: a fork, where two are a quorum."""
    rounds = leading()
    start = standing("start")
    for other in rounds.peers.view:
        rounds.handle(asks(other, start), 1.0)
    rounds.handle(Tick(), 1.0 + POLICY.quorum.wait_s)
    assert [part.entry for part in rounds.rounds.values()] == [None]
    assert rounds.gathering is None

    rounds.handle(StepsCounted(100), 1.5)
    rounds.handle(Due(), 20.0)
    effects = rounds.handle(Offered(offer(start, mark=100)), 20.0)

    assert rounds.gathering is None
    assert sent(effects) == []
    assert [effect.reason for effect in effects if isinstance(effect, GiveUp)] == [
        "the roster that I closed is without me"
    ]

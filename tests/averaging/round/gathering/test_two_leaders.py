"""Lost calls, and leaders that meet: as soon as a message gets through one of them leads."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from averaging import messages as said
from averaging.messages import Call, Join, Message
from averaging.round.interface.effects import Effect, Send
from averaging.round.interface.inputs import (
    Due,
    Input,
    LinkLost,
    Offered,
    Progressed,
    Received,
    Tick,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    POLICY,
    asks,
    join,
    joined,
    leading,
    machine,
    offer,
    phase,
    ranked,
    sent,
    signed,
    standing,
)

START = standing("start")
FIRST, SECOND = ranked((ANNA, BORIS), START.head())
"""The order in which the two lead a round from there."""


class Two:
    """Two machines, and a link between them which may be down: what is said then is lost."""

    def __init__(self) -> None:
        self.machines = {
            FIRST: machine(others=(SECOND,), me=FIRST),
            SECOND: machine(others=(FIRST,), me=SECOND),
        }
        self.is_down = False
        self._on_the_way: deque[tuple[PeerId, PeerId, Message]] = deque()

    def give(self, peer: PeerId, given: Input, now: float) -> None:
        for effect in self.machines[peer].handle(given, now):
            if isinstance(effect, Send) and self.is_down:
                self.give(peer, LinkLost(effect.to), now)
            elif isinstance(effect, Send):
                self._on_the_way.append((peer, effect.to, effect.message))

    def talk(self, now: float) -> None:
        """Deliver what is on the way, and all answers to it."""
        for _ in range(100):
            if not self._on_the_way:
                return
            sender, to, message = self._on_the_way.popleft()
            self.give(to, Received(sender, message), now)
        raise AssertionError("they never have done with talking")

    def both_lead(self) -> None:
        """Both open a roster, as neither can reach the other."""
        self.is_down = True
        for peer in (FIRST, SECOND):
            self.give(peer, LinkLost(SECOND if peer == FIRST else FIRST), 1.0)
            self.give(peer, Due(), 1.0)
            self.give(peer, Offered(offer(START)), 1.0)
        assert all(rounds.open_roster for rounds in self.machines.values())
        self.is_down = False

    def leaders(self) -> set[PeerId]:
        """The leaders of the rounds that the two are in, together or each with its own roster."""
        return {
            peer if rounds.own_round is None else rounds.own_round.commit.leader
            for peer, rounds in self.machines.items()
        }


@pytest.mark.parametrize("caller", [FIRST, SECOND])
def test_two_that_both_lead_settle_it_with_the_first_call_that_gets_through(caller: PeerId) -> None:
    """Both waited for the quorum's deadline, 30 s, when their first calls had been lost."""
    two = Two()
    two.both_lead()

    now = 1.0 + POLICY.resend_s
    two.give(caller, Tick(), now)
    two.talk(now)

    assert len(two.leaders()) == 1
    assert {phase(rounds) for rounds in two.machines.values()} == {Phase.ENTERED}


@pytest.mark.parametrize("may_not_lead", [False, True])
@pytest.mark.parametrize("caller", [FIRST, SECOND])
def test_a_leader_that_is_not_followed_goes_over_itself(caller: PeerId, may_not_lead: bool) -> None:
    """The other one has joined it in vain, or does not see that it can be dialled; it is the only
    one to merge with, all the same."""
    two = Two()
    two.both_lead()
    second = two.machines[SECOND]
    if may_not_lead:
        assert isinstance(second.peers.view, dict)
        seen = second.peers.view[FIRST]
        second.peers.view[FIRST] = msgspec.structs.replace(seen, reachable=False)
    else:
        second.pacemaker.failed(FIRST, second.now)

    other = SECOND if caller == FIRST else FIRST
    for number, peer in enumerate((caller, other, caller)):
        now = 1.0 + POLICY.resend_s * (1 + number // 2)
        two.give(peer, Tick(), now)
        two.talk(now)

    assert two.leaders() == {SECOND}
    assert {phase(rounds) for rounds in two.machines.values()} == {Phase.ENTERED}


@pytest.mark.parametrize("caller", [FIRST, SECOND])
def test_two_that_have_passed_each_other_over_settle_it_with_one_more_call(caller: PeerId) -> None:
    """Each joined the other in vain while their views differed. Both then waited for the quorum's
    deadline, as neither calls again who has passed."""
    two = Two()
    two.both_lead()
    for me, other in ((FIRST, SECOND), (SECOND, FIRST)):
        two.machines[me].pacemaker.failed(other, two.machines[me].now)

    other = SECOND if caller == FIRST else FIRST
    for number, peer in enumerate((caller, other)):
        now = 1.0 + POLICY.resend_s * (1 + number)
        two.give(peer, Tick(), now)
        two.talk(now)

    assert len(two.leaders()) == 1
    assert {phase(rounds) for rounds in two.machines.values()} == {Phase.ENTERED}


def test_a_caller_that_is_not_seen_to_train_yet_is_joined_at_once() -> None:
    """A newcomer calls before the other knows that it trains. Both led for 2 s: the one that was
    called ranked itself first, and did not have the newcomer in its group."""
    two = Two()
    for me, other, seen in (
        (FIRST, SECOND, {"trains": False}),
        (SECOND, FIRST, {"reachable": False}),
    ):
        view = two.machines[me].peers.view
        assert isinstance(view, dict)
        view[other] = msgspec.structs.replace(view[other], **seen)

    two.give(FIRST, Progressed(24, 0.05, waits=True), 1.0)
    two.give(SECOND, Due(), 1.0)
    two.give(SECOND, Offered(offer(START)), 1.0)
    two.talk(1.0)
    assert phase(two.machines[FIRST]) is Phase.WANTED
    two.give(FIRST, Offered(offer(START)), 1.0)
    two.talk(1.0)

    assert len(two.leaders()) == 1
    assert {phase(rounds) for rounds in two.machines.values()} == {Phase.ENTERED}


@pytest.mark.parametrize("later", [False, True])
def test_a_member_that_leads_a_later_attempt_has_given_the_round_up(later: bool) -> None:
    """Of two, the other one waited for its upload for 36 s, and passed meanwhile."""
    two = Two()
    first = two.machines[FIRST]
    first.handle(Due(), 1.0)
    first.handle(Offered(offer(START)), 1.0)
    first.handle(Received(SECOND, signed(SECOND, join(START), leader=FIRST)), 1.0)
    assert phase(first) is Phase.ENTERED

    attempt = first.pacemaker.attempt + later
    first.handle(Received(SECOND, Call(0, START.head(), 10.0, attempt)), 2.0)

    assert (phase(first) is Phase.ENTERED) is not later


# Calls that are repeated


def called_at(rounds: FragmentRounds, now: float) -> list[PeerId]:
    effects: list[Effect] = rounds.handle(Tick(), now)
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Call)]


def gathering() -> tuple[FragmentRounds, list[PeerId]]:
    """A leader with a roster that nobody but itself has joined, and the two that it has called."""
    rounds = leading()
    rounds.handle(Due(), 1.0)
    called = sent(rounds.handle(Offered(offer(START)), 1.0))
    others = sorted(rounds.peers.view)
    assert [type(message) for message in called] == [Call, Call]
    return rounds, others


def test_a_call_is_repeated_until_it_is_answered() -> None:
    rounds, (one, other) = gathering()
    assert called_at(rounds, 1.5) == []
    assert called_at(rounds, 3.0) == [one, other]
    rounds.handle(Received(one, said.Pass(0, "not enough steps")), 3.1)
    assert called_at(rounds, 5.0) == [other]
    rounds.handle(Received(other, said.Coming(0)), 5.1)
    assert called_at(rounds, 7.0) == [other], "it says so again as long as it comes"


def test_one_that_is_called_again_is_not_waited_for_anew() -> None:
    rounds, (one, other) = gathering()
    rounds.leading.timings.quorum_took(60.0)  # so it grants no time of grace
    assert called_at(rounds, 3.0) == [one, other]
    rounds.handle(asks(one, START), 3.1)
    assert phase(rounds) is Phase.ENTERED, "the other one has had its time to answer"


def test_a_leader_that_calls_one_that_is_promised_to_it_gets_the_join_again() -> None:
    """It has given up the roster with the join, and the message that said so was lost."""
    rounds = machine(reachable=False)
    leader = joined(rounds)
    assert not sent(rounds.handle(Received(leader, said.Call(0, START.head(), 10.0)), 1.1))
    rounds.handle(Received(leader, said.Noted(0, 1)), 1.2)
    (again,) = sent(rounds.handle(Received(leader, said.Call(0, START.head(), 10.0)), 4.0))
    assert isinstance(again, Join) and again.join == 1

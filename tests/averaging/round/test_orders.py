"""A round machine and the orders of the run's owner."""

from __future__ import annotations

from dataclasses import replace

from averaging.messages import (
    Committed,
    Declined,
    Directed,
    Link,
    Refused,
    Stamp,
    decode_commit,
)
from averaging.round.interface.effects import Note, TakeSnapshot
from averaging.round.interface.inputs import (
    Due,
    LineMeasured,
    OrdersChanged,
    Progressed,
    Received,
    Tick,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level
from averaging.rules.mixing import Goal
from averaging.rules.orders import OrderBook, RoundOrders
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ANNA,
    POLICY,
    asks,
    committed,
    joined,
    leading,
    lineage,
    machine,
    of,
    sent,
    standing,
)

SEVENTH = Stamp(7, b"7" * 16)
PAUSED = RoundOrders(stamp=SEVENTH, encoded=b"seven", paused="the owner has paused it")


def following(rounds: FragmentRounds, orders: RoundOrders, now: float = 0.5) -> FragmentRounds:
    rounds.identity.book.orders = orders
    rounds.handle(OrdersChanged(), now)
    return rounds


def amending(version: int, **changes: object) -> RoundOrders:
    policy: RoundPolicy = replace(POLICY, **changes)  # type: ignore[arg-type]
    return RoundOrders(stamp=SEVENTH, encoded=b"seven", policies=((version, policy),))


def test_settings_follow_from_the_version_that_a_round_makes() -> None:
    orders = RoundOrders(
        policies=((3, replace(POLICY, codec="int8")), (5, replace(POLICY, codec="f32")))
    )
    codecs = [orders.policy_at(version, POLICY).codec for version in range(7)]
    assert codecs == ["int4"] * 3 + ["int8"] * 2 + ["f32"] * 2


def test_a_paused_machine_begins_no_round_and_goes_on_afterwards() -> None:
    rounds = following(machine(), PAUSED)
    assert not of(rounds.handle(Due(), 1.0), TakeSnapshot)
    assert not rounds.joining.wants_a_round(1.0)
    following(rounds, RoundOrders(stamp=Stamp(8, b"8" * 16), encoded=b"eight"))
    assert of(rounds.handle(Due(), 2.0), TakeSnapshot)


def test_a_pause_takes_back_what_is_not_committed_and_releases_the_work() -> None:
    rounds = machine()
    joined(rounds)
    following(rounds, PAUSED, 2.0)
    assert rounds.phase is Phase.IDLE


def test_a_paused_leader_answers_a_join_with_the_directive_and_the_reason() -> None:
    rounds = following(leading(), PAUSED)
    anna = min(rounds.peers.view)
    told = sent(rounds.handle(asks(anna, standing("start")), 1.0), anna)
    assert [type(each) for each in told] == [Directed, Refused]
    assert told[0] == Directed(0, b"seven")


def test_a_leader_sends_its_directive_ahead_of_the_commit_and_names_it() -> None:
    rounds = following(leading(), amending(1, codec="f32"))
    others = sorted(rounds.peers.view)
    rounds.handle(asks(others[0], standing("start")), 1.0)
    effects = rounds.handle(asks(others[1], standing("start")), 1.2)
    while not rounds.rounds:
        at = rounds.deadline
        assert at is not None and at < 60.0
        effects = rounds.handle(Tick(), at)
    for peer in others:
        told = sent(effects, peer)
        at_commit = next(n for n, each in enumerate(told) if isinstance(each, Committed))
        directed, commit = told[at_commit - 1 : at_commit + 1]
        assert directed == Directed(0, b"seven")
        assert isinstance(commit, Committed)
        decoded = decode_commit(commit.commit)
        assert decoded.directive == SEVENTH
        assert decoded.codec == "f32", "the amended one, from version 1 on"


def test_a_commit_under_another_directive_is_declined_and_its_leader_told() -> None:
    for orders, encoded in ((RoundOrders(), b""), (amending(10), b"seven")):
        for named in (None, Stamp(3, bytes(16)), Stamp(7, bytes(16)), Stamp(9, bytes(16))):
            if named == orders.stamp:
                continue
            rounds = following(machine(), orders)
            leader = joined(rounds)
            message = committed(rounds, leader, directive=named)
            told = sent(rounds.handle(Received(leader, message), 2.0), leader)
            assert Directed(0, encoded) in told
            (declined,) = [each for each in told if isinstance(each, Declined)]
            assert "of the run's owner; I follow" in declined.reason
            assert rounds.own_round is None


def test_a_commit_under_the_same_directive_is_entered() -> None:
    rounds = following(machine(), amending(10))
    leader = joined(rounds)
    message = committed(rounds, leader, directive=SEVENTH)
    rounds.handle(Received(leader, message), 2.0)
    assert rounds.own_round is not None


def test_a_commit_with_settings_of_another_version_is_declined() -> None:
    rounds = following(machine(), amending(1, codec="int2"))
    leader = joined(rounds)
    message = committed(rounds, leader, directive=SEVENTH)  # int4, as before version 1
    told = sent(rounds.handle(Received(leader, message), 2.0), leader)
    assert any(isinstance(each, Declined) and "codec" in each.reason for each in told)


def test_a_fragment_is_final_at_the_version_with_which_the_owner_ends_the_run() -> None:
    orders = RoundOrders(stamp=SEVENTH, encoded=b"seven", last_version=2)
    before = following(machine(standing("a", "b")), orders)
    assert not before.ending.is_final(1.0)
    at = following(machine(standing("a", "b", "c")), orders)
    assert at.ending.is_final(1.0)
    assert not of(at.handle(Due(), 1.0), TakeSnapshot)


def test_amended_tokens_end_the_run_from_their_version_on() -> None:
    where = standing("a", "b", tokens=100)  # the merged map is empty: no tokens count
    rounds = following(machine(where), amending(3, tokens_end=50))
    assert rounds.ending.goal is None, "the next version is 2"
    rounds = following(machine(where), amending(2, tokens_end=50))
    assert rounds.ending.goal == Goal(50)


def test_an_amended_cycle_holds_from_the_next_one_on() -> None:
    due = DuePolicy(cycle_steps=12, fragments=24)
    rounds = following(machine(), amending(1, due=due))
    assert rounds.pace.due_time.cycle_steps == rounds.pace.due_time.policy.cycle_steps == 12
    later = following(machine(), amending(2, due=due))
    assert later.pace.due_time.policy.cycle_steps == POLICY.due.cycle_steps


def test_a_peer_that_starts_in_an_amended_run_goes_by_the_amended_cycle_at_once() -> None:
    due = DuePolicy(cycle_steps=12, fragments=24)
    rounds = machine(standing("a", "b"), orders=amending(2, due=due))
    assert rounds.pace.due_time.cycle_steps == rounds.pace.due_time.policy.cycle_steps == 12
    assert rounds.pace.due_time.due_step == 12
    later = machine(standing("a", "b"), orders=amending(3, due=due))
    assert later.pace.due_time.due_step == POLICY.due.cycle_steps


def test_a_slow_line_at_the_start_in_a_run_amended_to_fewer_levels_asks_for_one_of_them() -> None:
    several = [
        Level(codec="int4", codec_down="int4", cycle_steps=steps) for steps in (30, 40, 50, 60)
    ]
    policy = replace(POLICY, smaller_levels=tuple(several))
    rounds = machine(policy=policy, orders=amending(1, smaller_levels=tuple(several[:1])))
    rounds.handle(Progressed(1, 1.0), 0.0)
    (noted,) = [
        note
        for note in of(rounds.handle(LineMeasured(0.1e6), 0.0), Note)
        if note.event == "line_needs"
    ]
    assert noted.fields["level"] == "int4 every 30 steps"


def test_an_attested_link_needs_no_signature() -> None:
    rounds = machine()
    there = Link(5, lineage("there"), 500)
    assert not rounds.certificates.is_certified(there, 1.0)
    orders = RoundOrders(stamp=SEVENTH, attested={(0, 5, lineage("there")): b"digest"})
    following(rounds, orders)
    assert rounds.certificates.is_certified(there, 1.0)
    for other in (Link(6, lineage("there"), 500), Link(5, lineage("elsewhere"), 500)):
        assert not rounds.certificates.is_certified(other, 1.0)
    rounds.identity.book.orders = RoundOrders(
        attested={(1, 5, lineage("there")): b"of another fragment"}
    )
    assert not rounds.certificates.is_certified(there, 1.0)


def test_a_peer_that_asks_again_and_again_is_answered_now_and_then() -> None:
    book = OrderBook()
    assert not book.may_answer(ANNA, 0.0), "there is no directive"
    book.orders = amending(1)
    assert [book.may_answer(ANNA, at) for at in (0.0, 0.1, 1.9, 2.0, 2.1)] == [
        *(True, False, False, True, False)
    ]
    assert book.may_answer(PeerId("boris"), 2.1)


def test_each_peer_is_told_of_a_directive_once() -> None:
    book = OrderBook()
    assert not book.must_tell(ANNA), "a run without an owner says nothing"
    book.orders = amending(1)
    assert book.must_tell(ANNA) and book.must_tell(PeerId("boris"))
    assert not book.must_tell(ANNA)
    book.orders = RoundOrders(stamp=Stamp(8, bytes(16)), encoded=b"eight")
    assert book.must_tell(ANNA)

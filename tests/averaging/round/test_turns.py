"""The turns of fragments at a peer where more want a round than may be under way."""

from __future__ import annotations

from averaging import messages as said
from averaging.round.interface.effects import TakeSnapshot
from averaging.round.interface.inputs import Due, GiveWay, Offered, Progressed, Received
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.turns import Turns, holder_that_gives_way, rank
from tests.averaging.round.machines import ANNA, machine, offer, standing


def fragment(index: int, *rounds_done: str) -> FragmentRounds:
    """A machine that has been through these rounds and is due."""
    rounds = machine(standing("start", *rounds_done), fragment=index)
    rounds.handle(Progressed(1000, 1.0, waits=True), 0.0)
    return rounds


def always(index: int) -> bool:
    return True


def call(rounds: FragmentRounds, now: float) -> None:
    assert rounds.standing is not None
    rounds.handle(Received(ANNA, said.Call(rounds.fragment, rounds.standing.head(), 10.0)), now)


def test_the_one_with_the_fewest_versions_goes_first_then_the_first_in_number() -> None:
    ahead, behind, beside = fragment(0, "one"), fragment(2), fragment(1)
    turns = Turns()
    for rounds in (ahead, behind, beside):
        assert turns.turn_away(rounds)
    order = [turns.next(1.0, is_free=always) for _ in range(4)]
    assert order == [beside, behind, ahead, None]
    assert not turns


def test_a_fragment_that_waits_already_is_not_reported_again() -> None:
    turns, rounds = Turns(), fragment(0)
    assert turns.turn_away(rounds)
    assert not turns.turn_away(rounds)
    assert 0 in turns and 1 not in turns


def test_a_fragment_that_wants_no_round_any_more_loses_its_turn() -> None:
    turns, closed, due = Turns(), fragment(0), fragment(1)
    for rounds in (closed, due):
        turns.turn_away(rounds)
    closed.pace.due_time.closed(closed.pace.step, 24)
    assert turns.next(1.0, is_free=always) is due
    assert not turns


def test_a_called_fragment_has_its_turn_as_long_as_the_caller_waits() -> None:
    for at, comes in ((5.0, True), (15.0, False)):
        turns, called = Turns(), fragment(0)
        call(called, 1.0)
        called.handle(GiveWay("no place"), 1.0)
        called.pace.due_time.attempt_failed(called.pace.step, 24)
        turns.turn_away(called)
        assert (turns.next(at, is_free=always) is called) == comes


def test_a_fragment_that_is_not_free_waits_on() -> None:
    turns, busy, free = Turns(), fragment(0), fragment(1)
    for rounds in (busy, free):
        turns.turn_away(rounds)
    assert turns.next(1.0, is_free=lambda index: index == 1) is free
    assert turns.next(1.0, is_free=lambda index: index == 1) is None
    assert turns.next(1.0, is_free=always) is busy


def test_the_last_in_order_gives_way_to_one_that_is_called_and_goes_before_it() -> None:
    called, second, last = fragment(0), fragment(1), fragment(2)
    for rounds in (second, last):
        rounds.handle(Due(), 1.0)
        rounds.handle(Offered(offer(standing("start"), mark=1000)), 1.0)
        assert rounds.phase is Phase.JOINING
    assert holder_that_gives_way(called, [second, last], 1.0) is None, "no leader waits for it"
    call(called, 1.0)
    assert holder_that_gives_way(called, [second, last], 1.0) is last
    assert holder_that_gives_way(called, [second, last], 20.0) is None, (
        "nobody waits for it any more"
    )

    call(last, 1.0)
    assert rank(last) > rank(second)
    assert holder_that_gives_way(last, [second], 1.0) is None, "it goes after the other one"


def test_no_fragment_gives_way_once_its_round_is_committed() -> None:
    called, entered = fragment(0), fragment(1)
    call(called, 1.0)
    entered.phase = Phase.ENTERED
    assert holder_that_gives_way(called, [entered], 1.0) is None


def test_a_fragment_that_gives_way_takes_its_join_back_and_stays_due() -> None:
    rounds = fragment(0)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"), mark=1000)), 1.0)
    rounds.handle(GiveWay("another goes first"), 1.1)
    assert rounds.phase is Phase.IDLE
    assert rounds.open_roster is None
    assert rounds.joining.wants_a_round(1.2)
    assert any(isinstance(effect, TakeSnapshot) for effect in rounds.handle(Due(), 1.2))


def test_a_call_that_was_answered_by_a_closed_roster_is_over() -> None:
    rounds = fragment(0)
    call(rounds, 1.0)
    rounds.handle(GiveWay("no place"), 1.0)
    rounds.pace.due_time.closed(rounds.pace.step, 24)
    assert rounds.joining.wants_a_round(1.1)
    rounds.handle(Received(ANNA, said.Closed(0, 1, b"r" * 32)), 1.2)
    assert not rounds.joining.wants_a_round(1.3)

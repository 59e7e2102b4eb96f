"""A peer that has ended shows the others where it stands."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from averaging.history.merged_map import MergedMap
from averaging.history.standing import Standing
from averaging.messages import Compare, Stamp
from averaging.round.interface.effects import Rebase, Send
from averaging.round.interface.inputs import LastRoundOver, OrdersChanged, Received, Tick
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.ending import TELL_AGAIN_S, TELL_EVERY_S
from averaging.rules.orders import RoundOrders
from dht.identity import PeerId
from tests.averaging.round.machines import ANNA, BORIS, POLICY, certified, machine, standing

ENDS = replace(POLICY, tokens_end=200)


def merged(*names: str, tokens: int) -> Standing:
    """A standing with these tokens at each version, of one peer."""
    work = MergedMap().with_work(ANNA, 1, 10, tokens * (len(names) - 1))
    return replace(standing(*names, tokens=tokens), merged=work)


MINE = merged("start", "mine", tokens=200)
HEAVIER = merged("start", "theirs", tokens=220)
GOES_ON = merged("start", "mine", tokens=199)


def told(rounds: FragmentRounds, *, until: float) -> list[tuple[float, PeerId]]:
    """The times at which the machine tells others where it stands, and whom, if it gets a tick
    whenever it wants one."""
    times: list[tuple[float, PeerId]] = []
    while (at := rounds.deadline) is not None and at <= until:
        effects = rounds.handle(Tick(), at)
        times += [
            (at, each.to)
            for each in effects
            if isinstance(each, Send) and isinstance(each.message, Compare)
        ]
    return times


def test_a_peer_that_has_ended_tells_others_in_turn_until_each_has_shown_the_same() -> None:
    rounds = machine(MINE, policy=ENDS)
    view = rounds.peers.view
    rounds.peers.view = {
        peer: msgspec.structs.replace(seen, heard_at=9e9) for peer, seen in view.items()
    }
    rounds.handle(Tick(), 0.0)
    first, second = TELL_EVERY_S, 2 * TELL_EVERY_S
    assert told(rounds, until=5.0) == [(first, ANNA), (second, BORIS)]

    rounds.handle(Received(ANNA, Compare(0, certified(MINE))), 5.0)
    again = told(rounds, until=2.2 * TELL_AGAIN_S)
    assert {peer for _, peer in again} == {BORIS}
    assert all(at - second >= TELL_AGAIN_S for at, _ in again)

    rounds.handle(Received(BORIS, Compare(0, certified(MINE))), 2.2 * TELL_AGAIN_S)
    assert told(rounds, until=9 * TELL_AGAIN_S) == []


def test_a_peer_that_goes_on_tells_nobody() -> None:
    rounds = machine(GOES_ON, policy=ENDS)
    rounds.handle(Tick(), 0.0)
    assert told(rounds, until=100.0) == []


def test_of_two_that_have_ended_apart_the_lighter_takes_the_state_of_the_other() -> None:
    """Both have the run's tokens, and comparable weight; nobody joins a round to mix them."""
    light, heavy = machine(MINE, policy=ENDS), machine(HEAVIER, policy=ENDS)

    effects = heavy.handle(Received(ANNA, Compare(0, certified(MINE))), 1.0)
    (answer,) = [each for each in effects if isinstance(each, Send)]
    assert answer.to == ANNA and answer.message.head.lineage == HEAVIER.lineage  # type: ignore[union-attr]

    effects = light.handle(Received(ANNA, Compare(0, certified(HEAVIER))), 1.0)
    (rebase,) = [each for each in effects if isinstance(each, Rebase)]
    assert (rebase.source, rebase.lineage) == (ANNA, HEAVIER.lineage)


def test_a_peer_that_has_ended_gives_way_to_none_that_goes_on() -> None:
    mine = merged("start", "mine", tokens=200)
    other = merged("start", "theirs", tokens=199)
    rounds = machine(mine, policy=ENDS)
    effects = rounds.handle(Received(ANNA, Compare(0, certified(other))), 1.0)
    assert not [each for each in effects if isinstance(each, Rebase)]


def test_after_the_last_round_of_a_run_with_a_date_the_lighter_state_gives_way() -> None:
    """The heavier state may have fewer tokens: with more peers than a roster holds several groups
    make a last one."""
    rounds = machine(MINE)
    heavier = Received(ANNA, Compare(0, certified(HEAVIER)))
    assert not [each for each in rounds.handle(heavier, 1.0) if isinstance(each, Rebase)]
    assert told(rounds, until=9.0) == [] and not rounds.ending.is_final(9.0)

    rounds.handle(LastRoundOver(), 10.0)

    assert rounds.ending.is_final(10.0)
    assert told(rounds, until=10.0 + TELL_EVERY_S) == [(10.0 + TELL_EVERY_S, ANNA)]
    (rebase,) = [each for each in rounds.handle(heavier, 12.0) if isinstance(each, Rebase)]
    assert rebase.lineage == HEAVIER.lineage


def ordered_to_end_at(version: int, rounds: FragmentRounds) -> FragmentRounds:
    orders = RoundOrders(stamp=Stamp(1, bytes(16)), encoded=b"first", last_version=version)
    rounds.identity.book.orders = orders
    rounds.handle(OrdersChanged(), 0.5)
    return rounds


def test_a_peer_at_the_version_where_the_owner_ends_the_run_tells_the_others() -> None:
    before = ordered_to_end_at(2, machine(MINE))
    assert told(before, until=20.0) == [] and not before.ending.is_final(20.0)
    at = ordered_to_end_at(1, machine(MINE))
    assert told(at, until=0.5 + TELL_EVERY_S) == [(0.5 + TELL_EVERY_S, ANNA)]


def test_of_two_sides_at_the_last_version_the_lighter_takes_the_state_of_the_other() -> None:
    light = ordered_to_end_at(1, machine(MINE))
    effects = light.handle(Received(ANNA, Compare(0, certified(HEAVIER))), 1.0)
    (rebase,) = [each for each in effects if isinstance(each, Rebase)]
    assert rebase.lineage == HEAVIER.lineage


def test_a_peer_before_the_last_version_takes_a_state_of_that_version_whatever_its_tokens() -> None:
    """The peer's side may have too few peers for a quorum, and nobody at the end joins its
    rounds."""
    ended = merged("start", "theirs", "last", tokens=50)
    early = ordered_to_end_at(2, machine(MINE))
    effects = early.handle(Received(ANNA, Compare(0, certified(ended))), 1.0)
    (rebase,) = [each for each in effects if isinstance(each, Rebase)]
    assert rebase.lineage == ended.lineage

    late = ordered_to_end_at(2, machine(ended))
    assert not [
        each
        for each in late.handle(Received(ANNA, Compare(0, certified(MINE))), 1.0)
        if isinstance(each, Rebase)
    ]


def test_a_final_state_that_too_few_have_signed_gives_way_after_a_while_though_it_outranks() -> (
    None
):
    """No other peer can take it, so that its holder would stay alone with it for good."""
    shown = Received(ANNA, Compare(0, certified(MINE)))
    for others_sign in (False, True):
        rounds = machine(HEAVIER, policy=ENDS)
        if others_sign:
            rounds.handle(Received(ANNA, Compare(0, certified(HEAVIER))), 0.5)
        rebases = {
            at: [each for each in rounds.handle(shown, at) if isinstance(each, Rebase)]
            for at in (1.0, 0.9 + ENDS.round_s, 1.0 + ENDS.round_s)
        }
        assert not rebases[1.0] and not rebases[0.9 + ENDS.round_s]
        gave_way = [each.gives_way for each in rebases[1.0 + ENDS.round_s]]
        assert gave_way == ([] if others_sign else [True])

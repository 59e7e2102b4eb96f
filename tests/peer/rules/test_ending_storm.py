"""Peers of a run that all end at once, in every order: no token is lost, and nobody stays."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from peer.rules import ending
from peer.rules.ending import IN_THE_RUN, LEAVES, Do, Export, State
from tests.peer.rules.ending_world import FRAGMENTS, Peer, World
from tests.seeds import all_that_happens

SEEDS = 600
"""Storms of every run of the tests: 5 s of processor time."""

EVENINGS = 100
DISTURBED = ("crash", "cut", "taken back")


def storm(seed: int) -> Counter[str]:
    """One storm. Returns what happened in it, and the ways that its endings went."""
    world = World(seed)
    world.run()
    for peer in world.peers:
        check_tokens(peer)
        if peer.crashed_at is None:
            check_it_ended_in_order(peer)
    check_the_final_model(world)
    check_that_work_was_handed_over(world)
    ways = [f"{before} -> {after}" for peer in world.peers for before, after in peer.ending.went]
    return world.events + Counter(ways)


def check_tokens(peer: Peer) -> None:
    """Each token is merged or pending, and what was told of pending ones is true."""
    for fragment in range(FRAGMENTS):
        assert 0 <= peer.pending(fragment) <= peer.trained, peer
    for told in peer.told("last_offers"):
        assert told.fields["merged"] == (told.fields["tokens"] == 0)


def check_it_ended_in_order(peer: Peer) -> None:
    departure = peer.ending.departure
    assert peer.ending.state is State.GONE and departure is not None, peer
    last = peer.done[peer.done.index(Do.STOP) + 1 :]
    exports = [each for each in last if isinstance(each, Export)]
    assert len(exports) == departure.finished, "the final model, once, and of a run that is over"
    assert last == [Do.SAVE, *exports, Do.GOODBYE]
    assert not departure.finished or peer.exported == peer.states


def check_the_final_model(world: World) -> None:
    """All that stayed to the end have one final model, unless they said that they have not."""
    if world.events["cut"] or (world.events["taken back"] and world.date is not None):
        return  # whoever has ended by its date does not begin again
    models = {
        peer.exported[0].epoch: peer.exported
        for peer in world.peers
        if can_have_it(peer) and peer.exported is not None
    }
    for peer in world.peers:
        if can_have_it(peer) and peer.exported is not None:
            assert peer.exported == models[peer.exported[0].epoch], world.peers


def can_have_it(peer: Peer) -> bool:
    hurried = any(after is State.CUT_SHORT for _, after in peer.ending.went)
    is_apart = peer.told("left_apart") or peer.skew_s > 1.0
    return peer.crashed_at is None and not hurried and not is_apart


def check_that_work_was_handed_over(world: World) -> None:
    """Merged work of a peer that had time to leave is at another one that is there."""
    if any(world.events[name] for name in DISTURBED):
        return
    for peer in world.peers:
        if can_have_it(peer):
            assert peer.taken_over is not False, peer


def ways_in_the_table() -> set[str]:
    """The ways from state to state that the docstring of ``peer.rules.ending`` has."""
    rows = re.findall(r"^    (\S.*?) +-> (\w+(?: \w+)?)", ending.__doc__ or "", re.M)
    groups = {"IN_THE_RUN": IN_THE_RUN, "LEAVES": LEAVES}
    return {
        f"{before} -> {State(after)}"
        for named, after in rows
        for before in groups.get(named) or [State(named)]
    }


def test_peers_that_all_end_at_once_lose_nothing_and_end_with_one_model() -> None:
    happened = all_that_happens(storm, first=0, count=SEEDS)
    assert {way for way in happened if "->" in way} == ways_in_the_table()
    told = {"last_round", "last_offers", "handing_over", "left_apart", "ended_here"}
    assert told | {"drain_cut_short", *DISTURBED} <= happened.keys()


def test_peers_that_leave_at_the_same_moment_have_one_model_with_the_work_of_all() -> None:
    """Of five that left at once three kept other models than the last."""
    for seed in range(EVENINGS):
        world = World(seed, evening=True)
        world.run()
        models = {peer.model for peer in world.peers if peer.has_state}
        pending = [peer.pending(fragment) for peer in world.peers for fragment in range(FRAGMENTS)]
        assert len(models) == 1 and not any(pending), f"seed {seed}: {world.peers}"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS, 100_000, 200))
def test_they_do_so_in_many_more_orders(first: int) -> None:
    all_that_happens(storm, first=first, count=200)

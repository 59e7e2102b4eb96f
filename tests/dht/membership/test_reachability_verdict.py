"""The verdict whether a peer can be dialled, from the results of dials."""

from dht.addresses import Scope
from dht.identity import Identity, PeerId
from dht.membership.reachability import Reachability


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


HERE = frozenset({"/ip4/203.0.113.7/tcp/1"})
THERE = frozenset({"/ip4/203.0.113.8/tcp/1"})


def verdict(state: Reachability) -> bool | None:
    return state.reachable


def test_one_connection_proves_it_and_two_helpers_disprove_it() -> None:
    state = Reachability()
    assert state.announce(HERE, now=0.0)
    assert not state.announce(HERE, now=1.0)
    assert state.due_at == 0.0
    state.asked(now=1.0)
    assert state.due_at == 6.0

    assert not state.denied(peer(1), "silence", others=3, now=2.0)
    assert verdict(state) is None
    assert not state.denied(peer(1), "silence", others=3, now=3.0), "the same helper twice"
    assert state.denied(peer(2), "silence", others=3, now=4.0)
    assert verdict(state) is False and state.settled and state.due_at == 124.0

    assert state.confirmed(peer(3), now=124.0)
    assert verdict(state) is True and state.due_at == 724.0
    assert not state.confirmed(peer(3), now=724.0), "no news"


def test_the_only_helper_has_to_say_it_twice() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    assert not state.denied(peer(1), "silence", others=0, now=0.0)
    assert state.denied(peer(1), "silence", others=0, now=5.0)


def test_one_of_several_helpers_has_to_say_it_four_times_while_the_others_cannot_dial() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    for at in range(3):
        assert not state.denied(peer(1), "silence", others=1, now=5.0 * at)
        state.not_tried("it was connected already", scope=Scope.INTERNET)
    assert verdict(state) is None
    assert state.denied(peer(1), "silence", others=1, now=15.0)
    assert verdict(state) is False


def test_a_confirmation_wipes_out_doubts() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    state.denied(peer(1), "silence", others=3, now=0.0)
    state.confirmed(peer(2), now=1.0)
    assert not state.denied(peer(3), "silence", others=3, now=601.0)
    assert verdict(state) is True
    assert state.due_at == 606.0, "a doubt is looked into soon"


def test_new_addresses_are_looked_at_at_once_and_the_old_verdict_stands_meanwhile() -> None:
    state = Reachability()
    state.announce(HERE, now=0.0)
    state.confirmed(peer(1), now=0.0)
    assert state.announce(THERE, now=50.0)
    assert state.due_at == 50.0 and verdict(state) is True and not state.settled


def test_without_a_direct_address_nobody_has_to_be_asked() -> None:
    state = Reachability()
    assert state.announce(frozenset(), now=0.0)
    assert verdict(state) is False and state.settled

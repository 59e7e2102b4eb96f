from __future__ import annotations

from averaging.rules.peer_view import PeerView
from averaging.rules.sources import sources_in_turn, with_first
from dht.identity import PeerId

ME = PeerId("me")
PEERS = [PeerId(f"peer {number}") for number in range(12)]
VIEW = PeerView(first_seen=0.0, heard_at=0.0)
HIDDEN = PeerView(first_seen=0.0, heard_at=0.0, reachable=False)


def test_established_peers_are_asked_first_and_dialable_ones_among_equals() -> None:
    live = {peer: HIDDEN if number % 2 else VIEW for number, peer in enumerate(PEERS)} | {ME: VIEW}
    established = set(PEERS[:4])
    order = sources_in_turn(ME, 0, live, established.__contains__)
    assert set(order) == set(PEERS)
    assert set(order[:2]) == {PEERS[0], PEERS[2]} and set(order[2:4]) == {PEERS[1], PEERS[3]}
    assert all(live[peer].reachable for peer in order[4:8])


def test_each_peer_has_an_order_of_its_own_for_each_fragment() -> None:
    live = dict.fromkeys(PEERS, VIEW)
    orders = {
        tuple(sources_in_turn(me, fragment, live, lambda peer: True))
        for me in (ME, PeerId("you"))
        for fragment in (0, 1)
    }
    assert len(orders) == 4


def test_the_peer_that_is_said_to_have_the_state_comes_first_if_it_is_established() -> None:
    live = dict.fromkeys(PEERS, VIEW)
    in_turn = sources_in_turn(ME, 0, live, lambda peer: True)
    order = with_first(in_turn, PEERS[3], lambda peer: True, asked_max=8)
    assert order == [PEERS[3], *(peer for peer in in_turn if peer != PEERS[3])]


def test_a_newcomer_that_is_said_to_have_the_state_comes_after_established_peers() -> None:
    for count, place in ((2, 2), (11, 7)):
        established = set(PEERS[:count]).__contains__
        in_turn = sources_in_turn(ME, 0, dict.fromkeys(PEERS, VIEW), established)
        order = with_first(in_turn, PEERS[11], established, asked_max=8)
        assert order.index(PEERS[11]) == place
        assert sorted(order) == sorted(PEERS)


def test_a_peer_without_a_view_may_be_said_to_have_the_state() -> None:
    assert with_first([], ME, lambda peer: False, asked_max=8) == [ME]

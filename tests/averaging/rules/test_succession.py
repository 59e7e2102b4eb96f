"""The succession of leaders: which peers may lead a round, and in which order."""

from collections import Counter
from typing import Any

from averaging.rules.peer_view import PeerView
from averaging.rules.succession import leaders, sources_in_turn, succession, with_first
from dht.identity import PeerId
from tests.averaging.values import peers, seen

TOPIC = bytes(16)


def test_succession_keeps_its_order_when_somebody_leaves() -> None:
    everybody = peers(9)
    ranked = succession(everybody, topic=TOPIC, fragment=2, version=5)

    without = succession(
        [peer for peer in everybody if peer != ranked[0]], topic=TOPIC, fragment=2, version=5
    )

    assert without == ranked[1:]


def test_leadership_rotates() -> None:
    first = Counter(
        succession(peers(4), topic=TOPIC, fragment=0, version=version)[0] for version in range(200)
    )

    assert min(first.values()) > 25


def lead(view: dict[PeerId, PeerView], **me: Any) -> set[PeerId]:
    group = (PeerId("me"), *(peer for peer in view if view[peer].trains))
    own = seen(**me)
    return set(leaders(group, view, me=PeerId("me"), own=own, left_out=(), now=1000.0))


ANNA, BORIS, KEEPER = PeerId("anna"), PeerId("boris"), PeerId("keeper")


def test_the_established_lead_before_the_young() -> None:
    view = {ANNA: seen(), BORIS: seen(since=3.0)}

    assert lead(view) == {ANNA, "me"}
    assert lead(view, since=3.0) == {ANNA}


def test_in_a_young_swarm_any_reachable_peer_leads() -> None:
    view = {ANNA: seen(since=3.0), BORIS: seen(since=3.0, reachable=False)}

    assert lead(view, since=3.0) == {ANNA, "me"}


def test_a_peer_that_only_dials_out_never_leads() -> None:
    view = {ANNA: seen(), BORIS: seen(reachable=False)}

    assert lead(view, reachable=False) == {ANNA}


def test_a_group_that_nobody_can_reach_borrows_a_leader() -> None:
    view = {ANNA: seen(reachable=False), KEEPER: seen(trains=False)}

    assert lead(view, reachable=False) == {KEEPER}
    assert lead({ANNA: seen(reachable=False)}, reachable=False) == set()


def test_newcomers_lead_where_nobody_that_counts_can() -> None:
    view, group = {ANNA: seen(), BORIS: seen()}, (ANNA, BORIS)
    facts: dict[str, Any] = {"me": PeerId("me"), "own": seen(), "newcomers": {BORIS}}
    facts["now"] = 1000.0

    assert leaders(group, view, left_out=(), **facts) == (ANNA,)
    assert leaders(group, view, left_out={ANNA}, **facts) == (BORIS,)


def test_a_peer_on_a_slow_line_does_not_lead() -> None:
    clara = PeerId("clara")
    view = {
        ANNA: seen(bytes_per_s=6e6),
        BORIS: seen(bytes_per_s=1.4e6),
        clara: seen(bytes_per_s=None),
    }

    assert lead(view, bytes_per_s=5.7e6) == {ANNA, clara, "me"}
    assert lead(view, bytes_per_s=5.5e6) == {ANNA, BORIS, clara, "me"}
    assert lead(view, bytes_per_s=1.3e6) == {ANNA, BORIS, clara, "me"}, "the median is slow itself"
    assert lead(view, bytes_per_s=0.3e6) == {ANNA, BORIS, clara}
    assert lead(view, bytes_per_s=0.0) == {ANNA, BORIS, clara, "me"}


def test_one_that_claims_an_absurd_line_leads_beside_the_others() -> None:
    view = {ANNA: seen(bytes_per_s=1e15), BORIS: seen(bytes_per_s=4e6)}

    assert lead(view, reachable=False) == {ANNA, BORIS}
    assert lead(view, bytes_per_s=3e6) == {ANNA, BORIS, "me"}


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

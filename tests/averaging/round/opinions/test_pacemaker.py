"""The pacemaker: peers whose opinions differ come to one leader."""

from __future__ import annotations

import msgspec
import pytest

from averaging import messages as said
from averaging.messages import Head
from averaging.round.interface.identity import Circumstances
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pacemaker import AHEAD_MAX, MOVES_MAX, Claim, Pacemaker
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.message_examples import EXAMPLES
from tests.averaging.round.machines import ANNA, BORIS, ME, identity, ranked, standing

PEERS = tuple(PeerId(name) for name in ("anna", "boris", "clara", "dora"))
JOIN = next(message for message in EXAMPLES if isinstance(message, said.Join))
HEAD = standing("start").head()


def pacemaker(
    me: PeerId = ME,
    others: tuple[PeerId, ...] = (ANNA, BORIS),
    *,
    began: float = 0.0,
    reachable: bool = True,
) -> Pacemaker:
    """That of a peer that has seen the others since 0 s and takes part since ``began``."""
    view = {peer: PeerView(first_seen=0.0, heard_at=40.0) for peer in others if peer != me}
    who = identity(me)
    return Pacemaker(who, Neighbourhood(who, Circumstances(reachable=reachable), view, now=began))


def passed_over(*peers: PeerId, reachable: bool = True) -> Pacemaker:
    """That of a peer with which joins with these have failed again and again."""
    made = pacemaker(reachable=reachable)
    for peer in peers:
        assert made.failed(peer, 40.0) == 1
    return made


def first_of(made: Pacemaker, head: Head = HEAD) -> PeerId | None:
    return made.leader(head, 40.0)


def test_a_leader_that_comes_to_nothing_is_followed_by_that_of_a_later_attempt() -> None:
    made = pacemaker(reachable=False)
    first = first_of(made)
    assert first is not None and made.attempt == 0
    made.failed(first, 40.0)
    assert made.leader(HEAD, 40.0) in {ANNA, BORIS} - {first}
    assert made.attempt >= 1


def test_each_attempt_has_an_order_of_its_own_and_each_version_begins_anew() -> None:
    made, order = pacemaker(reachable=False), []
    for _ in range(20):
        order.append(first_of(made))
        made.failed(PeerId("nobody"), 40.0)
    assert set(order) == {ANNA, BORIS}
    made.next_version()
    assert made.attempt == 0 and first_of(made) == ranked((ANNA, BORIS), HEAD)[0]


def test_the_higher_attempt_leads_and_of_one_attempt_the_first_in_rank() -> None:
    made = pacemaker()
    first, second = ranked((ANNA, BORIS), HEAD)
    assert made.outranks(Claim(0, first), Claim(0, second), HEAD, HEAD, 40.0)
    assert not made.outranks(Claim(0, second), Claim(0, first), HEAD, HEAD, 40.0)
    assert made.outranks(Claim(1, second), Claim(0, first), HEAD, HEAD, 40.0)
    elsewhere = standing("start", "next").head()
    by_name = made.outranks(Claim(5, first), Claim(0, second), HEAD, elsewhere, 40.0)
    assert by_name == made.outranks(Claim(0, first), Claim(5, second), HEAD, elsewhere, 40.0)


def test_a_peer_with_a_leader_is_moved_by_one_other_a_few_times_at_each_version() -> None:
    made = pacemaker()
    assert not made.moves(AHEAD_MAX + 1, ANNA, 40.0)
    assert [made.moves(number, ANNA, 40.0) for number in range(1, 6)] == [
        number <= MOVES_MAX for number in range(1, 6)
    ]
    assert made.moves(MOVES_MAX + 1, BORIS, 40.0)
    made.next_version()
    assert made.moves(1, ANNA, 40.0)


def test_a_leader_that_was_passed_over_is_asked_again_at_another_version() -> None:
    made = passed_over(ANNA, reachable=False)
    assert first_of(made) == BORIS
    made.next_version()
    heads = [msgspec.structs.replace(HEAD, version=version) for version in range(1, 20)]
    assert ANNA in {first_of(made, head) for head in heads}


def test_a_leader_that_goes_on_wasting_joins_is_passed_over_for_longer_until_it_leads_a_round() -> (
    None
):
    made = pacemaker()
    assert [made.failed(ANNA, 40.0) for _ in range(6)] == [1, 2, 4, 8, 16, 16]
    made.led_to_version(ANNA)
    assert made.failed(ANNA, 40.0) == 1
    assert made.shuns(ANNA, HEAD, 40.0)
    made.next_version()
    assert not made.shuns(ANNA, HEAD, 40.0)


def test_a_peer_that_leads_in_vain_passes_nobody_over_any_more() -> None:
    made = passed_over(ANNA, BORIS)
    made.led_to_version(BORIS)
    assert made.shuns(ANNA, HEAD, 40.0)
    made.failed(ME, 40.0)
    assert not made.shuns(ANNA, HEAD, 40.0)


def test_when_all_leaders_were_passed_over_all_are_asked_again() -> None:
    assert first_of(passed_over(ANNA, BORIS, reachable=False)) in (ANNA, BORIS)


@pytest.mark.parametrize("others", [(ANNA,), (ANNA, BORIS)])
def test_of_two_neither_is_passed_over_as_there_is_nobody_else(others: tuple[PeerId, ...]) -> None:
    made = pacemaker(others=others)
    made.failed(ANNA, 40.0)
    assert made.shuns(ANNA, HEAD, 40.0) == (len(others) > 1)


def test_a_peer_that_only_dials_out_finds_a_leader_whatever_group_it_is_dealt_into() -> None:
    others = [PeerId(f"peer {number}") for number in range(7)]
    view = {
        peer: PeerView(first_seen=0.0, heard_at=40.0, reachable=number < 2)
        for number, peer in enumerate(others)
    }
    me, policy = PeerId("me"), RoundPolicy(group_size=4)
    who = identity(me, policy)
    peers = Neighbourhood(who, Circumstances(reachable=False), view, now=0.0)
    made = Pacemaker(who, peers)
    without = 0
    for version in range(20):
        head = msgspec.structs.replace(JOIN.head, version=version)
        group = peers.group(me, version, 40.0)
        without += not any(view[peer].reachable for peer in group if peer != me)
        assert made.leader(head, 40.0) in others[:2]
    assert without, "each group has somebody who can be dialled"


@pytest.mark.parametrize("version", range(12))
def test_peers_that_took_part_some_time_after_they_met_send_no_joiner_to_and_fro(
    version: int,
) -> None:
    """Each saw the others for long enough to count as established, and took part for less."""
    makers = {peer: pacemaker(peer, PEERS, began=35.0) for peer in PEERS}
    head = msgspec.structs.replace(HEAD, version=version)
    for joiner in PEERS:
        join = msgspec.structs.replace(JOIN, head=head, attempt=0)
        leader, asked = makers[joiner].leader(head, 40.0), list[PeerId]()
        while leader is not None and leader != joiner and leader not in asked:
            asked.append(leader)
            claim = makers[leader].leader_for(joiner, join, 40.0)
            if claim.leader == leader:
                break
            join, leader = msgspec.structs.replace(join, attempt=claim.attempt), claim.leader
        else:
            assert leader == joiner, (joiner, asked)

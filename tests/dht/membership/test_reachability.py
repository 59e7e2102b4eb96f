"""Conclusions from dials: the rules of ``dht.membership.reachability``, and the scopes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from multiaddr import Multiaddr

from dht.addresses import (
    Scope,
    pack,
    parse,
    scope_guessed,
    scope_of,
    scope_seen,
    with_ip,
)
from dht.identity import Identity, PeerId, RunId
from dht.membership.reachability import NO_ADDRESS, Proximity, Reachability, scope_that_counts
from dht.membership.table import Member
from dht.records import PeerRecord

PUBLIC = "/ip4/11.77.0.1/tcp/7700"
OTHER_PUBLIC = "/ip4/11.77.0.2/tcp/7700"
HOME = "/ip4/192.168.1.5/tcp/7700"
LOOPBACK = "/ip4/127.0.0.1/tcp/7700"
RELAY = Identity.from_seed(b"r" * 32).peer_id


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def announcing(*addresses: str, scope: Scope | None = Scope.INTERNET) -> Reachability:
    state = Reachability(scope=scope)
    state.announce(frozenset(addresses), now=0.0)
    return state


# --- how far away an address is ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        (PUBLIC, Scope.INTERNET),
        ("/ip6/2606:4700::1/tcp/1", Scope.INTERNET),
        ("/dns4/seed.example.org/tcp/1", Scope.INTERNET),
        (HOME, Scope.NETWORK),
        ("/ip4/10.1.2.3/tcp/1", Scope.NETWORK),
        ("/ip4/172.17.0.2/tcp/1", Scope.NETWORK),
        ("/ip4/100.64.0.9/tcp/1", Scope.NETWORK),
        ("/ip4/169.254.3.4/tcp/1", Scope.NETWORK),
        ("/ip6/fe80::1/tcp/1", Scope.NETWORK),
        ("/ip6/fd00::1/tcp/1", Scope.NETWORK),
        ("/ip6/::ffff:10.0.0.1/tcp/1", Scope.NETWORK),
        ("/dns4/printer.local/tcp/1", Scope.NETWORK),
        (LOOPBACK, Scope.MACHINE),
        ("/ip6/::1/tcp/1", Scope.MACHINE),
        ("/dns4/localhost/tcp/1", Scope.MACHINE),
        (f"{PUBLIC}/p2p/{RELAY}/p2p-circuit", Scope.INTERNET),
    ],
)
def test_an_address_has_the_scope_of_its_range(address: str, scope: Scope) -> None:
    assert scope_of(parse(address)) is scope


@pytest.mark.parametrize(
    ("remote", "scope"),
    [
        (OTHER_PUBLIC, Scope.INTERNET),
        ("/ip4/11.77.0.1/tcp/50123", Scope.MACHINE),
        ("/ip4/192.168.1.9/tcp/1", Scope.NETWORK),
        ("/ip4/192.168.1.5/tcp/1", Scope.MACHINE),
        ("/ip6/2606:4700::9/tcp/1", Scope.NETWORK),
        ("/ip6/2606:4700:0:1::9/tcp/1", Scope.INTERNET),
    ],
)
def test_a_peer_with_our_own_address_or_on_our_link_is_no_outsider(
    remote: str, scope: Scope
) -> None:
    own = tuple(map(parse, (PUBLIC, HOME, "/ip6/2606:4700::5/tcp/7700")))
    assert scope_seen(parse(remote), own) is scope


def test_a_peer_that_was_never_connected_lives_where_its_addresses_say() -> None:
    own = (parse(HOME),)

    def guess(*announced: str) -> Scope | None:
        return scope_guessed(tuple(map(parse, announced)), own)

    assert guess() is None
    assert guess(LOOPBACK) is Scope.MACHINE
    assert guess(LOOPBACK, "/ip4/192.168.1.9/tcp/1") is Scope.NETWORK
    assert guess("/ip4/192.168.1.9/tcp/1", OTHER_PUBLIC) is Scope.INTERNET
    assert guess("/ip4/10.0.0.7/tcp/1") is Scope.INTERNET, "of some other private network"
    assert guess(f"{LOOPBACK}/p2p/{RELAY}/p2p-circuit") is Scope.MACHINE


def test_an_address_keeps_its_port_with_another_ip() -> None:
    assert str(with_ip(parse("/dns4/a.example/tcp/9"), "1.2.3.4")) == "/ip4/1.2.3.4/tcp/9"
    assert str(with_ip(parse("/ip4/1.2.3.4/tcp/9"), "2606:4700::1")) == "/ip6/2606:4700::1/tcp/9"


# --- the scope that counts ---------------------------------------------------------------------


def test_the_farthest_member_decides_which_scope_counts() -> None:
    outside, near, here = Scope.INTERNET, Scope.NETWORK, Scope.MACHINE
    assert scope_that_counts([here, near, outside], []) is outside
    assert scope_that_counts([here, near, None], [outside]) is near
    assert scope_that_counts([here, here], [here]) is here
    assert scope_that_counts([None], [outside, here]) is outside, "those connected, meanwhile"
    assert scope_that_counts([], []) is None


def test_nothing_is_known_while_no_peer_is() -> None:
    state = announcing(HOME, scope=None)
    assert state.reachable is None and not state.settled
    assert state.count_in(Scope.NETWORK, now=7.0)
    assert state.due_at == 7.0
    assert not state.count_in(Scope.NETWORK, now=8.0)


# --- evidence ----------------------------------------------------------------------------------


def test_one_connection_proves_it_and_two_failures_disprove_it() -> None:
    state = Reachability()
    assert state.announce(frozenset({PUBLIC}), now=0.0)
    assert not state.announce(frozenset({PUBLIC}), now=1.0)
    assert state.due_at == 0.0
    state.asked(now=1.0)
    assert state.due_at == 6.0

    assert not state.denied("silence", now=2.0)
    assert state.reachable is None
    assert state.denied("silence", now=4.0)
    assert state.reachable is False and state.settled and state.due_at == 124.0

    assert state.confirmed(peer(3), now=124.0)
    assert state.reachable is True and state.reason == f"{peer(3)} dialled it"
    assert state.due_at == 724.0
    assert not state.confirmed(peer(3), now=724.0), "no news"


def test_a_confirmation_wipes_out_doubts() -> None:
    state = announcing(PUBLIC)
    state.denied("silence", now=0.0)
    state.confirmed(peer(2), now=1.0)
    assert not state.denied("silence", now=601.0)
    assert state.reachable is True
    assert state.due_at == 606.0, "a doubt is looked into soon"


def test_new_addresses_are_looked_at_at_once_and_the_old_verdict_stands_meanwhile() -> None:
    state = announcing(PUBLIC)
    state.confirmed(peer(1), now=0.0)
    assert state.announce(frozenset({OTHER_PUBLIC}), now=50.0)
    assert state.due_at == 50.0 and state.reachable is True and not state.settled


def test_without_a_direct_address_nobody_has_to_be_asked() -> None:
    assert announcing().reachable is False


@pytest.mark.parametrize("near", [Scope.MACHINE, Scope.NETWORK])
def test_a_dial_from_nearby_proves_nothing_for_the_internet(near: Scope) -> None:
    state = announcing(PUBLIC, HOME, LOOPBACK)
    assert not state.confirmed(peer(1), scope=near, now=1.0)
    assert state.reachable is None
    assert state.confirmed(peer(2), scope=Scope.INTERNET, now=2.0)
    assert state.reachable is True and state.reason == f"{peer(2)} dialled it"


def test_a_dial_from_nearby_does_not_flip_a_peer_that_outsiders_could_not_dial() -> None:
    state = announcing(PUBLIC)
    for _ in range(2):
        state.denied("silence", now=1.0)
    assert state.reachable is False
    assert not state.confirmed(peer(3), scope=Scope.MACHINE, now=2.0)
    assert state.reachable is False and state.reason == "silence"


def test_in_a_swarm_of_one_network_a_neighbour_is_proof_enough() -> None:
    state = announcing(HOME, LOOPBACK, scope=Scope.NETWORK)
    assert state.confirmed(peer(1), scope=Scope.NETWORK, now=1.0)
    assert state.reachable is True and state.reason.endswith("from the local network")
    assert state.count_in(Scope.MACHINE, now=2.0)
    assert state.reachable is True, "what comes in from farther away comes in from here"


def test_on_one_machine_loopback_is_proof_enough() -> None:
    state = announcing(LOOPBACK, scope=Scope.MACHINE)
    assert state.confirmed(peer(1), scope=Scope.MACHINE, now=1.0)
    assert state.reachable is True and state.reason.endswith("from the same machine")


def test_a_member_outside_ends_what_only_neighbours_have_proved() -> None:
    state = announcing(HOME, scope=Scope.NETWORK)
    state.confirmed(peer(1), scope=Scope.NETWORK, now=1.0)
    assert state.count_in(Scope.INTERNET, now=50.0)
    assert state.reachable is None and state.due_at == 50.0


def test_neighbours_may_get_through_where_outsiders_did_not() -> None:
    state = announcing(PUBLIC, HOME)
    for _ in range(2):
        state.denied("silence", now=1.0)
    assert state.count_in(Scope.NETWORK, now=50.0)
    assert state.reachable is None and state.due_at == 50.0


def test_a_dial_from_outside_is_no_proof_without_an_address_that_others_can_use() -> None:
    state = announcing(HOME)
    assert not state.usable
    assert not state.confirmed(peer(1), scope=Scope.INTERNET, now=1.0)
    assert state.reachable is None
    assert not state.denied(NO_ADDRESS, now=1.0)
    assert state.denied(NO_ADDRESS, now=6.0)
    assert state.reachable is False and "no address" in state.reason


def test_the_loss_of_the_public_address_takes_effect_at_once() -> None:
    state = announcing(PUBLIC, HOME)
    state.confirmed(peer(1), now=0.0)
    assert state.announce(frozenset({HOME}), now=9.0)
    assert state.reachable is False and state.due_at == 9.0


def test_an_address_of_a_nearer_scope_leaves_the_verdict_alone() -> None:
    state = announcing(PUBLIC)
    state.confirmed(peer(1), now=0.0)
    assert state.announce(frozenset({PUBLIC, HOME, LOOPBACK}), now=9.0)
    assert state.settled and state.due_at == 600.0
    assert state.announce(frozenset({OTHER_PUBLIC}), now=10.0)
    assert not state.settled and state.due_at == 10.0 and state.reachable is True


def test_a_dial_that_was_not_made_is_no_denial_and_says_why() -> None:
    state = announcing(PUBLIC)
    for at in (1.0, 6.0, 11.0):
        state.not_tried("nobody else is there")
        state.asked(now=at)
    assert state.reachable is None and "nobody else is there" in state.reason
    state.confirmed(peer(1), now=12.0)
    state.not_tried("nobody else is there")
    assert state.reachable is True and state.reason == f"{peer(1)} dialled it"


OWN = Multiaddr("/ip4/192.168.1.2/tcp/7700")


def member(*addresses: str) -> Member:
    return Member(
        run=RunId("run"),
        peer=PeerId("12D3KooWBoris"),
        record=PeerRecord(
            protocol=(1, 1),
            role="learner",
            incarnation=1,
            addresses=tuple(pack(Multiaddr(address)) for address in addresses),
        ),
        sequence=1,
        sealed=b"",
        depth=0,
        first_seen=1.0,
        record_seen_at=2.0,
        expires_at=9.0,
    )


def test_a_member_in_a_network_like_ours_that_does_not_answer_is_in_another_home() -> None:
    near = Proximity()
    near.own = (OWN,)

    def scope(one: Member) -> Scope | None:
        return near.scope_that_counts([one], count_connected=False)

    for address, guess in ((OWN, Scope.MACHINE), ("/ip4/192.168.1.3/tcp/7700", Scope.NETWORK)):
        alike = member(str(address), "/ip4/127.0.0.1/tcp/7700")
        assert scope(alike) is guess
        assert scope(replace(alike, failed_at=2.5)) is Scope.INTERNET
        hidden = msgspec.structs.replace(alike.record, reachable=False)
        assert scope(replace(alike, record=hidden)) is Scope.INTERNET
    here = member("/ip4/127.0.0.1/tcp/7700")
    assert scope(replace(here, failed_at=2.5)) is Scope.MACHINE, "loopback is no private network"

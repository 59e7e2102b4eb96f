"""The succession of leaders: which peers may lead a round, and in which order."""

from collections import Counter
from typing import Any

from averaging.rules.peer_view import PeerView
from averaging.rules.succession import leaders, succession
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

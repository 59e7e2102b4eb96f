"""The succession of leaders: which peers may lead a round, and in which order."""

from collections import Counter
from typing import Any

from averaging.rules.peer_view import PeerView
from averaging.rules.succession import leaders, on_usual_lines, succession
from dht.identity import PeerId

TOPIC = bytes(16)


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(sorted(PeerId(f"peer-{index:03}") for index in range(count)))


def seen(
    *, ago: float = 0.0, since: float = 1000.0, failed: float | None = None, **facts: Any
) -> PeerView:
    return PeerView(first_seen=1000.0 - since, heard_at=1000.0 - ago, failed_at=failed, **facts)


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


def lead(view: dict[PeerId, PeerView], **me: bool) -> set[PeerId]:
    group = (PeerId("me"), *(peer for peer in view if view[peer].trains))
    facts = {"me_reachable": True, "me_established": True} | me
    return set(leaders(group, view, me=PeerId("me"), failed=(), now=1000.0, **facts))


ANNA, BORIS, KEEPER = PeerId("anna"), PeerId("boris"), PeerId("keeper")


def test_the_established_lead_before_the_young() -> None:
    view = {ANNA: seen(), BORIS: seen(since=3.0)}

    assert lead(view) == {ANNA, "me"}
    assert lead(view, me_established=False) == {ANNA}


def test_in_a_young_swarm_any_reachable_peer_leads() -> None:
    view = {ANNA: seen(since=3.0), BORIS: seen(since=3.0, reachable=False)}

    assert lead(view, me_established=False) == {ANNA, "me"}


def test_a_peer_that_only_dials_out_never_leads() -> None:
    view = {ANNA: seen(), BORIS: seen(reachable=False)}

    assert lead(view, me_reachable=False) == {ANNA}


def test_a_group_that_nobody_can_reach_borrows_a_leader() -> None:
    view = {ANNA: seen(reachable=False), KEEPER: seen(trains=False)}

    assert lead(view, me_reachable=False) == {KEEPER}
    assert lead({ANNA: seen(reachable=False)}, me_reachable=False) == set()


def test_a_peer_on_a_slow_line_does_not_lead() -> None:
    view = {
        ANNA: seen(bytes_per_s=6e6),
        BORIS: seen(bytes_per_s=1.4e6),
        KEEPER: seen(bytes_per_s=None),
    }

    def able(me_bytes_per_s: float) -> set[PeerId]:
        me = PeerId("me")
        return set(on_usual_lines((me, *view), view, me=me, me_bytes_per_s=me_bytes_per_s))

    assert able(5.7e6) == {ANNA, KEEPER, "me"}
    assert able(5.5e6) == {ANNA, BORIS, KEEPER, "me"}
    assert able(1.3e6) == {ANNA, BORIS, KEEPER, "me"}, "the median is slow itself"
    assert able(0.3e6) == {ANNA, BORIS, KEEPER}
    assert able(0.0) == {ANNA, BORIS, KEEPER, "me"}


def test_one_that_claims_an_absurd_line_leads_beside_the_others() -> None:
    view = {ANNA: seen(bytes_per_s=1e15), BORIS: seen(bytes_per_s=4e6)}

    assert on_usual_lines(view, view, me=PeerId("me"), me_bytes_per_s=0.0) == (ANNA, BORIS)
    three = on_usual_lines((*view, PeerId("me")), view, me=PeerId("me"), me_bytes_per_s=3e6)
    assert three == (ANNA, BORIS, "me")

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.rules.grouping import deal, group_of, grouping_named, register
from averaging.rules.peer_view import ESTABLISHED_AFTER_S, SILENCE_MAX_S, PeerView
from averaging.rules.succession import leaders, succession
from dht.identity import PeerId

TOPIC = bytes(16)


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(sorted(PeerId(f"peer-{index:03}") for index in range(count)))


def seen(
    *, ago: float = 0.0, since: float = 1000.0, failed: float | None = None, **facts: Any
) -> PeerView:
    return PeerView(first_seen=1000.0 - since, heard_at=1000.0 - ago, failed_at=failed, **facts)


def test_who_is_few_is_one_group() -> None:
    everybody = peers(16)

    assert group_of(everybody[3], everybody, size=16, fragment=0, version=7) == everybody


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 90),
    size=st.integers(2, 17),
    version=st.integers(0, 9999),
    fragment=st.integers(0, 40),
)
def test_groups_are_disjoint_complete_and_small_enough(
    count: int, size: int, version: int, fragment: int
) -> None:
    everybody = peers(count)
    if count <= size:
        return
    groups = deal(everybody, size=size, fragment=fragment, version=version)

    assert Counter(peer for group in groups for peer in group) == Counter(everybody)
    assert max(map(len, groups)) <= size
    if size > 3:
        assert min(map(len, groups)) >= 2, "a group of one merges nothing"


@pytest.mark.parametrize("count", range(3, 60))
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_nobody_meets_the_same_group_twice_in_a_row(count: int, size: int) -> None:
    everybody = peers(count)
    if count <= size:
        return
    before: set[tuple[PeerId, ...]] = set()
    for version in range(12):
        groups = deal(everybody, size=size, fragment=3, version=version)
        again = before.intersection(group for group in groups if len(group) > 1)
        assert not again, (version, again)
        before = set(groups)


def test_a_peer_that_only_some_can_see_changes_few_groups() -> None:
    everybody = peers(200)
    moved = 0
    for version in range(20):
        full = deal(everybody, size=16, fragment=0, version=version)
        less = deal(everybody[:77] + everybody[78:], size=16, fragment=0, version=version)
        moved += len(set(less) - set(full))

    assert moved / 20 < 3, "of some twenty groups"


def test_in_the_long_run_everybody_meets_everybody() -> None:
    everybody = peers(24)
    met = {
        (one, other)
        for version in range(60)
        for group in deal(everybody, size=8, fragment=0, version=version)
        for one in group
        for other in group
    }

    assert len(met) == 24 * 24


def test_succession_keeps_its_order_when_somebody_leaves() -> None:
    everybody = peers(9)
    ranked = succession(everybody, topic=TOPIC, fragment=2, version=5)

    without = succession(
        [peer for peer in everybody if peer != ranked[0]], topic=TOPIC, fragment=2, version=5
    )

    assert without == ranked[1:]


def test_leading_goes_round() -> None:
    first = Counter(
        succession(peers(4), topic=TOPIC, fragment=0, version=version)[0] for version in range(200)
    )

    assert min(first.values()) > 25


def test_silence_and_a_failed_call_make_a_peer_not_live() -> None:
    assert seen(ago=SILENCE_MAX_S).is_live(1000.0)
    assert not seen(ago=SILENCE_MAX_S + 0.1).is_live(1000.0)
    assert not seen(ago=5.0, failed=996.0).is_live(1000.0)
    assert seen(ago=5.0, failed=994.0).is_live(1000.0), "it has been heard since"


def test_established_means_seen_for_a_while() -> None:
    assert not seen(since=ESTABLISHED_AFTER_S - 0.1).is_established(1000.0)
    assert seen(since=ESTABLISHED_AFTER_S).is_established(1000.0)


def lead(view: dict[PeerId, PeerView], **me: bool) -> set[PeerId]:
    group = (PeerId("me"), *(peer for peer in view if view[peer].trains))
    facts = {"me_reachable": True, "me_established": True} | me
    return set(leaders(group, view, me=PeerId("me"), failed=(), now=1000.0, **facts))


ANNA, BORIS, KEEPER = PeerId("anna"), PeerId("boris"), PeerId("keeper")


def test_the_established_lead_before_the_young() -> None:
    view = {ANNA: seen(), BORIS: seen(since=3.0)}

    assert lead(view) == {ANNA, "me"}
    assert lead(view, me_established=False) == {ANNA}


def test_in_a_young_swarm_whoever_can_be_reached_leads() -> None:
    view = {ANNA: seen(since=3.0), BORIS: seen(since=3.0, reachable=False)}

    assert lead(view, me_established=False) == {ANNA, "me"}


def test_who_only_dials_out_never_leads() -> None:
    view = {ANNA: seen(), BORIS: seen(reachable=False)}

    assert lead(view, me_reachable=False) == {ANNA}


def test_a_group_that_nobody_can_reach_borrows_a_leader() -> None:
    view = {ANNA: seen(reachable=False), KEEPER: seen(trains=False)}

    assert lead(view, me_reachable=False) == {KEEPER}
    assert lead({ANNA: seen(reachable=False)}, me_reachable=False) == set()


@pytest.mark.parametrize(("count", "size"), [(17, 16), (64, 8), (33, 8), (7, 3), (100, 16)])
def test_even_groups_are_as_few_and_as_equal_as_can_be(count: int, size: int) -> None:
    for version in range(5):
        dealt = grouping_named("even").deal(
            tuple(sorted(peers(count))), size=size, fragment=0, version=version
        )
        sizes = [len(group) for group in dealt]
        assert sum(sizes) == count and len(dealt) == -(-count // size)
        assert max(sizes) - min(sizes) <= 1
        assert all(group == tuple(sorted(group)) for group in dealt)


def test_groupings_go_by_name_and_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="halves, even"):
        grouping_named("rows")
    with pytest.raises(ValueError, match="already"):
        register(grouping_named("even"))
    everybody = peers(9)
    mine = group_of(everybody[0], everybody, size=4, fragment=0, version=1, grouping="even")
    assert everybody[0] in mine and len(mine) == 3


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("grouping", ["halves", "even"])
def test_peers_of_one_site_stay_together_and_still_meet_others(size: int, grouping: str) -> None:
    everybody = peers(40)
    sites = {peer: f"site-{number // 4}" for number, peer in enumerate(everybody[:32])}
    for version in range(6):
        groups = {
            group_of(
                peer,
                everybody,
                size=size,
                fragment=0,
                version=version,
                grouping=grouping,
                sites=sites,
            )
            for peer in everybody
        }
        assert Counter(peer for group in groups for peer in group) == Counter(everybody)
        assert 1 < max(map(len, groups)) <= size
        for group in groups:
            labels = Counter(sites[peer] for peer in group if peer in sites)
            assert set(labels.values()) <= {4}, "a site was torn apart"
            if size == 16:  # room for four sites: then halves leave no group with only one of them
                assert len(labels) + sum(peer not in sites for peer in group) > 1

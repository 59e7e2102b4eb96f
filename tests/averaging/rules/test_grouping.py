"""Dealing peers into groups, with and without sites."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.rules.grouping import deal, group_of
from tests.averaging.values import peers


def test_few_peers_are_one_group() -> None:
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


@pytest.mark.parametrize("size", [8, 16])
def test_peers_of_one_site_stay_together_and_still_meet_others(size: int) -> None:
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

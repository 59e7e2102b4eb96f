"""Sites: delegates and riders, the weight of a bundle, and storms that hit both."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from averaging import messages as said
from averaging.messages import Commit, Link
from averaging.round.slices import Reducer
from averaging.rules.grouping import group_of
from averaging.rules.sites import (
    Share,
    delegates,
    may_still_upload,
    riders_of,
    shares,
    site_name,
    site_of,
    site_pass,
)
from dht.identity import PeerId
from tests.averaging.message_examples import EXAMPLES
from tests.averaging.values import commit_of, entry
from tests.averaging.virtual.swarm import Storm, storm, weather_out

ANNA, BORIS, CLARA, DORA, EMIL = map(PeerId, ("anna", "boris", "clara", "dora", "emil"))
JOIN = next(message for message in EXAMPLES if isinstance(message, said.Join))


def at(site: str | None, peer: PeerId, *, reachable: bool = True) -> said.Join:
    from msgspec.structs import replace as changed

    return changed(JOIN, site=site_pass(site, peer), reachable=reachable)


def commit(*carried_by: int | None) -> Commit:
    members = [
        entry(PeerId(f"p{i}"), tokens=1000 * (i + 1), delegate=delegate)
        for i, delegate in enumerate(carried_by)
    ]
    return commit_of(members, parents=(Link(7, b"l" * 32, 5),))


def test_the_first_of_a_site_in_rank_is_its_delegate() -> None:
    roster = (ANNA, BORIS, CLARA, DORA, EMIL)
    sites = ("lab", None, "home", "lab", "lab")
    joins = {peer: at(site, peer) for peer, site in zip(roster, sites, strict=True)}
    assert delegates(roster, joins) == {DORA: 0, EMIL: 0}


def test_a_peer_that_only_dials_out_is_a_rider_and_no_delegate() -> None:
    joins = {peer: at("lab", peer, reachable=peer == ANNA) for peer in (ANNA, BORIS, CLARA)}
    assert delegates((ANNA, BORIS, CLARA), joins) == {BORIS: 0, CLARA: 0}
    alone = {peer: at("lab", peer, reachable=False) for peer in (BORIS, CLARA)}
    assert delegates((BORIS, CLARA), alone) == {}


def test_a_peer_without_the_label_is_nobodys_delegate_whatever_it_shows() -> None:
    """A peer without the label sees the others' joins and records, and names their site."""
    theirs = site_pass("lab", BORIS)
    name = site_name("lab")
    assert theirs is not None and name is not None and "lab" not in theirs + name
    for shown in (
        theirs,
        name,
        "lab",
        theirs.replace("/", "/00", 1),
        theirs[:-2],
        f"{ANNA}/{'A' * 86}==",
    ):
        assert site_of(shown, ANNA) is None
        joins = {ANNA: replace(JOIN, site=shown, reachable=True)}
        joins |= {peer: at("lab", peer) for peer in (BORIS, CLARA)}
        assert delegates((ANNA, BORIS, CLARA), joins) == {CLARA: 1}, shown
    assert site_of(site_pass("lab", ANNA), ANNA) == site_of(theirs, BORIS) is not None
    assert site_of(site_pass("other", ANNA), ANNA) != site_of(theirs, BORIS)


def test_peers_of_a_site_are_dealt_by_its_name_whether_they_show_it_or_a_pass() -> None:
    peers = [PeerId(f"p{number}") for number in range(12)]
    name = {peer: site_name(f"site-{number % 4}") or "" for number, peer in enumerate(peers)}
    own = {peers[0]: site_pass("site-0", peers[0]) or ""}
    groups = [
        group_of(peers[0], tuple(peers), size=6, fragment=0, version=5, sites=sites)
        for sites in (name, name | own)
    ]
    assert groups[0] == groups[1] and {peers[0], peers[4], peers[8]} <= set(groups[0])


def test_a_bundle_counts_as_much_as_all_its_members() -> None:
    sealed = (0, 1, 2, 4)
    weights = (0.125, 0.25, 0.375, 0.25)
    assert shares(sealed, weights, {0: (2, 4)}) == (Share(0, 0.75, 3), Share(1, 0.25, 1))
    assert shares(sealed, weights, {}) == tuple(
        Share(index, weight, 1) for index, weight in zip(sealed, weights, strict=True)
    )


def test_nothing_is_awaited_of_a_rider_whose_delegate_is_gone() -> None:
    there = commit(None, None, 0, 0, 1)
    assert riders_of(there, 0) == (2, 3)
    assert may_still_upload(there, {0}) == {1, 4}
    assert may_still_upload(there, {2}) == {0, 1, 3, 4}


def test_a_reducer_has_all_of_a_bundle_or_nothing_of_it() -> None:
    reducer = Reducer([0])
    assert reducer.arrived(0, 0, "broken off", riders=(2, 3))
    assert reducer.slices[0].refused.keys() == {0, 2, 3}
    assert reducer.arrived(0, 0, None, riders=(2, 3))
    assert reducer.slices[0].complete == {0, 2, 3} and not reducer.slices[0].refused
    reducer.arrived(0, 1, None)
    assert reducer.can_merge(0, (0, 1, 2, 3)) and reducer.can_merge(0, (1,))
    assert not reducer.can_merge(0, (0, 1, 2)), "the third's work would be in it unseen"


@pytest.mark.parametrize(
    ("carried_by", "problem"),
    [
        ((None, 5), "not a member"),
        ((None, 0, 1), "has a delegate of its own"),
        ((0, None), "has a delegate"),
    ],
)
def test_a_commit_with_a_delegate_that_cannot_be_one_is_refused(
    carried_by: tuple[int | None, ...], problem: str
) -> None:
    with pytest.raises(said.BadMessage, match=problem):
        said.decode_commit(said.encode_commit(commit(*carried_by)))


WITH_SITES = (
    Storm(peers=(5, 9), sites=2),
    Storm(peers=(4, 9), sites=3, accidents=(4, 9)),
    Storm(peers=(9, 14), group_size=6, sites=3),
    Storm(peers=(9, 14), group_size=6, sites=4),
)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))]
)
def test_no_storm_breaks_a_promise_to_peers_at_sites(seed: int) -> None:
    """Delegates and riders die, freeze and are cut off at any moment."""
    how = WITH_SITES[seed % len(WITH_SITES)]
    swarm = storm(seed, how)
    weather_out(swarm, how)
    assert seed % 4 > 1 or swarm.truth.coverage["merged a bundle"], "nobody carried anybody"

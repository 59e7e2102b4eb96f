"""The way of each stream, and its answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from averaging import messages as said
from averaging.messages import Commit
from averaging.round.interface.effects import Enter, Merge
from averaging.round.traffic import AGAIN_S, Route, Traffic
from averaging.rules.sites import Share
from dht.identity import PeerId
from tests.averaging.values import commit_of, entry

ANNA, BORIS, CLARA, DORA = map(PeerId, ("anna", "boris", "clara", "dora"))


SITES = commit_of(
    [ANNA, BORIS, entry(CLARA, delegate=1), entry(DORA, delegate=1)], reducers=(ANNA, BORIS)
)
"""Boris carries Clara and Dora."""


def traffic(me: PeerId, commit: Commit = SITES, *, gives: bool = True) -> Traffic:
    encoded = said.encode_commit(commit)
    slices = tuple(i for i, peer in enumerate(commit.reducers) if peer == me)
    enter = Enter(said.digest(encoded), commit, encoded, bytes(64), commit.index(me), slices)
    made = Traffic(enter)
    made.gives = gives
    return made


def test_a_rider_sends_each_slice_to_its_delegate_once_and_waits_there() -> None:
    clara = traffic(CLARA)
    assert clara.upload(0, ANNA, gives=True) == Route(0, BORIS, True, by_delegate=True)
    assert clara.upload(0, BORIS, gives=True) is None


def test_without_its_delegate_a_rider_only_fetches_what_is_not_here() -> None:
    clara = traffic(CLARA)
    routes = [clara.upload(0, ANNA, gives=True), clara.upload(1, BORIS, gives=True)]
    clara.merged.add(1)
    assert routes[0] is not None and routes[1] is not None
    assert clara.broke(routes[0]) == [Route(0, ANNA, False)]
    assert clara.broke(routes[1]) == [], "that its delegate is gone is known already"
    alone = clara.upload(0, ANNA, gives=True)
    assert alone == Route(0, ANNA, False)
    assert clara.broke(alone) is None, "now it is for the round to decide"


def test_a_rider_tries_its_delegate_again_where_certificates_may_be_on_their_way() -> None:
    """The stream over the own network came first: three of eight contributions to each meld were
    lost."""
    clara = traffic(CLARA, msgspec.structs.replace(SITES, parents=2 * SITES.parents))
    first = clara.upload(0, ANNA, gives=True)
    assert first == Route(0, BORIS, True, by_delegate=True)
    assert clara.broke(first) == [replace(first, after_s=AGAIN_S)]
    assert clara.broke(first) == [Route(0, ANNA, False)], "once more, and no more"


def test_a_stream_that_only_waits_at_a_delegate_is_no_bundle_when_it_breaks() -> None:
    clara = traffic(CLARA)
    waiting = clara.upload(1, BORIS, gives=False)
    assert waiting == Route(1, BORIS, False)
    assert clara.broke(waiting) is None


def test_a_contribution_that_proves_unfit_is_not_announced() -> None:
    anna = traffic(ANNA)
    route = anna.upload(1, BORIS, gives=True)
    assert route is not None and anna.opening(route).gives
    anna.gives = False
    assert not anna.opening(route).gives
    assert anna.upload(1, BORIS, gives=True) == Route(1, BORIS, False)


def test_a_bundle_is_merged_with_the_weight_of_all_whom_it_carries() -> None:
    anna = traffic(ANNA)
    anna.left_out(0, 1, "too early")
    taken = anna.merge(Merge(b"", 0, (0, 1, 2, 3), (0.25, 0.25, 0.25, 0.25), {1: (2, 3)}))
    assert taken == (Share(0, 0.25, 1), Share(1, 0.75, 3))
    assert anna.problem(0, 1) == "", "of an earlier attempt"

"""The peers that count, by the merges that one peer saw."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from averaging.guard.rules.probation import YOUNG_ROUNDS, Probation
from averaging.rules.policy import ProbationPolicy
from averaging.rules.reputation import LIMIT, Deed, Reputation
from averaging.rules.weights import Contribution, credited, shares_of
from dht.identity import PeerId
from tests.averaging.values import commit_of

POLICY = ProbationPolicy(rounds=8, seconds=100.0)
ME, ANNA, BORIS, NEW = (PeerId(name) for name in ("me", "anna", "boris", "new"))
OLD = [ME, ANNA, BORIS]


def counts(probation: Probation, peer: PeerId, live: Iterable[PeerId], now: float) -> bool:
    return probation.progress(peer, probation.required_work(live, now), now) >= 1.0


def seen(rounds: int, *peers: PeerId, every_s: float = 20.0) -> Probation:
    """A peer that has seen so many merges of these peers since the first of the run."""
    probation = Probation(POLICY)
    for number in range(rounds):
        probation.saw_merged(peers or OLD, peers or OLD, number * every_s)
    return probation


def test_without_a_policy_everybody_counts() -> None:
    probation = Probation(ProbationPolicy())
    assert counts(probation, NEW, OLD, 0.0)
    assert probation.counts_all_at(0.0)


@pytest.mark.parametrize(
    ("on_probation", "reason"),
    [((), None), ((2,), None), ((1, 2), "1 of its 3 members are its voters")],
)
def test_without_a_policy_half_of_the_members_vote(
    on_probation: tuple[int, ...], reason: str | None
) -> None:
    probation = Probation(ProbationPolicy())
    judged = commit_of([*OLD], on_probation=on_probation)
    assert probation.objection(judged, probation.required_work(OLD, 0.0), 0.0, me=ME) == reason


def without_power(peer: PeerId, *, known: Reputation | None = None, now: float = 0.0) -> Reputation:
    known = known or Reputation()
    for _ in range(int(LIMIT)):
        known.saw(peer, Deed.LIES, now)
    return known


def test_strikes_count_without_a_policy_while_fewer_than_half_have_too_many() -> None:
    probation = Probation(ProbationPolicy(), reputation=without_power(ANNA))
    assert not counts(probation, ANNA, OLD, 0.0)
    assert counts(probation, BORIS, OLD, 0.0)
    assert counts(probation, ANNA, [ANNA, BORIS], 0.0), "half of those that are live"
    without_power(BORIS, known=probation.reputation)
    assert counts(probation, ANNA, OLD, 0.0)


def test_a_peer_with_too_many_strikes_is_on_probation_until_they_have_faded() -> None:
    probation = Probation(POLICY)
    for number in range(20):
        probation.saw_merged(OLD, OLD, number * 20.0)
    assert counts(probation, ANNA, OLD, 400.0)
    without_power(ANNA, known=probation.reputation, now=400.0)
    assert not counts(probation, ANNA, OLD, 400.0)
    assert counts(probation, ANNA, OLD, 410.0)


def test_everybody_counts_until_somebody_has_merged_a_few_times() -> None:
    assert counts(seen(YOUNG_ROUNDS - 1), NEW, [*OLD, NEW], 60.0)
    assert not counts(seen(YOUNG_ROUNDS), NEW, [*OLD, NEW], 60.0)


def test_a_newcomer_counts_after_so_many_merges_over_so_long() -> None:
    probation = seen(50)
    for number in range(7):
        probation.saw_merged([*OLD, NEW], [*OLD, NEW], 1000.0 + 10.0 * number)
    assert not counts(probation, NEW, OLD, 2000.0), "7 of 8 merges"
    probation.saw_merged([*OLD, NEW], [*OLD, NEW], 1070.0)
    assert not counts(probation, NEW, OLD, 1099.9)
    assert counts(probation, NEW, OLD, 1100.0)


def test_in_a_young_swarm_half_of_what_the_others_have_done_is_enough() -> None:
    probation = seen(4, every_s=5.0)
    probation.saw_merged([*OLD, NEW], [*OLD, NEW], 20.0)
    probation.saw_merged([*OLD, NEW], [*OLD, NEW], 25.0)
    assert not counts(probation, NEW, OLD, 60.0), "2 of 6 merges"
    probation.saw_merged([NEW], [*OLD, NEW], 30.0)
    assert counts(probation, NEW, OLD, 60.0)


def test_newcomers_count_when_nobody_else_is_left() -> None:
    probation = Probation(POLICY)
    for number in range(50):
        probation.saw_merged([ANNA, BORIS], [ANNA, BORIS], 10.0 * number)
    for number in range(4):
        probation.saw_merged([ANNA, ME, NEW], [ANNA, ME, NEW], 500.0 + 10.0 * number)
    sybil = PeerId("sybil")

    assert not counts(probation, NEW, [ANNA, ME, NEW, sybil], 540.0)
    assert counts(probation, NEW, [ME, NEW, sybil], 540.0)
    assert not counts(probation, sybil, [ME, NEW, sybil], 540.0)


def test_a_peer_that_is_cut_off_does_not_take_newcomers_for_old() -> None:
    assert not counts(seen(50), NEW, [ME, NEW], 1000.0)


@pytest.mark.parametrize("silent", [False, True])
def test_a_peer_met_by_the_first_merge_counts_until_it_misses_too_many(silent: bool) -> None:
    """Silent: a partition that came before the first merge made two runs of one for good."""
    probation = Probation(POLICY)
    if silent:
        probation.saw_merged([ME, ANNA], [ME, ANNA], 0.0, met=[ANNA, BORIS])
    else:
        probation.saw_merged([ME, ANNA], OLD, 0.0)
    for number in range(30):
        probation.saw_merged([ME, ANNA], [ME, ANNA], 10.0 + number)  # boris is away
    assert counts(probation, BORIS, OLD, 60.0)
    for number in range(POLICY.rounds + silent):
        assert counts(probation, BORIS, OLD, 60.0)
        probation.saw_merged([ME, ANNA], OLD, 60.0 + number)
    assert not counts(probation, BORIS, OLD, 70.0)


@pytest.mark.parametrize(("unseen", "is_young"), [(1, True), (YOUNG_ROUNDS, False)])
def test_a_peer_that_came_while_the_swarm_was_young_counts_those_met_by_its_first_merge(
    unseen: int, is_young: bool
) -> None:
    """One that was restarted at version 1, in a partition, held the other side for newcomers, and
    the run stayed cut in two (a storm with probation, seed 610039)."""
    probation = Probation(POLICY)
    probation.took_state(unseen, {ANNA: 1000, ME: 1000})
    for number in range(30):
        probation.saw_merged([ME, ANNA], [ME, ANNA], 10.0 * number, met=[ANNA, BORIS])
    assert counts(probation, BORIS, OLD, 400.0) == is_young


def test_a_peer_that_comes_late_believes_the_state_that_it_takes() -> None:
    probation = Probation(POLICY)
    probation.took_state(200, {ANNA: 10_000, BORIS: 4_000, PeerId("gone"): 90_000, NEW: 900})
    live = [ME, ANNA, BORIS, NEW]

    assert counts(probation, ANNA, live, 0.0)
    assert counts(probation, BORIS, live, 0.0), "a quarter of the tokens is enough"
    assert not counts(probation, NEW, live, 0.0)
    assert not counts(probation, ME, live, 0.0)
    assert counts(probation, ME, [ME], 0.0), "all that had worked have left"


def test_the_owners_delegates_are_never_on_probation() -> None:
    probation = Probation(POLICY, trusted=lambda peer: peer == NEW)
    for number in range(50):
        probation.saw_merged(OLD, OLD, float(number))
    assert probation.progress(NEW, probation.required_work(OLD, 50.0), 50.0) == math.inf


@pytest.mark.parametrize(
    ("members", "on_probation", "reason"),
    [
        ((*OLD, NEW), (3,), None),
        ((*OLD, NEW), (), None),
        ((ANNA, NEW, PeerId("sybil")), (), "1 of its 3 voters have worked; a majority is needed"),
        ((*OLD, NEW), (0, 1, 2), "0 of its 1 voters have worked; a majority is needed"),
        ((*OLD, NEW), (1, 2, 3), "1 of 3 established members are its voters"),
        ((*OLD, NEW), (2, 3), None),
    ],
    ids=["right", "one too many", "newcomers decide", "reversed", "leader alone", "one left out"],
)
def test_a_member_checks_who_votes(
    members: tuple[PeerId, ...], on_probation: tuple[int, ...], reason: str | None
) -> None:
    probation, now = seen(50), 1000.0
    judged = commit_of([*members], on_probation=on_probation)
    assert (
        probation.objection(judged, probation.required_work([*OLD, NEW], now), now, me=ME) == reason
    )


@pytest.mark.parametrize("count", [1, 4, 60])
def test_contributors_on_probation_have_a_quarter_together(count: int) -> None:
    works = [Contribution(tokens=1000, steps=10)] * 3 + [Contribution(10**6, 10)] * count
    newcomers = range(3, 3 + count)

    shares = shares_of(works, on_probation=newcomers)

    assert sum(shares) == pytest.approx(1.0)
    assert sum(shares[index] for index in newcomers) <= 0.25 + 1e-9
    few = [Contribution(tokens=1000, steps=10)] * 8
    assert shares_of(few, on_probation=[7]) == shares_of(few), "it has less than that anyway"


def test_claims_on_probation_do_not_move_the_median() -> None:
    claims = [(100, 1)] * 3 + [(10**9, 10**7)] * 5
    assert credited(claims, batch_tokens_max=100, on_probation=range(3, 8)) == (
        *(100, 100, 100),
        *(6400,) * 5,
    )


def test_versions_that_a_founder_made_alone_are_no_merges() -> None:
    probation = Probation(POLICY)
    probation.took_state(500, {ANNA: 100_000})
    probation.took_state(2, {ANNA: 101_000, BORIS: 500})
    young = probation.required_work([ME, ANNA, BORIS], 0.0)
    assert probation.objection(commit_of([ANNA, BORIS, ME]), young, 0.0, me=ME) is None
    assert counts(probation, ME, [ME, ANNA, BORIS], 0.0)


def test_a_voter_that_came_back_with_few_tokens_does_not_decline_for_want_of_its_own_work() -> None:
    """The founder trained alone for long, so this peer has a small share of the tokens."""
    probation = Probation(POLICY)
    probation.took_state(44, {ANNA: 626_000, BORIS: 500_000, ME: 109_000})
    asked = probation.required_work([ME, ANNA, BORIS], 0.0)
    assert not counts(probation, ME, [ME, ANNA, BORIS], 0.0)
    assert probation.objection(commit_of([ANNA, ME]), asked, 0.0, me=ME) is None
    assert probation.objection(commit_of([NEW, ME]), asked, 0.0, me=ME) is not None


def test_a_newcomer_accepts_whoever_worked_beside_a_founder_that_was_alone_for_long() -> None:
    probation = Probation(POLICY)
    probation.took_state(500, {ANNA: 10_000_000, BORIS: 200_000, NEW: 1_000})
    live = [ME, ANNA, BORIS, NEW]
    judged = commit_of([ANNA, BORIS, ME], on_probation=(2,))
    assert probation.objection(judged, probation.required_work(live, 0.0), 0.0, me=ME) is None
    assert counts(probation, BORIS, live, 0.0)
    assert not counts(probation, NEW, live, 0.0)

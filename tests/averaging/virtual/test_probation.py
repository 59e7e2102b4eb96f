"""Newcomers work before they count, in whole swarms: liars cost no round, and nobody is stuck."""

from __future__ import annotations

from functools import cache

import pytest

from averaging.guard.rules.probation import Probation
from averaging.messages import Commit
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.rules import weights
from averaging.rules.policy import ProbationPolicy
from tests.averaging.virtual.newcomers import (
    END_S,
    MEMBERS,
    Behaviour,
    Newcomers,
    claim_everything,
    never_vote,
    old_swarm,
    upload_nonsense,
)
from tests.averaging.virtual.swarm import Storm, storm, weather_out
from tests.seeds import seeds

LONG = ProbationPolicy(rounds=100, seconds=1000.0)
"""No peer that comes late counts in the time of these tests, unless it must."""
SHORT = ProbationPolicy(rounds=8, seconds=40.0)
SYBILS = 5


@cache
def control() -> int:
    """Versions that the members make without anybody else."""
    return old_swarm(1, LONG, count=0).versions()


def lies(behaves: Behaviour, policy: ProbationPolicy = LONG) -> Newcomers:
    return old_swarm(1, policy, count=SYBILS, behaves=behaves)


honestly_treated = cache(lies)
"""Without a planted breach."""


@pytest.mark.parametrize("behaves", [never_vote, upload_nonsense, claim_everything])
def test_newcomers_that_lie_cost_no_round(behaves: Behaviour) -> None:
    made = honestly_treated(behaves)

    # A roster waits a moment for them: rounds of ten seconds begin a little later.
    assert made.versions() >= 0.85 * control() > 10
    assert not made.with_power()
    assert any(commit.on_probation for commit in made.commits), "they were in no round"


def test_newcomers_that_work_are_merged_at_once_and_count_after_a_while() -> None:
    made = old_swarm(1, SHORT, count=4)
    everybody = MEMBERS + 4

    assert made.versions() >= 0.9 * control()
    last = made.commits[-1]
    assert len(last.members) == everybody
    assert len(last.voters) > MEMBERS
    full = next(n for n, c in enumerate(made.commits) if len(c.members) == everybody)
    assert len(made.commits[full].voters) == MEMBERS
    assert len(made.swarm.lineages()) == 1


def test_when_all_old_members_leave_the_newcomers_go_on() -> None:
    made = old_swarm(2, LONG, count=4, leave_at=[160.0, 170.0, 180.0])
    left = [node for node in made.swarm.trainers() if node.name in made.names]
    versions = [node.state.version for node in left if node.state is not None]

    assert len(versions) == 4
    last = made.commits[-1]
    assert len(last.members) == len(last.voters) == 4
    assert min(versions) > 0.7 * END_S / 10, "they stood still for long"
    assert len(made.swarm.lineages()) == 1


def test_newcomers_beside_several_groups_join_them_and_make_none() -> None:
    made = old_swarm(3, LONG, count=SYBILS, behaves=never_vote, group_size=4)

    assert made.versions() >= 0.9 * control()
    assert not made.with_power()
    assert max(len(commit.members) for commit in made.commits) <= 4


# Storms


STORMS = (
    Storm(probation=SHORT),
    Storm(probation=SHORT, peers=(6, 9)),
    Storm(probation=SHORT, peers=(6, 9), group_size=4),
)
"""One for each seed, in turn."""


@pytest.mark.parametrize("seed", seeds(1, soak=300))
def test_no_storm_breaks_a_promise_to_a_swarm_with_probation(seed: int) -> None:
    how = STORMS[seed % len(STORMS)]
    weather_out(storm(seed, how), how)


# Planted breaches


def _everybody_votes(patch: pytest.MonkeyPatch) -> None:
    everybody = property(lambda self: tuple(range(len(self.members))))
    patch.setattr(Commit, "voters", everybody)


def _leaders_name_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbourhood, "newcomers", lambda self, peers, now: set())
    patch.setattr(Probation, "objection", lambda self, commit, asked, now, *, me: None)


def _merges_of_others_count(patch: pytest.MonkeyPatch) -> None:
    plain = Probation.saw_merged

    def saw(self, contributors, live, now, *, met):  # type: ignore[no-untyped-def]
        plain(self, live, live, now, met=met)

    patch.setattr(Probation, "saw_merged", saw)


@pytest.mark.parametrize("breach", [_everybody_votes, _leaders_name_nobody])
def test_a_planted_breach_gives_newcomers_power(
    breach: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    breach(monkeypatch)  # type: ignore[operator]
    made = lies(never_vote)
    assert made.versions() < 0.7 * control() or made.with_power()


def test_counting_rounds_that_a_peer_is_not_in_gives_newcomers_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _merges_of_others_count(monkeypatch)
    assert lies(upload_nonsense, SHORT).with_power()


def test_without_the_bound_newcomers_outweigh_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(made: Newcomers) -> float:
        shares = [
            weights.weights_of(commit, range(len(commit.members)))
            for commit in made.commits
            if len(commit.on_probation) == SYBILS
        ]
        return max(sum(share[MEMBERS:]) for share in shares)

    made = honestly_treated(never_vote)
    assert theirs(made) <= 0.25 + 1e-9
    monkeypatch.setattr(weights, "NEWCOMERS_SHARE_MAX", 1)
    weights._shares.cache_clear()
    assert theirs(made) > 0.5
    weights._shares.cache_clear()

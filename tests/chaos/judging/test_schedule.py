"""Schedules of faults: equal for equal seeds, with quiet ends, and never too many at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.chaos.judging.scenarios import ALL, SCENARIOS, Scenario, chosen
from tests.chaos.judging.schedule import (
    ABSENT,
    HAS_VICTIM,
    START_S,
    Fault,
    FaultKind,
    Timing,
    plan,
)

CHURN = SCENARIOS["churn"]


def planned(
    scenario: Scenario, seed: int, *, total_s: float = 600.0, learners: int = 4
) -> list[Fault]:
    rng = np.random.default_rng(seed)
    timing = Timing.of(total_s)
    return list(plan(scenario.kinds, timing, learners=learners, whole_min=2, rng=rng))


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert planned(CHURN, 3) == planned(CHURN, 3)
    assert planned(CHURN, 3) != planned(CHURN, 4)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_scenario_contains_each_of_its_kinds_of_faults(name: str) -> None:
    scenario = SCENARIOS[name]
    seen = {fault.kind for seed in range(5) for fault in planned(scenario, seed)}
    assert seen == set(scenario.kinds)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_begins_and_ends_without_faults(seed: int) -> None:
    timing = Timing.of(90.0)
    faults = planned(CHURN, seed, total_s=90.0)
    assert len(faults) >= 3
    assert all(fault.at_s >= timing.lead_in_s for fault in faults)
    assert all(fault.at_s + fault.lasts_s <= timing.quiet_s + 1e-6 for fault in faults)
    assert timing.total_s - timing.quiet_s >= 14.0


@pytest.mark.parametrize("seed", range(50))
def test_two_learners_are_always_unaffected_and_none_has_two_faults_at_once(seed: int) -> None:
    faults = planned(CHURN, seed)
    absences = [(f.at_s, f.at_s + f.lasts_s + START_S) for f in faults if f.kind in ABSENT]
    for begin, _ in absences:
        assert sum(b <= begin < e for b, e in absences) <= 2, f"seed {seed}"
    for victim in range(4):
        spans = [(f.at_s, f.at_s + f.lasts_s) for f in faults if f.victim == victim]
        for (_, until), (begin, _) in itertools.pairwise(spans):
            assert begin >= until, f"seed {seed}"


def test_leaders_are_killed_in_each_phase() -> None:
    details = {fault.detail for fault in planned(SCENARIOS["leader"], 0)}
    assert details == {"joining", "committed", "exchanging", "recovering"}


def test_a_kind_without_a_victim_names_none_and_the_others_do() -> None:
    for scenario in SCENARIOS.values():
        for fault in planned(scenario, 1):
            named = fault.kind in HAS_VICTIM - {FaultKind.LEADER}
            assert (fault.victim is not None) == named, fault


def test_too_short_a_run_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="total_s is 20"):
        Timing.of(20.0)
    Timing.of(30.0)


def test_scenarios_are_chosen_by_name_all_of_them_or_with_an_error_that_lists_them() -> None:
    assert [scenario.name for scenario in chosen(("leader", "kill", "leader"))] == [
        "leader",
        "kill",
    ]
    assert chosen((ALL,)) == tuple(SCENARIOS.values())
    with pytest.raises(ValueError, match=r"no scenario 'kil'; there are: kill, leader"):
        chosen(("kil",))

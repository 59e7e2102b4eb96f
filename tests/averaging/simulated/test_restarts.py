"""A member that is restarted again and again: what it costs the others, and itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.averaging.simulated.disturbing_experiment import (
    QUICK_LINES_BYTES_S,
    SLOW_LINES_BYTES_S,
    WAYS,
    disturbed,
)
from tests.averaging.simulated.swarm import POLICY, PeerPlan, Swarm

UNDISTURBED = {QUICK_LINES_BYTES_S: 29, SLOW_LINES_BYTES_S: 23}


@pytest.mark.parametrize("line_bytes_s", [QUICK_LINES_BYTES_S, SLOW_LINES_BYTES_S])
@pytest.mark.parametrize("event", ["learned_seal", "closed"])
def test_a_member_killed_at_the_worst_moments_costs_the_others_few_versions(
    event: str, line_bytes_s: float
) -> None:
    """It took its upload and its slice, or the joins that it had noted, with it: 16 and 15 versions
    were made, 9 and 10 on slow lines, as each new life had the same parts again."""
    (way,) = (each for each in WAYS if each.killed_at == event)

    versions, _ = disturbed(way, line_bytes_s=line_bytes_s)

    assert versions > 0.8 * UNDISTURBED[line_bytes_s]


@pytest.mark.parametrize(
    ("count", "restarted", "versions_min"),
    [(2, 1, 19), (2, 2, 17), (3, 2, 19), (5, 2, 22), (6, 6, 17)],
)
def test_restarts_of_several_at_once_cost_a_version_each_time(
    count: int, restarted: int, versions_min: int
) -> None:
    """Of 23: nobody is given less of a part where half of the members would have none."""
    swarm = Swarm(1, [PeerPlan(founder=not number) for number in range(count)])
    for at in (60.0, 120.0, 180.0):
        for name in swarm.names[-restarted:]:
            swarm.heap.call_at(at, swarm.crash, name)
            swarm.heap.call_at(at + 2.0, swarm.restart, name)

    swarm.run(240.0)

    assert max(swarm.versions()) >= versions_min


@pytest.mark.parametrize("seed", range(2))
def test_a_member_whose_machine_crashes_every_minute_keeps_its_favour_and_gets_its_work_merged(
    seed: int,
) -> None:
    policy = replace(POLICY, audit_rate=0.4)
    swarm = Swarm(seed, [PeerPlan(founder=not number) for number in range(6)], policy=policy)
    rng, name = random.Random(seed), swarm.names[-1]
    at = 0.0
    while (at := at + rng.uniform(30.0, 90.0)) < 600.0:
        swarm.heap.call_at(at, swarm.crash, name)
        swarm.heap.call_at(at + rng.uniform(0.5, 10.0), swarm.restart, name)

    swarm.run(600.0)

    for node in swarm.trainers():
        assert node.audits is not None and node.state is not None
        assert not node.audits.strikes.is_out(name, node.now())
    merged = swarm.trainers()[0].state.merged  # type: ignore[union-attr]
    usual = merged[swarm.names[0]].tokens
    assert merged[name].tokens > 0.5 * usual
    assert max(swarm.versions()) > 50

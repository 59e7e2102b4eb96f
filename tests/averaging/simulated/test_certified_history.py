"""One certified history, whoever comes, returns, or was apart: the decisions of the live peers.

``tests/averaging/live/test_averager.py`` tells the same stories of live peers. Those of partitions,
forks, founders and several groups are in ``test_schedules`` and ``test_storms``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.rules.due import DuePolicy
from averaging.rules.probation import ProbationPolicy
from tests.averaging.simulated.certified import settles
from tests.averaging.simulated.swarm import POLICY, PeerPlan, Storm, Swarm, storm, weather_out

DAY_S = 86_400.0


@pytest.mark.parametrize("probation", [ProbationPolicy(), ProbationPolicy(rounds=8, seconds=600.0)])
def test_a_peer_that_rejoins_after_a_day_takes_the_certified_version(
    probation: ProbationPolicy,
) -> None:
    """Most of those that it knew have left, and those that came since are new to it."""
    slow = replace(
        POLICY,
        quorum=replace(POLICY.quorum, wait_s=120.0, tau=60.0),
        due=DuePolicy(cycle_steps=10, fragments=1),
        snapshot_s=200.0,
        round_s=600.0,
        answer_s=10.0,
        probation=probation,
    )
    plans = [PeerPlan(founder=number == 0, step_time_s=120.0) for number in range(3)]
    plans += [PeerPlan(step_time_s=120.0, starts_at=5_000.0 + number) for number in range(2)]
    swarm = Swarm(5, plans, policy=slow, heartbeat_s=10.0)
    away, gone = swarm.names[0], swarm.names[1]
    swarm.heap.call_at(4_000.0, swarm.crash, away)
    swarm.heap.call_at(30_000.0, swarm.crash, gone)
    swarm.heap.call_at(DAY_S, swarm.restart, away)
    swarm.run(DAY_S - 1.0)
    before = max(swarm.versions())
    swarm.run(DAY_S + 6_000.0)

    assert settles(swarm, within_s=1_000.0)
    node = swarm.nodes[away]
    assert node.state is not None and node.state.version > before > 50
    assert node.state.merged[away].incarnation == node.incarnation == 2, "its new work is merged"


def test_a_swarm_of_which_every_member_is_new_to_a_newcomer_gives_it_its_state() -> None:
    plans = [PeerPlan(founder=number == 0) for number in range(4)]
    swarm = Swarm(6, [*plans, PeerPlan(starts_at=60.0)], young=True)
    newcomer = swarm.names[-1]
    swarm.run(85.0)  # nobody has been in its sight for as long as established peers are
    node = swarm.nodes[newcomer]

    assert node.state is not None and node.state.version >= 4
    swarm.run(110.0)
    assert settles(swarm, within_s=20.0)
    assert newcomer in swarm.trainers()[0].machine.standing.merged  # type: ignore[union-attr]


ONCE_SPLIT = {
    19: "a side of a fork whose leaders took the other for newcomers",
    43: "a peer that held the leader of all others for a newcomer, where the quorum is all",
    87: "newcomers on a side of their own, which was not light",
}


@pytest.mark.parametrize("seed", ONCE_SPLIT)
def test_a_storm_that_left_a_swarm_with_probation_split_does_so_no_more(seed: int) -> None:
    how = Storm(probation=ProbationPolicy(rounds=8, seconds=40.0))
    weather_out(storm(seed, how), how)

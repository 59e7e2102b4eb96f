"""One certified history, whoever comes, returns, or was apart: the decisions of the live peers.

``tests/averaging/live/test_averager.py`` tells the same stories of live peers. Those of partitions,
forks, founders and several groups are in ``test_schedules`` and ``test_storms``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from averaging.guard.rules.probation import Probation
from averaging.round.interface.effects import Note
from averaging.rules.due import DuePolicy
from averaging.rules.policy import ProbationPolicy
from averaging.virtual.swarm import Peer, PeerPlan
from tests.averaging.virtual.certified import settles
from tests.averaging.virtual.swarm import POLICY, Swarm

AWAY_S = 20_000.0
GROUPS_OF_4 = replace(POLICY, group_size=4)


@pytest.mark.parametrize(
    "probation",
    [
        pytest.param(ProbationPolicy(), marks=pytest.mark.slow),
        ProbationPolicy(rounds=8, seconds=600.0),
    ],
)
def test_a_peer_that_rejoins_after_hours_takes_the_certified_version(
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
    swarm.call_at(4_000.0, swarm.crash, away)
    swarm.call_at(9_000.0, swarm.crash, gone)
    swarm.call_at(AWAY_S, swarm.restart, away)
    swarm.run(AWAY_S - 1.0)
    before = max(swarm.versions())
    swarm.run(AWAY_S + 4_000.0)

    assert settles(swarm, within_s=1_000.0)
    node = swarm.nodes[away]
    assert node.state is not None and node.state.version > before > 10
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


def test_the_others_of_a_meld_can_prove_its_version_though_one_died_before_it_had_it() -> None:
    """All have finished never comes: the coordinator shows them each other's signatures before."""
    plans = [PeerPlan(founder=number == 0) for number in range(8)]
    swarm = Swarm(4, plans, policy=GROUPS_OF_4, slices=1)
    swarm.policy = replace(swarm.policy, slice_bytes_min=1 << 20)  # one slice, whatever travels
    crashed: list[tuple[bytes, Peer]] = []

    def crash(node: Peer, note: Note) -> None:
        part = node.machine.own_round
        if note.event != "learned_seal" or part is None or swarm.now < 20.0 or crashed:
            return
        if not part.coordinates and not part.reducer.slices and len(part.commit.members) > 3:
            crashed.append((part.id, node))
            swarm.call_in(0.0, swarm.crash, node.name)

    swarm.on_note = crash
    while not crashed:
        assert swarm.now < 120.0
        swarm.run(swarm.now + 0.1)
    swarm.run(swarm.now + POLICY.margin_s + 4.0)

    round_id, dead = crashed[0]
    finished = [
        node
        for node in swarm.trainers()
        if node is not dead
        and (head := node.machine.outcomes.head(round_id)) is not None
        and node.state is not None
        and node.state.lineage == head.lineage
    ]
    assert len(finished) >= 2
    assert all(node.machine.certificates.is_proven(node.now()) for node in finished)


def _two_sides(trusted: Sequence[int]) -> tuple[Swarm, list[bool]]:
    """Two founders' friends who never saw each other work, and peers that an owner vouches for.

    The sides begin with one state, as those of a partition do, and see each other later.
    """
    together = [False]
    slow = replace(POLICY, probation=ProbationPolicy(rounds=8, seconds=40.0))
    plans = [PeerPlan(founder=number == 0, step_time_s=1.0 + number // 4) for number in range(8)]

    def sees(one: Peer, other: Peer) -> bool:
        return together[0] or (one.name in swarm.names[:4]) == (other.name in swarm.names[:4])

    swarm = Swarm(3, plans, policy=slow, sees=sees)
    swarm.keep_events = True
    vouched = {swarm.names[number] for number in trusted}

    def vouch(node: Peer) -> None:
        electors = node.averager.electors
        assert isinstance(electors, Probation)
        electors.trusted = vouched.__contains__

    swarm.on_start = vouch
    return swarm, together


def test_sides_of_which_neither_counts_anybody_of_the_other_stay_apart_and_say_so() -> None:
    """Neither can tell the other from what a stranger made up with many keys."""
    swarm, together = _two_sides(trusted=())
    swarm.run(150.0)
    together[0] = True
    swarm.run(150.0 + 4 * POLICY.doubt_s)

    assert len(swarm.lineages()) == 2
    assert min(swarm.versions()) >= 15, "both go on"
    told = {name for _, name, note in swarm.events if note.event == "stays_apart"}
    assert told and told <= set(swarm.names[4:]), "the lighter side, which would have to move"


def test_sides_that_cannot_judge_each_other_meet_where_the_owner_vouches_for_enough() -> None:
    swarm, together = _two_sides(trusted=(0, 1, 2))
    swarm.run(100.0)
    together[0] = True
    assert settles(swarm, within_s=60.0 + 4 * POLICY.doubt_s)

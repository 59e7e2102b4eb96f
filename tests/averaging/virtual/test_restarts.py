"""A member that is restarted again and again: what it costs the others, and itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from averaging.round.interface.effects import Apply, Note
from averaging.rules.policy import ProbationPolicy
from averaging.virtual.swarm import Peer, PeerPlan
from dht.memory.network import Weather
from tests.averaging.virtual.false_reducers import first_for_all
from tests.averaging.virtual.liars import SwarmWithLiars
from tests.averaging.virtual.swarm import POLICY, Storm, Swarm, mend, weather_out
from tests.seeds import seeds

MOMENTS = (
    *("gathering", "closed", "entered", "sealed", "learned_seal", "applying", "finished"),
    *("took_over", "ballot_started", "ballot_gathers", "reassigned", "promised", "forswearing"),
    *("forsworn_void", "gave_up", "in_doubt", "joining", "told_closed", "took_slice"),
    "heard_finished",
)
STORM = Storm(rough_s=160.0, calm_s=250.0)


@pytest.mark.parametrize("event", ["learned_seal", pytest.param("closed", marks=pytest.mark.slow)])
def test_a_member_killed_at_the_worst_moments_costs_the_others_few_versions(event: str) -> None:
    """It takes its upload and its slice, or the joins that it has noted, with it. Each new life had
    the same parts again, and half of the versions were made."""

    def versions(*, killed: bool) -> int:
        swarm = Swarm(1, [PeerPlan(founder=not number) for number in range(6)])

        def on_note(peer: Peer, note: Note) -> None:
            if killed and peer.name == swarm.names[-1] and note.event == event:
                swarm.call_in(0.0, swarm.crash, peer.name)
                swarm.call_in(0.5, swarm.restart, peer.name)

        swarm.on_note = on_note
        swarm.run(140.0)
        swarm.on_note = None
        return max(swarm.versions())

    assert versions(killed=True) > 0.75 * versions(killed=False)


@pytest.mark.parametrize(
    ("count", "restarted", "versions_min"),
    [
        pytest.param(2, 1, 19, marks=pytest.mark.slow),
        pytest.param(3, 2, 19, marks=pytest.mark.slow),
        (5, 2, 20),
    ],
)
def test_restarts_of_several_at_once_cost_a_version_each_time(
    count: int, restarted: int, versions_min: int
) -> None:
    """Of 23: nobody is given less of a part where half of the members would have none."""
    swarm = Swarm(1, [PeerPlan(founder=not number) for number in range(count)])
    for at in (60.0, 120.0, 180.0):
        for name in swarm.names[-restarted:]:
            swarm.call_at(at, swarm.crash, name)
            swarm.call_at(at + 2.0, swarm.restart, name)

    swarm.run(240.0)

    assert max(swarm.versions()) >= versions_min


@pytest.mark.parametrize("seed", range(1))
def test_a_member_whose_machine_crashes_every_minute_keeps_its_favour_and_gets_its_work_merged(
    seed: int,
) -> None:
    policy = replace(POLICY, audit_rate=0.4)
    swarm = Swarm(seed, [PeerPlan(founder=not number) for number in range(6)], policy=policy)
    rng, name = random.Random(seed), swarm.names[-1]
    at = 0.0
    while (at := at + rng.uniform(30.0, 90.0)) < 280.0:
        swarm.call_at(at, swarm.crash, name)
        swarm.call_at(at + rng.uniform(0.5, 10.0), swarm.restart, name)

    swarm.run(280.0)

    for node in swarm.trainers():
        assert node.averager.reputation.has_power(name, node.now())
    merged = swarm.trainers()[0].state.merged  # type: ignore[union-attr]
    usual = merged[swarm.names[0]].tokens
    assert merged[name].tokens > 0.5 * usual
    assert max(swarm.versions()) > 22


@pytest.mark.slow  # a quarter of an hour of six peers
def test_a_member_on_a_slow_line_that_is_restarted_often_gets_its_work_merged() -> None:
    """It soon has no part in 16 rounds of each life, which costs it no work."""
    swarm = Swarm(1, [PeerPlan(founder=not number) for number in range(6)])
    rng, name = random.Random(1), swarm.names[-1]
    swarm.network.set_link(name, up_bytes_s=800.0)
    at = 0.0
    while (at := at + rng.uniform(75.0, 225.0)) < 800.0:
        swarm.call_at(at, swarm.crash, name)
        swarm.call_at(at + rng.uniform(0.5, 10.0), swarm.restart, name)

    swarm.run(800.0)

    merged = swarm.trainers()[0].state.merged  # type: ignore[union-attr]
    assert merged[name].tokens > 0.5 * merged[swarm.names[0]].tokens
    assert max(swarm.versions()) > 65


@pytest.mark.slow  # it measures, for ten minutes each
@pytest.mark.parametrize("away_s", [0.5, 12.0])
def test_a_member_restarted_before_each_audit_soon_merges_falsely_in_few_rounds(
    away_s: float,
) -> None:
    """Nobody can audit what it has lost. With one round without a part in each life it had 17 and
    14 false rounds of 59; one that stays is convicted after two. It still has one of twelve: as a
    leader it names itself a voter."""
    policy = replace(POLICY, audit_rate=0.4)
    swarm = SwarmWithLiars(1, [PeerPlan(founder=not number) for number in range(6)], policy=policy)
    (liar,) = swarm.liars
    first_for_all(swarm)
    false: set[bytes] = set()
    ended: set[bytes] = set()

    def on_apply(node: Peer, apply: Apply) -> None:
        if node.name != liar and apply.round in swarm.rounds_of_lies[liar]:
            false.add(apply.round)

    def on_note(node: Peer, note: Note) -> None:
        done = swarm.rounds_of_lies[liar] - ended
        if node.name == liar and note.event == "finished" and done:
            ended.update(done)
            swarm.call_in(0.0, swarm.crash, liar)
            swarm.call_in(away_s, swarm.restart, liar)

    swarm.on_apply, swarm.on_note = on_apply, on_note
    swarm.run(600.0)

    assert max(swarm.versions()) > 55
    assert 3 <= len(false) <= 8
    assert not any(node.averager.guard.convicted for node in swarm.trainers())


@pytest.mark.parametrize("partitions", [False, True])
@pytest.mark.parametrize("seed", seeds(1, soak=200))
def test_restarts_of_several_at_the_worst_moments_break_no_promise(
    seed: int, partitions: bool
) -> None:
    weather_out(restarts_at_the_worst_moments(seed, partitions=partitions), STORM)


def restarts_at_the_worst_moments(seed: int, *, partitions: bool) -> Swarm:
    """A swarm of which one to three peers at once are killed when somebody has got to a point."""
    rng = random.Random(seed * 7919 + 3)
    count = rng.randint(3, 7)
    weather = Weather(
        latency_s=rng.choice([(0.01, 0.05), (0.05, 0.5)]),
        jitter_s=rng.choice([0.0, 0.1]),
        bandwidth_bytes_s=rng.choice([1e6, 2e3, 500.0]),
        connection_loss=rng.choice([0.0, 0.0, 0.02]),
        duplicate=max(rng.choice([0.0, 0.1]), rng.choice([0.0, 0.1])),
        silence_s=rng.choice([2.0, 5.0]),
    )
    none, some = ProbationPolicy(), ProbationPolicy(rounds=8, seconds=40.0)
    policy = replace(
        POLICY,
        audit_rate=rng.choice([0.0, 0.4]),
        quorum=replace(POLICY.quorum, required=rng.choice([None, None, 2, "all"]), wait_s=8.0),
        probation=rng.choice([none, none, some]),
    )
    plans = [
        PeerPlan(
            founder=not number,
            clock_offset_s=rng.uniform(-1e5, 1e5),
            step_time_s=rng.choice([1.0, 1.0, 1.2]),
        )
        for number in range(count)
    ]
    slices, young = rng.randint(1, 4), rng.random() < 0.2
    swarm = Swarm(seed, plans, weather=weather, policy=policy, slices=slices, young=young)
    armed: list[str] = []
    """The moment to strike at, once for each time that it is let pass, and once more."""

    def arm() -> None:
        if swarm.now <= STORM.rough_s - 10.0:
            moment = rng.choice(MOMENTS)
            armed[:] = [moment] * (1 + rng.choice([0, 0, 0, 1, 2]))
            swarm.call_in(rng.uniform(4.0, 14.0), arm)

    def strike(node: Peer, note: Note) -> None:
        if not armed or note.event != armed[0]:
            return
        armed.pop()
        if armed:
            return
        killed = rng.choice([1, 1, 2, 2, 3])
        others = [each.name for each in swarm.alive if each is not node]
        if rng.random() < 0.6:
            victims = [node.name, *rng.sample(others, min(killed - 1, len(others)))]
        else:
            victims = rng.sample(others, min(killed, len(others)))
        delay_s = rng.choice([0.0, 0.0, 0.01, 0.05, 0.2, 1.0])
        for victim in victims:
            swarm.call_in(delay_s, swarm.crash, victim)
            away_s = rng.choice([0.1, 0.3, 0.5, 1.0, 3.0, 8.0])
            swarm.call_in(delay_s + away_s, swarm.restart, victim)
        if partitions and rng.random() < 0.5:
            side = [name for name in swarm.names if rng.random() < 0.5]
            swarm.call_in(rng.choice([0.0, 0.05, 0.3, 1.0, 3.0]), swarm.partition, [side])
            swarm.call_in(rng.choice([4.0, 10.0, 30.0, 60.0]), swarm.heal)

    swarm.on_note = strike
    swarm.call_at(20.0, arm)
    swarm.call_at(STORM.rough_s, mend, swarm)
    return swarm

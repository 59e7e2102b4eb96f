"""Mixing in a swarm of several groups: its arithmetic, and its effect on the peers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from averaging.numbers.arrays import Float32s
from peer.simulate.lifecycle import states_of
from peer.simulate.outcome import SwarmResult
from peer.simulate.problems.problem import LocalTraining
from peer.simulate.problems.quadratic import Quadratic
from peer.simulate.settings import Swarm
from peer.simulate.simulation import SimulatedSwarm, run


@dataclass(frozen=True)
class Still(Quadratic):
    """A problem without learning: parameters never change."""

    def learner(self, peers: Any, *, seed: int) -> LocalTraining:
        return _Still(self.first_values(seed))


class _Still:
    def __init__(self, values: Float32s) -> None:
        self.values = values

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        return 0.0


def experiment(**settings: Any) -> Swarm:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    small = {"outer.fragments": 1, "problem.size": 8, "outer.codec": "f32"}
    return Swarm().with_settings({**small, **given})


FRAGMENTS = 8


def variances(
    *, count: int, group_size: int, versions: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Variances of fragments by version, for peers that begin at random and learn nothing.

    Each fragment has groups of its own: their numbers are returned as well.
    """

    def begins_at(number: int) -> Float32s:
        return np.random.default_rng(number).standard_normal(8 * 8 * 16, dtype=np.float32)

    swarm = SimulatedSwarm(
        experiment(
            peers__count=count,
            peers__exchanges_max=FRAGMENTS,
            rounds__group_size=group_size,
            outer__fragments=FRAGMENTS,
        ),
        0,
        problem=Still(),
        begins_at=begins_at,
    )
    with swarm:
        found, groups = [], []
        for version in range(versions + 1):
            # Fragments are due one after the other, three seconds apart. A stream that overtakes
            # the commit's certificates is refused, and opened again after two.
            swarm.pass_time(24.0 * version + 2.9)
            states = [[states_of(peer)[f] for peer in swarm.alive] for f in range(FRAGMENTS)]
            assert {state.version for fragment in states for state in fragment} == {version + 1}
            found.append(
                [
                    np.stack([s.theta for s in each]).var(axis=0, dtype=np.float64).sum()
                    for each in states
                ]
            )
            groups.append([len({state.lineage for state in each}) for each in states])
    return np.array(found), np.array(groups)


@pytest.mark.slow  # a figure; the arithmetic: averaging/rules/test_mixing.py
@pytest.mark.parametrize(("count", "group_size"), [(32, 8), (20, 4)])
def test_the_variance_falls_at_each_mixing_round_as_theory_says(
    count: int, group_size: int
) -> None:
    """Factor (r-1)/(N-1) for N peers in r random groups (Moshpit SGD, arXiv 2103.03239)."""
    found, groups = variances(count=count, group_size=group_size, versions=3)
    ratios = found[1:] / found[:-1]
    expected = (groups[1:] - 1) / (count - 1)

    # In the middle: here and there a fragment's groups are dealt nearly as they were before.
    assert np.median(ratios / expected) == pytest.approx(1.0, rel=0.2)
    first = ratios[0] - expected[0]
    near = 3 * first.std() / np.sqrt(FRAGMENTS)  # three standard errors of the mean
    assert first.mean() == pytest.approx(0.0, abs=near), "nobody shares anything yet"


def test_mixing_does_not_change_the_mean_of_the_swarm() -> None:
    first = [
        np.random.default_rng([5, n]).standard_normal(1024, dtype=np.float32) for n in range(12)
    ]
    swarm = SimulatedSwarm(
        experiment(peers__count=12, rounds__group_size=4, end__cycles=5.0),
        5,
        problem=Still(),
        begins_at=lambda number: first[number],
    )
    with swarm:
        swarm.run()
        states = [states_of(peer)[0].theta for peer in swarm.alive]

    places = swarm.lives.places.read(0, np.mean(first, axis=0))
    np.testing.assert_allclose(np.mean(states, axis=0), places, atol=1e-5)


SEVERAL_GROUPS: dict[str, Any] = {
    "peers__count": 24,
    "rounds__group_size": 6,
    "end__cycles": 16.0,
    "problem__size": 4,
    "outer__codec": "int4",
}


@cache
def several_groups(**settings: Any) -> SwarmResult:
    return run(experiment(**{**SEVERAL_GROUPS, **settings}), 3)


@pytest.mark.slow  # a swarm of 24; the variance above falls by mixing alone
def test_peers_of_several_groups_stay_near_each_other() -> None:
    late = [point.dispersion for point in several_groups().points]
    assert late[-1] < 1.5 * late[len(late) // 2], "it is bounded"


@pytest.mark.slow  # averaging/virtual/test_schedules.py heals partitions of a few versions
def test_after_a_partition_one_group_has_one_lineage_within_three_rounds() -> None:
    """Two halves train apart for fifty versions; then all peers fit into one group."""
    cut = {"kind": "partition", "at_s": 60.0, "lasts_s": 50 * 24.0, "peers": 0.5}
    settings: dict[str, Any] = {"peers__count": 8, "rounds__group_size": 8, "end__cycles": 66.0}
    settings |= {"event": [cut], "outer__fragments": 2}
    healed_at = 60.0 + 50 * 24.0
    with SimulatedSwarm(experiment(**settings), 1, problem=Quadratic(spread=0.1)) as swarm:
        swarm.pass_time(healed_at - 1.0)
        states = [states_of(peer) for peer in swarm.alive]
        apart = [{each[f].lineage for each in states} for f in (0, 1)]
        before = [max(each[f].version for each in states) for f in (0, 1)]
        halves = [point for point in swarm.points if point.time_s < healed_at][-1]
        result = swarm.run()

    assert [len(lineages) for lineages in apart] == [2, 2]
    assert min(before) > 45
    for fragment in (0, 1):
        healed = [
            record
            for record in result.rounds
            if record.fragment == fragment and record.time_s > healed_at
        ]
        assert "meld" in {record.kind for record in healed[:3]}
        assert all((r.kind, r.contributors) == ("merge", 8) for r in healed[3:]) and healed[3:]
    assert result.final.lineages == 1.0
    merged = result.fate.merged / result.fate.processed
    assert merged > 0.97, "the tokens of both halves count"
    after = [point.loss for point in result.points if point.time_s > healed_at]
    assert max(after) < 1.05 * halves.peer_loss, "the loss does not jump for either half"


@pytest.mark.slow  # storms of several groups have partitions, too
def test_after_a_partition_of_several_groups_the_halves_are_as_near_as_before() -> None:
    cut = {"kind": "partition", "at_s": 240.0, "lasts_s": 12 * 24.0, "peers": 0.5}
    swarm = SimulatedSwarm(experiment(**SEVERAL_GROUPS, event=[cut]), 3)

    def between_halves(begin_s: float, end_s: float) -> float:
        """Mean distance between the means of the two halves."""
        distances = []
        for now in np.arange(begin_s, end_s, 24.0):
            swarm.pass_time(float(now))
            states = [states_of(peer) for peer in swarm.alive]
            thetas = [np.concatenate([state.theta for state in each]) for each in states]
            one, other = np.mean(thetas[:12], axis=0), np.mean(thetas[12:], axis=0)
            distances.append(float(np.linalg.norm(one - other)))
        return float(np.mean(distances))

    with swarm:
        before, during = between_halves(120.0, 240.0), between_halves(384.0, 528.0)
        after = between_halves(528.0 + 5 * 24.0, 768.0)
    assert during > 2 * before and after < 1.15 * before


@pytest.mark.slow  # storms pause peers, too
def test_a_peer_that_was_paused_for_long_catches_up_and_goes_on() -> None:
    nap = {"kind": "pause", "at_s": 100.0, "lasts_s": 200.0, "peers": [0, 7]}
    result = run(experiment(**SEVERAL_GROUPS, event=[nap]), 3)

    assert result.notes["caught_up"] >= 2
    assert result.final.version == pytest.approx(
        np.mean([record.version for record in result.rounds[-4:]]), abs=1.0
    )
    fate = result.fate
    assert fate.merged / fate.processed > 0.9

"""Mixing in a swarm of several groups: its arithmetic, and its effect on the peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from averaging.numbers.arrays import Float32s
from peer.simulate.lifecycle import states_of
from peer.simulate.problems.problem import LocalTraining
from peer.simulate.problems.quadratic import Quadratic
from peer.simulate.settings import Swarm
from peer.simulate.simulation import SimulatedSwarm


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

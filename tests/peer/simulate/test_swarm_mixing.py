"""Mixing in a swarm of several groups: its arithmetic, and its effect on the peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from averaging.numbers.arrays import Float32s
from peer.simulate.lifecycle import states_of
from peer.simulate.problems.problem import LocalTraining, Quadratic
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

"""Mixing in a swarm of several groups: its arithmetic, and its effect on the peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from averaging.history.chain import Chain
from averaging.history.state import FragmentState
from averaging.messages import Link, link_claim
from averaging.numbers.arrays import Float32s
from averaging.round.opinions.certificates import link_of
from dht.identity import PeerId
from peer.simulate import simulation
from peer.simulate.lifecycle import Lives, states_of
from peer.simulate.problems.problem import LocalTraining, Quadratic
from peer.simulate.settings import Swarm


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


FIRST = [np.random.default_rng([5, n]).standard_normal(1024, dtype=np.float32) for n in range(12)]


class Apart(Lives):
    """Peers that have each come to other parameters alone, and have signed each other's versions,
    as after a past that they share."""

    def states_of(self, name: PeerId) -> list[FragmentState]:
        states = []
        own_states = self._founded(self.layout, self.policy.mu, FIRST[self.slot_of[name].number])
        for first, own in zip(super().states_of(name), own_states, strict=True):
            links = (Link(0, first.lineage, 0), Link(1, own.lineage, 0))
            states.append(replace(own, version=1, chain=Chain(links)))
        return states

    def sign_first_versions(self) -> None:
        for peer in self.alive:
            for machine in peer.machines.values():
                assert machine.standing is not None
                link = link_of(machine.standing.head())
                claim = link_claim(peer.averager.topic, machine.fragment, link)
                signed = [(other, key.sign(claim)) for other, key in self.keys.items()]
                machine.certificates.hear(link, tuple(signed), self.now)


def test_mixing_does_not_change_the_mean_of_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Lives", Apart)
    swarm = simulation.SimulatedSwarm(
        experiment(peers__count=12, rounds__group_size=4, end__cycles=5.0), 5, problem=Still()
    )
    assert isinstance(swarm.lives, Apart)
    swarm.lives.call_at(0.0, swarm.lives.sign_first_versions)
    with swarm:
        swarm.run()
        states = [states_of(peer)[0].theta for peer in swarm.alive]

    places = swarm.lives.places.read(0, np.mean(FIRST, axis=0))
    np.testing.assert_allclose(np.mean(states, axis=0), places, atol=1e-5)

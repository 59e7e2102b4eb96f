"""Shared surroundings of the peers of one simulated swarm: clock, network, membership, problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from averaging.history.chain import Chain, ChainLink
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout
from averaging.rules.policy import RoundPolicy
from averaging.simulated.node import Watch
from averaging.simulated.wires import Wires
from dht.memory.event_heap import EventHeap
from dht.memory.network import SimulatedNetwork
from peer.simulate.problems.problem import Places, Problem
from peer.simulate.swarm.experiment import Experiment
from peer.simulate.swarm.membership import Membership
from peer.simulate.swarm.peer import SimulatedPeer
from peer.simulate.swarm.slots import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that the peers of one swarm share."""

    experiment: Experiment
    seed: int
    problem: Problem
    layout: Layout
    places: Places
    policy: RoundPolicy
    heap: EventHeap
    network: SimulatedNetwork
    wires: Wires[Watch]
    membership: Membership
    slots: list[Slot]
    rng: np.random.Generator
    """Draws everything that the experiment leaves to chance."""
    record: Callable[..., None]
    """``record(event, **fields)`` notes an incident in the trace and in the event log."""

    @property
    def alive(self) -> list[SimulatedPeer]:
        return [peer for slot in self.slots if (peer := slot.living) is not None]

    def founded(self, values: Float32s) -> list[FragmentState]:
        """The first state of each fragment, made from these parameters."""
        return [
            FragmentState.founded(self.layout.hash, index, self.places.read(index, values))
            for index in range(len(self.layout.fragments))
        ]

    def drifted(self, origin: Sequence[FragmentState], values: Float32s) -> list[FragmentState]:
        """The states of a peer that came to these parameters from the run's first ones, alone."""
        states = []
        for first, own in zip(origin, self.founded(values), strict=True):
            links = (ChainLink(0, first.lineage, 0), ChainLink(1, own.lineage, 0))
            states.append(replace(own, version=1, chain=Chain(links)))
        return states

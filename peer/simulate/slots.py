"""The places of a simulated swarm, and what all peers share.

A ``Slot`` is one peer, kept over all its incarnations; the ``Environment`` has clock, network,
membership, problem and slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from averaging.history.chain import Chain, ChainLink
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout
from averaging.rules.policy import RoundPolicy
from averaging.rules.sites import site_pass
from averaging.simulated.node import Watch
from averaging.simulated.wires import Wires
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap
from dht.memory.network import SimulatedNetwork
from peer.simulate.lines import BYTES_S_PER_MBIT
from peer.simulate.membership import Membership, Seen
from peer.simulate.peer import Pace, SimulatedPeer
from peer.simulate.problems.problem import LocalTraining, Places, Problem
from peer.simulate.settings import BadExperiment, Swarm

SITE_LATENCY_S = 0.0005


@dataclass(slots=True)
class PastLife:
    """Counters of an incarnation that has ended."""

    steps: int
    merged_steps: list[int]
    discarded_steps: list[int]
    left: bool
    """True if it left in order; otherwise it crashed."""


@dataclass(slots=True)
class Slot:
    """One peer, over all its incarnations."""

    number: int
    name: PeerId
    pace: Pace
    seen: Seen
    training: LocalTraining
    bytes_per_s: float = 0.0
    """Speed of its line as the peer knows it; 0: not known."""
    lies: bool = False
    """True if what it uploads is poison."""
    side: int = 0
    """Side of a partition; 0 outside of one."""
    lives: int = 0
    peer: SimulatedPeer | None = None
    past: list[PastLife] = field(default_factory=list)
    saved: list[FragmentState] | None = None
    """States at the last crash: the checkpoint to return with."""
    past_blocked_s: float = 0.0
    past_up_s: float = 0.0

    @property
    def living(self) -> SimulatedPeer | None:
        return self.peer if self.peer is not None and self.peer.alive else None

    @property
    def steps(self) -> int:
        """Steps made in all lives."""
        living = self.living
        return sum(life.steps for life in self.past) + (living.trainee.step if living else 0)

    @property
    def blocked_s(self) -> float:
        return self.past_blocked_s + (living.blocked_s() if (living := self.living) else 0.0)

    @property
    def up_s(self) -> float:
        return self.past_up_s + (living.up_s() if (living := self.living) else 0.0)

    def bury(self, peer: SimulatedPeer, *, left: bool = False) -> None:
        """Keep what is left of an incarnation that has just ended."""
        self.saved = peer.states
        self.past.append(
            PastLife(
                peer.trainee.step,
                [seat.own.merged_step for seat in peer.seats],
                [seat.own.discarded_steps for seat in peer.seats],
                left,
            )
        )
        self.past_blocked_s += peer.blocked_s()
        self.past_up_s += peer.up_s()


def slots_of(
    experiment: Swarm,
    problem: Problem,
    network: SimulatedNetwork,
    *,
    seed: int,
    rng: np.random.Generator,
) -> list[Slot]:
    """Create the slots of an experiment and give each peer its line in the network."""
    settings, links, outer = experiment.peers, experiment.weather, experiment.outer
    apart = [(chosen(each.peers, settings.count), each) for each in experiment.peer]
    width = len(str(settings.count - 1))
    low, high = (math.log(mbit) for mbit in links.mbit_s)
    slots: list[Slot] = []
    site: list[PeerId] = []
    for number in range(settings.count):
        name = PeerId(f"peer-{number:0{width}}")
        own = [each for numbers, each in apart if number in numbers]
        factor = settings.speeds[number % len(settings.speeds)]
        factor = next((each.speed for each in own if each.speed is not None), factor)
        if settings.speed_spread:
            factor *= math.exp(settings.speed_spread * rng.standard_normal())
        line = math.exp(low + (high - low) * rng.random()) * BYTES_S_PER_MBIT
        if links.site_size > 1:
            if number % links.site_size == 0:
                site = []
            site.append(name)
            if len(site) == links.site_size or number == settings.count - 1:
                network.share_line(  # with the bandwidth drawn for the last peer of the site
                    site, up_bytes_s=line, down_bytes_s=line, latency_s=SITE_LATENCY_S
                )
            line = links.site_mbit_s * BYTES_S_PER_MBIT
        up = down = line
        if links.lines:
            up, down = _bytes_s(links.lines[number % len(links.lines)])
        told = next((each.mbit_s for each in own if each.mbit_s is not None), None)
        if told is not None:
            up, down = _bytes_s(told)
        network.set_link(name, up_bytes_s=up, down_bytes_s=down)
        pace = Pace(
            step_time_s=settings.step_time_s * factor,
            jitter=settings.step_jitter,
            waits_after_steps=outer.overlap_steps if outer.waits else None,
            exchanges_max=settings.exchanges_max,
            misses=settings.misses,
            miss_steps=outer.steps_per_cycle // 2,
            snapshot_s=settings.snapshot_s,
        )
        known = min(up, down) if links.lines or told is not None else 0.0
        # The machines know the small model: to them all lines are so many times slower.
        bytes_s = known / links.bulk_factor or None
        label = _site(experiment, number, name)
        seen = Seen(name, pace.step_time_s, site=label, bytes_per_s=bytes_s)
        learner = problem.learner([number], seed=seed)
        lies = number >= settings.count - round(settings.liars * settings.count)
        slots.append(Slot(number, name, pace, seen, learner, known, lies))
    return slots


def chosen(peers: float | list[int], count: int) -> Sequence[int]:
    """The numbers of the peers that a setting means. Raises ``BadExperiment``."""
    if not isinstance(peers, list):
        return range(max(1, round(peers * count)))
    unknown = [number for number in peers if not 0 <= number < count]
    if unknown:
        raise BadExperiment(f"peers names peer {unknown[0]}; there are 0 to {count - 1}")
    return peers


def _bytes_s(line: tuple[float, float]) -> tuple[float, float]:
    return line[0] * BYTES_S_PER_MBIT, line[1] * BYTES_S_PER_MBIT


def _site(experiment: Swarm, number: int, name: PeerId) -> str | None:
    size = experiment.weather.site_size
    if size == 1 or not experiment.rounds.by_site:
        return None
    return site_pass(f"site-{number // size}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that the peers of one swarm share."""

    experiment: Swarm
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

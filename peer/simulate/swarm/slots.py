"""The places of a simulated swarm: one slot per peer, kept over all incarnations of that peer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from averaging.history.state import FragmentState
from averaging.rules.sites import site_pass
from dht.identity import PeerId
from dht.memory.network import SimulatedNetwork
from peer.simulate.problems.problem import LocalTraining, Problem
from peer.simulate.swarm.experiment import Experiment
from peer.simulate.swarm.membership import Seen
from peer.simulate.swarm.peer import Pace, SimulatedPeer

SITE_LATENCY_S = 0.0005
BYTES_S_PER_MBIT = 125e3


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
    experiment: Experiment,
    problem: Problem,
    network: SimulatedNetwork,
    *,
    seed: int,
    rng: np.random.Generator,
) -> list[Slot]:
    """Create the slots of an experiment and give each peer its line in the network."""
    settings, links, outer = experiment.peers, experiment.network, experiment.outer
    width = len(str(settings.count - 1))
    low, high = (math.log(mbit) for mbit in links.mbit_s)
    slots: list[Slot] = []
    site: list[PeerId] = []
    for number in range(settings.count):
        name = PeerId(f"peer-{number:0{width}}")
        factor = settings.speeds[number % len(settings.speeds)]
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
            up, down = (mbit * BYTES_S_PER_MBIT for mbit in links.lines[number % len(links.lines)])
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
        known = min(up, down) if links.lines else 0.0
        # The machines know the small model: to them all lines are so many times slower.
        told = known / links.bulk_factor or None
        seen = Seen(name, pace.step_time_s, site=_site(experiment, number, name), bytes_per_s=told)
        learner = problem.learner([number], seed=seed)
        lies = number >= settings.count - round(settings.liars * settings.count)
        slots.append(Slot(number, name, pace, seen, learner, known, lies))
    return slots


def _site(experiment: Experiment, number: int, name: PeerId) -> str | None:
    size = experiment.network.site_size
    if size == 1 or not experiment.rounds.by_site:
        return None
    return site_pass(f"site-{number // size}", name)

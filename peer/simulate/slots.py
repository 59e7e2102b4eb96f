"""The places of a simulated swarm: a ``Slot`` is one peer, kept over all its incarnations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from averaging.virtual.keys import CheapKey
from averaging.virtual.swarm import PeerPlan
from dht.identity import PeerId
from dht.memory.network import SimulatedNetwork
from peer.simulate.learner import Learner, Pace
from peer.simulate.names import codecs_of
from peer.simulate.problems.problem import LocalTraining, Problem
from peer.simulate.settings import BadExperiment, Swarm

SITE_LATENCY_S = 0.0005
SITE_MBIT_S = 1000.0
BYTES_S_PER_MBIT = 125e3


@dataclass(slots=True)
class PastLife:
    """Counters of an incarnation that has ended."""

    steps: int
    merged_steps: list[int]
    discarded_steps: list[int]
    left: bool = False
    """True if it left in order; otherwise it crashed."""


@dataclass(slots=True)
class Slot:
    """One peer, over all its incarnations."""

    number: int
    name: PeerId
    label: str
    """Its name in logs."""
    pace: Pace
    plan: PeerPlan
    training: LocalTraining
    lies: bool = False
    """True if what it uploads is poison."""
    merges_falsely: bool = False
    learner: Learner | None = None
    """That of the present life; ``None``: the peer is down."""
    past: list[PastLife] = field(default_factory=list)
    past_blocked_s: float = 0.0
    past_up_s: float = 0.0

    @property
    def is_in_training(self) -> bool:
        """True if it is up and has a state of each fragment."""
        return self.learner is not None and self.learner.began_at is not None

    @property
    def past_steps(self) -> int:
        """Steps made in former lives."""
        return sum(life.steps for life in self.past)

    @property
    def steps(self) -> int:
        """Steps made in all lives."""
        return self.past_steps + (self.learner.trainee.step if self.learner else 0)

    @property
    def blocked_s(self) -> float:
        return self.past_blocked_s + (self.learner.blocked_s() if self.learner else 0.0)

    @property
    def up_s(self) -> float:
        return self.past_up_s + (self.learner.up_s() if self.learner else 0.0)

    def bury(self) -> None:
        """Keep what is left of an incarnation that has just ended."""
        learner, self.learner = self.learner, None
        if learner is not None:
            steps, merged, lost = (
                learner.trainee.step,
                learner.merged_steps,
                learner.discarded_steps,
            )
            self.past.append(PastLife(steps, merged, lost))
            self.past_blocked_s += learner.blocked_s()
            self.past_up_s += learner.up_s()


def slots_of(
    experiment: Swarm, problem: Problem, *, seed: int, rng: np.random.Generator
) -> list[Slot]:
    """Create the slots of an experiment."""
    settings, links, outer = experiment.peers, experiment.weather, experiment.outer
    apart = [(chosen(each.peers, settings.count), each) for each in experiment.peer]
    width = len(str(settings.count - 1))
    starts, codecs = _starts(experiment), codecs_of(experiment)
    honest_reducers = settings.count - round(settings.false_reducers * settings.count)
    slots: list[Slot] = []
    for number in range(settings.count):
        own = [each for numbers, each in apart if number in numbers]
        factor = settings.speeds[number % len(settings.speeds)]
        factor = next((each.speed for each in own if each.speed is not None), factor)
        if settings.speed_spread:
            factor *= math.exp(settings.speed_spread * rng.standard_normal())
        pace = Pace(
            step_time_s=settings.step_time_s * factor,
            jitter=settings.step_jitter,
            waits_after_steps=outer.overlap_steps if outer.waits else None,
            misses=settings.misses,
            miss_steps=outer.steps_per_cycle // 2,
        )
        line = _told_line(experiment, number)
        plan = PeerPlan(
            step_time_s=pace.step_time_s,
            tokens_per_step=problem.step_tokens,
            starts_at=starts[number],
            founder=number == 0,
            site=_site(experiment, number),
            clock_offset_s=sum(each.clock_s for each in own),
            codecs=codecs,
            # The machines know the small model: to them all lines are so many times slower.
            bytes_per_s=None if line is None else min(line) / links.bulk_factor,
        )
        slots.append(
            Slot(
                number,
                CheapKey(number).peer_id,
                f"peer-{number:0{width}}",
                pace,
                plan,
                problem.learner([number], seed=seed),
                lies=number >= settings.count - round(settings.liars * settings.count),
                merges_falsely=number >= honest_reducers,
            )
        )
    return slots


def _starts(experiment: Swarm) -> list[float]:
    """When each peer starts for the first time."""
    count = experiment.peers.count
    late = {
        number: event.at_s
        for event in experiment.event
        for number in chosen(event.peers, count)
        if event.kind == "join"
    }
    return [late.get(number, 0.0) for number in range(count)]


def draw_lines(
    experiment: Swarm, slots: Sequence[Slot], network: SimulatedNetwork, rng: np.random.Generator
) -> None:
    """Give each peer its line in the network, and each site one that its peers share."""
    links = experiment.weather
    low, high = (math.log(mbit) for mbit in links.mbit_s)
    for first in range(0, len(slots), links.site_size):
        site = slots[first : first + links.site_size]
        for slot in site:
            up = down = line = math.exp(low + (high - low) * rng.random()) * BYTES_S_PER_MBIT
            if links.site_size > 1:
                up = down = SITE_MBIT_S * BYTES_S_PER_MBIT
            up, down = _told_line(experiment, slot.number) or (up, down)
            network.set_link(slot.name, up_bytes_s=up, down_bytes_s=down)
        if links.site_size > 1:  # with the bandwidth drawn for the last peer of the site
            network.share_line(
                [slot.name for slot in site],
                up_bytes_s=line,
                down_bytes_s=line,
                latency_s=SITE_LATENCY_S,
            )


def _told_line(experiment: Swarm, number: int) -> tuple[float, float] | None:
    """Bandwidths up and down in bytes a second, where the peer knows them."""
    lines, count = experiment.weather.lines, experiment.peers.count
    mbit_s = lines[number % len(lines)] if lines else None
    for each in experiment.peer:
        if each.mbit_s is not None and number in chosen(each.peers, count):
            mbit_s = each.mbit_s
            break
    return None if mbit_s is None else (mbit_s[0] * BYTES_S_PER_MBIT, mbit_s[1] * BYTES_S_PER_MBIT)


def chosen(peers: float | list[int], count: int) -> Sequence[int]:
    """The numbers of the peers that a setting means. Raises ``BadExperiment``."""
    if not isinstance(peers, list):
        return range(max(1, round(peers * count)))
    unknown = [number for number in peers if not 0 <= number < count]
    if unknown:
        raise BadExperiment(f"peers names peer {unknown[0]}; there are 0 to {count - 1}")
    return peers


def _site(experiment: Swarm, number: int) -> str | None:
    size = experiment.weather.site_size
    if size == 1 or not experiment.rounds.by_site:
        return None
    return f"site-{number // size}"

"""Are the rounds of the fragments spread over a cycle, and what does it cost if they are not?

``python -m tests.averaging.simulated.spacing_experiment`` prints the table; ``test_spacing.py``
holds the bar. Peers that start together have their first due times spread over a cycle. After a
time in which nobody could merge all fragments are overdue, and their rounds begin in one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from unittest.mock import patch

import msgspec

from averaging.round.interface.effects import Note
from averaging.rules import spacing
from averaging.simulated.node import FragmentNode
from peer.simulate.swarm.experiment import Event, Experiment
from peer.simulate.swarm.swarm import SimulatedSwarm
from tests.averaging.simulated.late_experiment import SMALL, Setting, experiment_of

WARM_UP_CYCLES = 8
"""Cycles after the last start that are not counted: some after the split as well."""


class ClosingsWatched(SimulatedSwarm):
    """A swarm that notes when rosters close, and how long after its offer a peer has the result."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        self.closings: dict[int, list[float]] = {}
        """Times by fragment."""
        self.latencies: list[tuple[float, float]] = []
        """For each round at a member, the time when it was over and the time since its offer."""
        self._offered: dict[tuple[str, int], float] = {}
        super().__init__(experiment, seed)

    def noted(self, node: FragmentNode, note: Note) -> None:
        super().noted(node, note)
        now, key = self.heap.now, (node.name, node.fragment.index)
        if note.event == "closed":
            self.closings.setdefault(node.fragment.index, []).append(now)
        elif note.event == "joining":
            self._offered.setdefault(key, now)
        elif note.event == "idle":
            self._offered.pop(key, None)
        elif note.event == "finished" and key in self._offered:
            self.latencies.append((now, now - self._offered.pop(key)))


def spread_at(now: float, closings: Mapping[int, Sequence[float]], cycle_s: float) -> float:
    """Share of a cycle over which the last closings of all fragments are spread.

    0: all in one moment; 1 less than the number of fragments over that number: evenly.
    """
    earlier = ([at for at in times if at <= now] for times in closings.values())
    last = sorted(times[-1] % cycle_s for times in earlier if times)
    gaps = [after - before for before, after in pairwise([*last, last[0] + cycle_s])]
    return 1.0 - max(gaps) / cycle_s


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one swarm."""

    spread: float
    used: float
    """Share of all uplinks that was used all of the time."""
    missed: float
    latency_s: float
    """Mean time from a member's offer until it has the new version."""
    rounds_per_min: float
    cycle_s: float
    """Median time between two closings of one fragment."""

    def __str__(self) -> str:
        return (
            f"{self.spread:>6.2f} {self.used:>6.1%} {self.missed:>7.1%} {self.latency_s:>8.2f}"
            f" {self.rounds_per_min:>7.1f} {self.cycle_s:>6.1f}"
        )


HEADER = f"{'spread':>6} {'used':>6} {'missed':>7} {'latency':>8} {'per min':>7} {'cycle':>6}"


def look(experiment: Experiment, seed: int) -> Row:
    """Simulate a swarm, and count from ``WARM_UP_CYCLES`` after the last start on."""
    swarm = ClosingsWatched(experiment, seed)
    since_s = experiment.peers.starts_within_s + WARM_UP_CYCLES * experiment.cycle_s
    sent: list[int] = []
    swarm.heap.call_at(since_s, lambda: sent.append(swarm.network.bytes_sent))
    result = swarm.run()
    cycles = [b - a for times in swarm.closings.values() for a, b in pairwise(times) if a > since_s]
    cycle_s = median(cycles)
    every = [at for times in swarm.closings.values() for at in times if at >= since_s]
    rounds = [each for each in result.rounds if each.time_s >= since_s]
    up_bytes_s = sum(slot.bytes_per_s for slot in swarm.slots)
    lasted_s = result.duration_s - since_s
    return Row(
        spread=fmean(spread_at(at, swarm.closings, cycle_s) for at in every),
        used=(result.bytes_sent - sent[0]) / (up_bytes_s * lasted_s),
        missed=1 - sum(each.contributors for each in rounds) / sum(each.live for each in rounds),
        latency_s=fmean(took for at, took in swarm.latencies if at >= since_s),
        rounds_per_min=60.0 * len(rounds) / lasted_s,
        cycle_s=cycle_s,
    )


def homes(step_time_s: float = 0.8, *, starts_within_s: float = 60.0) -> Experiment:
    """Three homes at 1 Mbit/s outwards, whose rounds take two thirds of their lines."""
    changes = {"peers__count": 3, "network__lines": [(1.0, 50.0)] * 3}
    setting = Setting(2.4e6, step_time_s)
    return experiment_of(
        setting,
        starts_within_s + 300.0,
        peers__snapshot_s=[0.3, 0.5],
        peers__starts_within_s=starts_within_s,
        **changes,
    )


def servers_and_homes(*, starts_within_s: float = 60.0) -> Experiment:
    """Six peers on lines that are much faster than their rounds need."""
    return experiment_of(SMALL, starts_within_s + 300.0, peers__starts_within_s=starts_within_s)


def split_up(experiment: Experiment) -> Experiment:
    """The same, and no two peers reach each other for 40 s, more than twice a cycle."""
    begins_s = experiment.peers.starts_within_s + 10.0
    split = Event(kind="partition", at_s=begins_s, lasts_s=40.0, peers=1.0)
    return msgspec.structs.replace(experiment, event=[split])


def main() -> None:
    for name, experiment in (
        ("three homes that start within 60 s", homes()),
        ("six peers that start together", servers_and_homes(starts_within_s=0.0)),
        ("six peers that start within 60 s", servers_and_homes()),
        ("the same, split up for 40 s", split_up(servers_and_homes())),
    ):
        for how, share in (("nothing moves", 0.0), ("now", spacing.SHIFT_OF_CYCLE_MAX)):
            print(f"{name}, {how}\n{HEADER}")  # noqa: T201
            with patch.object(spacing, "SHIFT_OF_CYCLE_MAX", share):
                for seed in range(3):
                    print(look(experiment, seed))  # noqa: T201


if __name__ == "__main__":
    main()

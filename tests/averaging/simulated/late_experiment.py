"""Rounds of homes and small servers: how many miss a round, and what it costs in bytes.

``python -m tests.averaging.simulated.late_experiment`` prints the tables; ``test_late_members.py``
holds the bars. Six peers on lines of 20, 50 and 100 Mbit/s, 40 to 140 ms apart, train 10.7 and
25.4 million parameters in four fragments; copying a fragment out takes a learner 1.3 to 4 s.

``slow_experiment`` adds a seventh whose line drops from 20 Mbit/s for some minutes. The rounds of
the others are compared with those of the six beside a seventh that crashes for that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from averaging.numbers.codecs import codec_named
from averaging.round.interface.effects import Note
from averaging.simulated.node import FragmentNode
from peer.simulate.problems.problem import layout_of
from peer.simulate.swarm.experiment import Experiment
from peer.simulate.swarm.resolving import problem_of
from peer.simulate.swarm.slots import BYTES_S_PER_MBIT
from peer.simulate.swarm.swarm import SimulatedSwarm, run

LINES = [(50.0, 50.0), (100.0, 100.0), (20.0, 20.0), (20.0, 50.0), (20.0, 50.0), (20.0, 50.0)]
"""Mbit/s up and down of three servers and three homes."""

WARM_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    parameters: float
    step_time_s: float


SMALL = Setting(10.7e6, step_time_s=0.5)
LARGE = Setting(25.4e6, step_time_s=0.7)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one swarm after its warm-up."""

    setting: Setting
    rounds: int
    missed: float
    """Share of live peers that contributed nothing to a round."""
    extra: float
    """Bytes on the wire over those of the rounds' slices, minus one."""
    fetched: float
    """Bytes fetched for catching up, over those of the rounds' slices."""
    discarded: int
    rounds_per_min: float

    def __str__(self) -> str:
        return (
            f"{self.setting.parameters / 1e6:>5.1f} M {self.rounds:>6} {self.rounds_per_min:>7.1f}"
            f" {self.missed:>7.1%} {self.extra:>7.1%} {self.fetched:>7.1%} {self.discarded:>6}"
        )


HEADER = f"{'model':>7} {'rounds':>6} {'per min':>7} {'missed':>7} {'extra':>7} {'caught':>7} stale"


def experiment_of(setting: Setting, duration_s: float, **settings: Any) -> Experiment:
    """The peers, their lines and their model, with changed settings of ``peers``, ``network``."""
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    experiment = Experiment().with_settings(
        {
            "peers.count": len(LINES),
            "peers.step_time_s": setting.step_time_s,
            "peers.speeds": [1.0, 1.1, 1.25],
            "peers.step_jitter": 0.1,
            "peers.snapshot_s": [1.3, 4.0],
            "network.latency_s": [0.02, 0.07],
            "network.lines": LINES,
            "end.tokens": 10**12,
            "end.time_s": duration_s,
            "measure.every_cycles": 1000.0,
            **changes,
        }
    )
    layout = layout_of(problem_of(experiment), experiment.outer.fragments)
    factor = setting.parameters / layout.size
    slice_bytes = max(1, int(experiment.rounds.slice_bytes_min / factor))
    return experiment.with_settings(
        {"network.bulk_factor": factor, "rounds.slice_bytes_min": slice_bytes}
    )


def late_experiment(setting: Setting, seed: int, *, duration_s: float = 600.0) -> Row:
    """Simulate ten minutes of six peers."""
    experiment = experiment_of(setting, duration_s)
    layout = layout_of(problem_of(experiment), experiment.outer.fragments)
    factor = experiment.network.bulk_factor
    result = run(experiment, seed)
    encode = codec_named(experiment.outer.codec).encoded_size
    sizes = [factor * encode(fragment.unit_sizes) for fragment in layout.fragments]
    rounds = result.rounds
    payload = sum(2 * (each.contributors - 1) * sizes[each.fragment] for each in rounds)
    counted = [each for each in rounds if each.time_s >= WARM_UP_S]
    there = sum(each.contributors for each in counted)
    return Row(
        setting,
        rounds=len(counted),
        missed=1.0 - there / sum(each.live for each in counted),
        extra=result.bytes_sent / payload - 1.0,
        fetched=result.fetched_bytes / payload,
        discarded=result.notes.get("stale", 0),
        rounds_per_min=len(rounds) * 60.0 / result.duration_s,
    )


@dataclass(frozen=True, slots=True)
class UseRow:
    """Figures of homes that have nobody but each other."""

    used: float
    """Share of their uplinks, all of the time."""
    missed: float

    def __str__(self) -> str:
        return f"uplinks used: {self.used:.1%}, member-rounds missed: {self.missed:.1%}"


DROPS_AT_S = 90.0
FULL_MBIT = 20.0
AFTERWARDS_S = 120.0


class _Watched(SimulatedSwarm):
    """A swarm whose last peer's line drops for a while, and what is noted of that peer."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        super().__init__(experiment, seed)
        self.slow = self.slots[-1]
        self.contained: list[tuple[float, int]] = []
        """The times at which a version with its work was here, with the fragment."""
        self.decisions: list[tuple[float, int, int]] = []
        """The times at which it decided to take part in one version of so many, with the fragment.
        """
        self.stale = 0

    def noted(self, node: FragmentNode, note: Note) -> None:
        super().noted(node, note)
        if node.name != self.slow.name:
            return
        if note.event == "finished" and note.fields["contained"]:
            self.contained.append((self.heap.now, node.fragment.index))
        elif note.event == "takes_part":
            every = note.fields["every"]
            assert isinstance(every, int)
            self.decisions.append((self.heap.now, node.fragment.index, every))
        self.stale += note.event == "stale"


@dataclass(frozen=True, slots=True)
class SlowRow:
    """Figures of a swarm in which one line drops for a while."""

    mbit: float
    others: float
    """Rounds of the others while it is slow, over those beside a peer that is away."""
    contained: int
    """Contributions of the slow peer while it is slow."""
    back_cycles: float
    """Cycles until each fragment has its work again, from the moment its line is as before."""
    decisions: int
    """Most changes of how often it takes part, of a fragment."""
    stale: int

    def __str__(self) -> str:
        return (
            f"{self.mbit:>7.1f} {self.others:>7.1%} {self.contained:>9} {self.back_cycles:>6.1f}"
            f" {self.decisions:>8} {self.stale:>5}"
        )


SLOW_HEADER = f"{'Mbit/s':>7} {'others':>7} {'took part':>9} {'back':>6} {'changes':>8} stale"


def seven_peers(setting: Setting, seed: int, end_s: float) -> _Watched:
    lines = [*LINES, (FULL_MBIT, FULL_MBIT)]
    changes = {"peers__count": len(lines), "network__lines": lines}
    return _Watched(experiment_of(setting, end_s, **changes), seed)


def rounds_meanwhile(swarm: _Watched, lasts_s: float) -> int:
    """Run a swarm, and count the rounds while the line of its last peer is slow."""
    return sum(DROPS_AT_S <= each.time_s < DROPS_AT_S + lasts_s for each in swarm.run().rounds)


@cache
def rounds_without(setting: Setting, seed: int, lasts_s: float) -> int:
    """The same where the last peer is away for that time."""
    swarm = seven_peers(setting, seed, DROPS_AT_S + lasts_s)
    swarm.heap.call_at(DROPS_AT_S, swarm.lifecycle.crash, swarm.slow, lasts_s)
    return rounds_meanwhile(swarm, lasts_s)


def slow_experiment(setting: Setting, seed: int, mbit: float, *, lasts_s: float = 180.0) -> SlowRow:
    """Simulate seven peers, one of which is on a line of ``mbit`` for a while."""
    back_at = DROPS_AT_S + lasts_s
    swarm = seven_peers(setting, seed, back_at + AFTERWARDS_S)
    experiment = swarm.experiment
    change = swarm.lifecycle.change_line
    swarm.heap.call_at(DROPS_AT_S, change, swarm.slow, mbit * BYTES_S_PER_MBIT)
    swarm.heap.call_at(back_at, change, swarm.slow, FULL_MBIT * BYTES_S_PER_MBIT)
    rounds = rounds_meanwhile(swarm, lasts_s)
    fragments = range(experiment.outer.fragments)
    back_s = [
        min((at for at, found in swarm.contained if found == each and at >= back_at), default=inf)
        for each in fragments
    ]
    return SlowRow(
        mbit,
        others=rounds / rounds_without(setting, seed, lasts_s),
        contained=sum(DROPS_AT_S <= at < back_at for at, _ in swarm.contained),
        back_cycles=(max(back_s) - back_at) / experiment.cycle_s,
        decisions=max(sum(found == each for _, found, _ in swarm.decisions) for each in fragments),
        stale=swarm.stale,
    )


def uplinks_in_use(
    seed: int, *, step_time_s: float = 0.6, duration_s: float = 300.0, **settings: Any
) -> UseRow:
    """Simulate three homes at 1 Mbit/s outwards.

    Each sends four thirds of a payload in a cycle: two thirds of its own upload, and a third of the
    merged slices to both others. With steps of 0.6 s that is about as much as the lines carry.
    """
    lines, up_bytes_s = [(1.0, 50.0)] * 3, 3 * BYTES_S_PER_MBIT
    changes = {"peers__count": 3, "network__lines": lines, "peers__snapshot_s": [0.3, 0.5]}
    changes |= settings
    experiment = experiment_of(Setting(2.4e6, step_time_s), duration_s, **changes)
    result = run(experiment, seed)
    there = sum(each.contributors for each in result.rounds)
    return UseRow(
        used=result.bytes_sent / (up_bytes_s * result.duration_s),
        missed=1.0 - there / sum(each.live for each in result.rounds),
    )


def slow_gathering(seed: int, line_share: float) -> UseRow:
    """The same homes where a roster gathers for about 2 s of a cycle of 12 to 20 s."""
    return uplinks_in_use(
        seed,
        step_time_s=0.42,
        peers__snapshot_s=[1.5, 2.0],
        outer__line_share=line_share,
        outer__steps_per_cycle_max=240,
    )


if __name__ == "__main__":
    print(HEADER)  # noqa: T201
    for setting in (SMALL, LARGE):
        for seed in range(3):
            print(late_experiment(setting, seed))  # noqa: T201
    print(SLOW_HEADER)  # noqa: T201
    for mbit in (1.0, 3.0, 4.0, 5.0, 8.0):
        for seed in range(2):
            print(slow_experiment(SMALL, seed, mbit))  # noqa: T201
    for seed in range(3):
        print(uplinks_in_use(seed))  # noqa: T201
    for step_s, follows in ((0.42, False), (0.42, True), (0.35, True)):
        cycles = {"outer__steps_per_cycle_max": 240} if follows else {}
        print(f"steps of {step_s} s, cycles that {'follow the lines' if follows else 'stay'}")  # noqa: T201
        for share in (0.7, 0.9, 1.0):
            for seed in range(2):
                row = uplinks_in_use(seed, step_time_s=step_s, outer__line_share=share, **cycles)
                print(f"line_share {share}: {row}")  # noqa: T201
    print("rosters gather for 2 s, steps of 0.42 s, cycles that follow the lines")  # noqa: T201
    for share in (0.7, 0.9, 1.0):
        for seed in range(3):
            print(f"line_share {share}: {slow_gathering(seed, share)}")  # noqa: T201

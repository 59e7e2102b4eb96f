"""Rounds of homes and small servers: how many miss a round, and what it costs in bytes.

``python -m tests.averaging.simulated.late_experiment`` prints the table; ``test_late_members.py``
holds the bars. Six peers on lines of 20, 50 and 100 Mbit/s, 40 to 140 ms apart, train 10.7 and
25.4 million parameters in four fragments; copying a fragment out takes a learner 1.3 to 4 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from averaging.numbers.codecs import codec_named
from peer.lab.simulate.problems.problem import layout_of
from peer.lab.simulate.swarm.experiment import Experiment
from peer.lab.simulate.swarm.resolving import problem_of
from peer.lab.simulate.swarm.swarm import run

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


def late_experiment(setting: Setting, seed: int, *, duration_s: float = 600.0) -> Row:
    """Simulate ten minutes of six peers."""
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
        }
    )
    layout = layout_of(problem_of(experiment), experiment.outer.fragments)
    factor = setting.parameters / layout.size
    slice_bytes = max(1, int(experiment.rounds.slice_bytes_min / factor))
    experiment = experiment.with_settings(
        {"network.bulk_factor": factor, "rounds.slice_bytes_min": slice_bytes}
    )
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


if __name__ == "__main__":
    print(HEADER)  # noqa: T201
    for setting in (SMALL, LARGE):
        for seed in range(3):
            print(late_experiment(setting, seed))  # noqa: T201

"""Cycles of other lengths with real peers: ``python -m tests.benchmark.short_cycles``.

The swarm of ``shoal demo`` without its kill: four learners, each with an agent and a daemon, whose
steps take ``--pace`` to 1.5 times as many seconds, with other settings of the run file. One line a
run: held-out loss at the end; mean steps of a learner; rounds a minute; share of the tokens that is
merged in the end; share of the time for which trainers were blocked; and, from the first round of
all four on, steps between two merges of a fragment as a cycle really took, share of the cycles
that passed at a learner without a merge, and median time of a round from commit to adoption.

    python -m tests.benchmark.short_cycles --cycles 24 --set outer.momentum=0.5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from peer.demo.demo import Demo, DemoSettings, Result
from peer.demo.report import compare
from peer.views.event_log import read_events

LINE = "{:>5} {:>3} {:>6} {:>6} {:>11} {:>7} {:>8} {:>6} {:>7} {:>9}"
HEAD = ("H", "P", "loss", "steps", "rounds/min", "merged", "blocked", "cycle", "missed", "round ms")
FRAGMENTS_MAX = 4


class Cycles(NamedTuple):
    """What became of the cycles while all were there."""

    steps: float
    """Own steps between two merges of a fragment with a learner's work, mean of all learners."""
    missed: float
    """Share of the cycles, each as long as the run file says, that passed without one."""
    round_s: float


def cycles_of(result: Result, cycle_steps: int) -> Cycles:
    step_s = statistics.median(each.progress["step_time_s"] for each in result.learners)
    gaps, cycles, seconds = [], [], []
    for learner in result.learners:
        merged_at: dict[int, list[int]] = {}
        for event in read_events(learner.directory / "events.jsonl"):
            if event["event"] != "round":
                continue
            seconds.append(event["seconds"])
            whole = len(event["members"]) == len(result.learners)
            if event["contributed"] and (whole or merged_at):
                _, step, *_ = event["marks"][learner.progress["peer"]]
                merged_at.setdefault(event["fragment"], []).append(step)
        own = [after - before for at in merged_at.values() for before, after in pairwise(at)]
        gaps.append(statistics.mean(own))
        # A slow learner makes fewer steps in a cycle.
        interval = cycle_steps * step_s / learner.progress["step_time_s"]
        cycles += [max(1, round(gap / interval)) for gap in own]
    return Cycles(
        statistics.mean(gaps), 1.0 - len(cycles) / sum(cycles), statistics.median(seconds)
    )


def trial(
    changes: Mapping[str, Any], cycle_steps: int, *, steps: int, pace_s: float, folder: Path
) -> list[str]:
    """Run one swarm; returns its figures, from the loss on, as texts."""
    settings = DemoSettings(
        steps=steps, pace_s=pace_s, directory=folder, changes=changes, kills=False
    )
    with Demo(settings) as swarm:
        result = swarm.run(lambda: None)
    loss, cycles = compare(settings, result).loss_end, cycles_of(result, cycle_steps)
    minutes = max(each.progress["trained_s"] for each in result.learners) / 60
    return [
        f"{loss:.3f}",
        f"{statistics.mean(each.steps for each in result.learners):.0f}",
        f"{result.rounds / minutes:.0f}",
        f"{result.tokens['merged'] / result.tokens['processed']:.1%}",
        f"{result.blocked_fraction:.2%}",
        f"{cycles.steps:.1f}",
        f"{cycles.missed:.1%}",
        f"{1000 * cycles.round_s:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, nargs="+", default=[24, 8, 4, 2])
    parser.add_argument("--fragments", type=int, help="default: half of the cycle, at most four")
    parser.add_argument("--pace", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as in TOML")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep all files of the runs here")
    options = parser.parse_args()
    print(LINE.format(*HEAD), flush=True)
    for number in range(options.repeat):
        for cycle in options.cycles:
            fragments = options.fragments or max(1, min(FRAGMENTS_MAX, cycle // 2))
            changes = {
                "outer.steps_per_cycle": cycle,
                "outer.overlap_steps": max(1, cycle // 4),
                "outer.fragments": fragments,
            }
            for name, _, value in (each.partition("=") for each in options.set):
                changes[name] = tomllib.loads(f"value = {value}")["value"]
            with tempfile.TemporaryDirectory() as new:
                folder = Path(new) if options.folder is None else options.folder
                figures = trial(
                    changes,
                    cycle,
                    steps=options.steps,
                    pace_s=options.pace,
                    folder=folder / f"{cycle}-{number}",
                )
            print(LINE.format(cycle, fragments, *figures), flush=True)


if __name__ == "__main__":
    main()

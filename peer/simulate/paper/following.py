"""`shoal simulate compare --following`: rounds that follow the line, against fixed settings.

On each line a swarm trains with the levels of its rounds chosen by ``averaging.rules.line_levels``,
and with fixed codecs and cycles: for each codec the shortest cycle that takes ``FIXED_SHARE`` of
the line at most, and the settings from which the rule starts, whether the line carries them or not.
All rows make equally many steps in the same time. Compared are the losses of the mean of all
learners' parameters at its end, as after a last merge: merged parameters lag by up to a cycle, by
chance, which would hide what a cycle costs. Model, time and traffic are those of
``peer.simulate.paper.compare``.

Peers know the speed of their lines, as after the first transfers; simulated learners never wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import Level, Line
from peer.results import Mean, Section, finished_png, new_axes, picture, plain_ticks
from peer.simulate.paper import compare
from peer.simulate.paper.training import (
    Job,
    LevelChange,
    RunJobs,
    Trained,
    against,
    by_name,
    run_jobs,
)
from peer.simulate.swarm.experiment import Experiment
from peer.simulate.swarm.slots import BYTES_S_PER_MBIT

LINKS_MBIT = (10.0, 50.0, 200.0, 1000.0)
FIRST = Level(codec="int4", codec_down="int4", cycle_steps=30)
"""Level that the rule prefers."""
FIXED_CODECS = (("int4", "int4"), ("int2", "int4"), ("int2", "int2"))
FIXED_SHARE = 0.75
"""Largest share of the line that a fixed setting takes. Above that peers sit versions out
(``averaging.rules.line_pace``), as they do with ``FIRST`` on slow lines."""
FOLLOWING: Mapping[str, Mapping[str, Any]] = {
    "follows the line, H to 960": {
        "outer.smaller_codecs": ["int2/int4", "int2"],
        "outer.steps_per_cycle_max": 960,
    },
    "as a new run of 124m": {
        "outer.smaller_codecs": ["int2/int4"],
        "outer.steps_per_cycle_max": 120,
    },
}
OVERLAP_STEPS = 6
"""tau of a new run."""
BEHIND_MAX = 0.02
"""Largest acceptable distance of the loss from that of the best fixed setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting on one line, over its seeds."""

    link_mbit: float
    label: str
    follows: bool
    loss: Mean
    behind: Mean
    """Relative distance of the loss from the best fixed setting's, paired by seed."""
    line_share: float
    """Share of the line, in each direction, that all traffic took."""
    computing: float
    """Share of the time in which learners computed."""
    missed: float
    duration_s: float
    last: str
    """Level of the last rounds."""
    changes: int
    """Largest number of changes of the level of one fragment at one peer."""
    settled_s: float
    """Time of the last change; 0: none."""
    reason: str
    """Reason of the last decision about a line."""


def fixed_levels(setting: compare.Setting, step_s: float, *, link_mbit: float) -> list[Level]:
    """The fixed settings that are compared on a line: ``FIRST``, then one for each codec."""
    line = Line(
        bytes_per_s=link_mbit * BYTES_S_PER_MBIT,
        step_s=step_s,
        fragments=1,
        members=setting.learners,
        share_max=FIXED_SHARE,
    )

    def encoded_bytes(codec: str) -> int:
        return codec_named(codec).encoded_size([int(setting.parameters)])

    found = [FIRST]
    for up, down in FIXED_CODECS:
        shortest = Level(codec=up, codec_down=down, cycle_steps=FIRST.cycle_steps)
        share = line.share_of(encoded_bytes, shortest)
        steps = math.ceil(FIRST.cycle_steps * max(1.0, share / FIXED_SHARE))
        found.append(Level(codec=up, codec_down=down, cycle_steps=steps))
    return list(dict.fromkeys(found))


def experiment_of(
    setting: compare.Setting,
    settings: Mapping[str, Any],
    *,
    step_s: float,
    link_mbit: float,
    latency_s: float,
    changes: Mapping[str, Any] | None = None,
) -> Experiment:
    """A swarm on one line, which lasts ``setting.cycles`` cycles of ``FIRST``."""
    steps = setting.cycles * FIRST.cycle_steps
    own = {"outer.steps_per_cycle": FIRST.cycle_steps, **settings}
    cycles = steps / own["outer.steps_per_cycle"]
    return compare.experiment_of(
        setting,
        step_s=step_s,
        link_mbit=link_mbit,
        latency_s=latency_s,
        changes={
            "network.lines": [(link_mbit, link_mbit)],
            "outer.overlap_steps": OVERLAP_STEPS,
            "end.cycles": cycles,
            "end.counts": "processed",
            "measure.every_cycles": cycles,  # only the final loss is reported
            **(changes or {}),
            **own,
        },
    )


def table(
    setting: compare.Setting,
    *,
    seeds: Sequence[int],
    links_mbit: Sequence[float] = LINKS_MBIT,
    latency_s: float = 0.02,
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> list[Row]:
    """Rows for each line: fixed settings, then those that follow it."""
    step_s = compare.step_s_of(setting, changes)
    choices: dict[float, dict[str, Mapping[str, Any]]] = {}
    for mbit in links_mbit:
        levels = fixed_levels(setting, step_s, link_mbit=mbit)
        choices[mbit] = {str(level): _fixed(level) for level in levels} | dict(FOLLOWING)
    jobs = []
    for mbit, chosen in choices.items():
        for label, settings in chosen.items():
            experiment = experiment_of(
                setting,
                settings,
                step_s=step_s,
                link_mbit=mbit,
                latency_s=latency_s,
                changes=changes,
            )
            jobs += [Job(f"{mbit:g}/{label}", experiment, seed) for seed in seeds]
    trained = run(jobs)
    groups = by_name(replace(one, loss=one.learners_loss or one.loss) for one in trained)
    rows = []
    for mbit, chosen in choices.items():
        of_line = {label: groups[f"{mbit:g}/{label}"] for label in chosen}
        best = min((of_line[label] for label in chosen if label not in FOLLOWING), key=_mean_loss)
        rows += [
            _row(mbit, label, group, best, learners=setting.learners)
            for label, group in of_line.items()
        ]
    return rows


def _fixed(level: Level) -> Mapping[str, Any]:
    return {
        "outer.codec_up": level.codec,
        "outer.codec_down": level.codec_down,
        "outer.steps_per_cycle": level.cycle_steps,
    }


def _mean_loss(group: Sequence[Trained]) -> float:
    return Mean.of(one.loss for one in group).value


def _row(
    mbit: float, label: str, group: Sequence[Trained], best: Sequence[Trained], *, learners: int
) -> Row:
    line_bytes_s = learners * mbit * BYTES_S_PER_MBIT
    changed = [change for one in group for change in one.levels]
    return Row(
        link_mbit=mbit,
        label=label,
        follows=label in FOLLOWING,
        loss=Mean.of(one.loss for one in group),
        behind=against(group, best),
        line_share=Mean.of(one.bytes_sent / one.duration_s / line_bytes_s for one in group).value,
        computing=Mean.of(one.goodput for one in group).value,
        missed=Mean.of(one.missed for one in group).value,
        duration_s=Mean.of(one.duration_s for one in group).value,
        last=next(
            (change.level for change in reversed(changed) if not change.reason),
            str(FIRST) if label in FOLLOWING else label,
        ),
        changes=max((most_changes(one.levels) for one in group), default=0),
        settled_s=max((change.time_s for change in changed if not change.reason), default=0.0),
        reason=next((change.reason for change in reversed(changed) if change.reason), ""),
    )


def most_changes(levels: Sequence[LevelChange]) -> int:
    """Largest number of changes that one fragment of one peer has made: 1 if it never went back."""
    taken = [(change.peer, change.fragment) for change in levels if not change.reason]
    return max((taken.count(node) for node in set(taken)), default=0)


def section(rows: Sequence[Row], setting: compare.Setting) -> Section:
    shown: list[list[str]] = []
    for row in rows:
        heading = f"{row.link_mbit:g} Mbit/s"
        if [heading] not in shown:
            shown.append([heading])
        bar = ""
        if row.follows:
            bar = f" ({'held' if row.behind.value <= BEHIND_MAX else 'missed'})"
        shown.append(
            [
                f"  {row.label}",
                row.loss.text(4),
                row.behind.percent(2) + bar,
                f"{row.line_share:.0%}",
                f"{row.computing:.1%}",
                f"{row.missed:.0%}",
                _chosen(row),
            ]
        )
    text = (
        f"{setting.learners} learners, a model of {setting.parameters:.3g} parameters, "
        f"{setting.cycles * FIRST.cycle_steps:g} steps of each learner in {rows[0].duration_s:.0f} "
        "s. Losses are those of a small model; times and bytes are scaled to the given size. "
        "Behind: distance of the loss from that of the best fixed setting on the line after the "
        f"same time; bar {BEHIND_MAX:+.0%}. Missed: share of contributions that missed their merge."
    )
    columns = ["", "loss", "behind", "line", "computing", "missed", "chosen"]
    return Section("Rounds that follow the line", text, columns, shown, picture(_picture, rows))


def _chosen(row: Row) -> str:
    if not row.follows:
        return ""
    when = f" after {row.settled_s:.1f} s, {row.changes} x" if row.changes else " from the start"
    return f"{row.last}{when}" + (f": {row.reason}" if row.reason else "")


def _picture(rows: Sequence[Row]) -> bytes:
    axes = new_axes()
    for follows, mark in ((False, "o"), (True, "s")):
        some = [row for row in rows if row.follows is follows]
        axes.plot(
            [row.link_mbit for row in some],
            [row.loss.value for row in some],
            mark,
            label="follows the line" if follows else "fixed",
        )
    axes.set(xscale="log", xlabel="line, Mbit/s", ylabel="held-out loss")
    plain_ticks(axes.xaxis, sorted({row.link_mbit for row in rows}))
    return finished_png(axes)

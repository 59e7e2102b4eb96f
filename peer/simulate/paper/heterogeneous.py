"""`shoal simulate heterogeneous`: peers of different speed, and rules for waiting for them.

The table "K = all, K = 1, K = 1 with grace" of arXiv 2604.21428, with a small model trained for
real in virtual time. Rounds of shoal have at least two members, so K = 2 stands for K = 1. Work
that misses its round is kept and merged later; learners in the paper drop it when the next version
arrives, which is a row of its own. Besides the reported mix of speeds there are one four times as
wide, and a peer that is awake in every tenth cycle only. All rows of a part process equally many
tokens, whether they are merged or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer.results import Mean, Section, as_png, new_figure, picture
from peer.simulate.paper.training import (
    TEXT,
    Job,
    RunJobs,
    Trained,
    against,
    by_name,
    mean_curve,
    run_jobs,
)
from peer.simulate.swarm.experiment import Experiment

LEARNERS = 8
CYCLES = 50
"""1200 steps of a learner of speed 1."""

PARTS: Mapping[str, Mapping[str, Any]] = {
    "two speeds, 18% apart": {"peers.speeds": [1.0, 1.18], "peers.step_jitter": 0.1},
    "two speeds, 4x apart": {"peers.speeds": [1.0, 4.0], "peers.step_jitter": 0.1},
    "one peer in every tenth cycle": {"peers.step_jitter": 0.1},
}
"""Settings by name of the mix of speeds."""

_FLAT = {"rounds.scale_by_speed": False, "outer.overlap_steps": 2}
"""Settings of the paper: H steps for every peer, and an overlap of two steps."""
_ALL = {"rounds.quorum": "all", "outer.waits": True, **_FLAT}
RULES: Mapping[str, Mapping[str, Any]] = {
    "K = all": {**_ALL, "rounds.called_share": 1.0},
    "K = 2, no grace": {"rounds.quorum": 2, "rounds.grace": 0.0, **_FLAT},
    "K = 2, no grace, late work dropped": {
        "rounds.quorum": 2,
        "rounds.grace": 0.0,
        "outer.missed": "drop",
        **_FLAT,
    },
    "K = 2, grace": {"rounds.quorum": 2, "rounds.grace": 0.8, **_FLAT},
    "K = all, called": _ALL,
    "as a new run: majority, due times scaled": {},
}
"""Settings by name of the rule. With K = all a learner stops when a merge takes longer than the
overlap, and every peer makes H steps; "called": a peer with half of them joins when another one is
due. The last rule is that of a new run, with an overlap of six steps."""

NO_GRACE = "K = 2, no grace, late work dropped"
"""Corresponds to the reported K = 1."""
REPORTED_GOODPUT = {"K = all": 84, NO_GRACE: 100, "K = 2, grace": 100}
REPORTED_TEXT = {"K = all": 54.4, NO_GRACE: 51.4, "K = 2, grace": 55.3}
"""Reported average of the text benchmarks (higher is better), for the first part."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rule in one mix of speeds."""

    part: str
    rule: str
    goodput: float
    loss: Mean
    against_all: Mean
    """Relative difference of its loss to that of K = all."""
    missed: float
    staleness: float
    reported_goodput: int | None
    reported_text: float | None


def experiment_of(
    part: str, rule: str, *, cycles: float, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """One cell of the table."""
    settings: dict[str, Any] = {**TEXT, "peers.count": LEARNERS, "end.cycles": cycles}
    settings["end.counts"] = "processed"
    settings |= {**PARTS[part], **RULES[rule], **(changes or {})}
    if part == "one peer in every tenth cycle":
        cycle_s = Experiment().cycle_s
        settings["event"] = [
            {
                "kind": "pause",
                "peers": [LEARNERS - 1],
                "at_s": cycle_s,
                "lasts_s": 9 * cycle_s,
                "every_s": 10 * cycle_s,
            }
        ]
    return Experiment().with_settings(settings)


def jobs(
    *,
    seeds: Sequence[int],
    cycles: float,
    parts: Sequence[str] = tuple(PARTS),
    changes: Mapping[str, Any] | None = None,
) -> list[Job]:
    return [
        Job(f"{part}/{rule}", experiment_of(part, rule, cycles=cycles, changes=changes), seed)
        for part in parts
        for rule in RULES
        for seed in seeds
    ]


def table(
    *,
    seeds: Sequence[int],
    cycles: float = CYCLES,
    parts: Sequence[str] = tuple(PARTS),
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> tuple[list[Row], list[Trained]]:
    """All rows, with the trainings behind them. ``changes``: settings for every cell."""
    planned = jobs(seeds=seeds, cycles=cycles, parts=parts, changes=changes)
    trained = run(planned)
    groups = by_name(trained)
    rows = []
    for part in parts:
        base = groups[f"{part}/K = all"]
        for rule in RULES:
            group = groups[f"{part}/{rule}"]
            first = part == next(iter(PARTS))
            rows.append(
                Row(
                    part=part,
                    rule=rule,
                    goodput=100 * Mean.of(one.goodput for one in group).value,
                    loss=Mean.of(one.loss for one in group),
                    against_all=against(group, base),
                    missed=Mean.of(one.missed for one in group).value,
                    staleness=Mean.of(one.staleness for one in group).value,
                    reported_goodput=REPORTED_GOODPUT.get(rule) if first else None,
                    reported_text=REPORTED_TEXT.get(rule) if first else None,
                )
            )
    return rows, trained


def section(rows: Sequence[Row], trained: Sequence[Trained]) -> Section:
    """The table, with a picture of the first part of it."""
    shown, part = [], ""
    for row in rows:
        if row.part != part:
            part = row.part
            shown.append([part])
        reported = "" if row.reported_goodput is None else f" ({row.reported_goodput})"
        text = "" if row.reported_text is None else f"{row.reported_text}"
        shown.append(
            [
                f"  {row.rule}",
                f"{row.goodput:.1f}{reported}",
                row.loss.text(4),
                row.against_all.percent(),
                f"{100 * row.missed:.0f}%",
                text,
            ]
        )
    text = (
        f"{LEARNERS} learners in virtual time. Goodput in percent (reported); held-out loss after "
        "equally many processed tokens (mean of the seeds and its standard error); its relative "
        "difference to K = all, paired by seed; share of contributions that missed their merge; "
        "reported average of the text benchmarks (higher is better)."
    )
    columns = ["", "goodput", "loss", "against K = all", "missed", "reported text"]
    return Section("Peers of different speed", text, columns, shown, picture(_picture, trained))


def _picture(trained: Sequence[Trained]) -> bytes:
    """The second half of each training, where the rules differ."""
    groups = by_name(trained)
    parts = list(dict.fromkeys(name.rpartition("/")[0] for name in groups))
    figure = new_figure(height=3.5 * len(parts))
    for place, part in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, place + 1)
        for rule in RULES:
            xs, ys = mean_curve(groups[f"{part}/{rule}"])
            half = len(xs) // 2
            axes.plot(xs[half:], ys[half:], label=rule)
        axes.set(ylabel="held-out loss, nats per byte", title=part)
        axes.grid(alpha=0.3)
    axes.set_xlabel("virtual seconds")
    figure.tight_layout()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    return as_png(figure)

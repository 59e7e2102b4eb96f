"""Peers of different speed, and rules for how long a round waits for them.

The table "K = all, K = 1, K = 1 with grace" of arXiv 2604.21428, with a small model trained for
real in virtual time. Rounds of shoal have at least two members, so K = 2 stands for K = 1. Work
that misses its round is kept and merged later; learners in the paper drop it when the next version
arrives, which is a row of its own. Besides the reported mix of speeds there are one four times as
wide, and a peer that is awake in every tenth cycle only. All rows of a part process equally many
tokens, whether they are merged or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer import Option

from examples.paper.paired import (
    TEXT,
    Cell,
    Row,
    RunJobs,
    mean_curve,
    run_jobs,
    shown,
    train_all,
)
from examples.paper.program import (
    FirstSeed,
    OutKept,
    PairedSeeds,
    Settings,
    Workers,
    changes_of,
    run_program,
    seeds_from,
    short,
    train_and_show,
)
from peer.cli.application import Json
from peer.simulate import Swarm
from peer.simulate.results import Section, as_png, new_figure, picture

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


def cells(parts: Sequence[str] = tuple(PARTS)) -> list[Cell]:
    return [Cell(part, rule, RULES[rule], against="K = all") for part in parts for rule in RULES]


def experiment_of(cell: Cell, *, cycles: float, changes: Mapping[str, Any] | None = None) -> Swarm:
    settings: dict[str, Any] = {**TEXT, "peers.count": LEARNERS, "end.cycles": cycles}
    settings["end.counts"] = "processed"
    settings |= {**PARTS[cell.part], **cell.settings, **(changes or {})}
    if cell.part == "one peer in every tenth cycle":
        cycle_s = Swarm().cycle_s
        settings["event"] = [
            {
                "kind": "pause",
                "peers": [LEARNERS - 1],
                "at_s": cycle_s,
                "lasts_s": 9 * cycle_s,
                "every_s": 10 * cycle_s,
            }
        ]
    return Swarm().with_settings(settings)


def table(
    *,
    seeds: Sequence[int],
    cycles: float = CYCLES,
    parts: Sequence[str] = tuple(PARTS),
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> list[Row]:
    """All rows. ``changes``: settings for every cell."""
    return train_all(
        cells(parts),
        lambda cell: experiment_of(cell, cycles=cycles, changes=changes),
        seeds=seeds,
        run=run,
    )


def _reported(row: Row, figures: Mapping[str, float]) -> float | None:
    is_reported = row.cell.part == next(iter(PARTS))
    return figures.get(row.cell.label) if is_reported else None


def record(row: Row) -> dict[str, Any]:
    """A row for scripts."""
    assert row.change is not None
    return {
        "part": row.cell.part,
        "rule": row.cell.label,
        "goodput": 100 * row.mean(lambda one: one.goodput),
        "loss": row.loss.value,
        "loss_error": row.loss.error,
        "against_all": row.change.value,
        "against_all_error": row.change.error,
        "missed": row.mean(lambda one: one.missed),
        "staleness": row.mean(lambda one: one.staleness),
        "reported_goodput": _reported(row, REPORTED_GOODPUT),
        "reported_text": _reported(row, REPORTED_TEXT),
    }


def _goodput(row: Row) -> str:
    reported = _reported(row, REPORTED_GOODPUT)
    own = f"{100 * row.mean(lambda one: one.goodput):.1f}"
    return own if reported is None else f"{own} ({reported:g})"


def section(rows: Sequence[Row]) -> Section:
    text = (
        "Goodput in percent (reported); held-out loss after "
        "equally many processed tokens (mean of the seeds and its standard error); its relative "
        "difference to K = all, paired by seed; share of contributions that missed their merge; "
        "reported average of the text benchmarks (higher is better)."
    )
    table = shown(
        "Peers of different speed",
        text,
        rows,
        lambda row: row.cell.part,
        {
            "": lambda row: row.cell.label,
            "goodput": _goodput,
            "loss": lambda row: row.loss.text(4),
            "against K = all": lambda row: "" if row.change is None else row.change.percent(),
            "missed": lambda row: f"{100 * row.mean(lambda one: one.missed):.0f}%",
            "reported text": lambda row: f"{_reported(row, REPORTED_TEXT) or ''}",
        },
    )
    return replace(table, picture_png=picture(_picture, rows))


def _picture(rows: Sequence[Row]) -> bytes:
    """The second half of each training, where the rules differ."""
    parts = list(dict.fromkeys(row.cell.part for row in rows))
    figure = new_figure(height=3.5 * len(parts))
    for place, part in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, place + 1)
        for row in rows:
            if row.cell.part == part:
                xs, ys = mean_curve(row.trained)
                half = len(xs) // 2
                axes.plot(xs[half:], ys[half:], label=row.cell.label)
        axes.set(ylabel="held-out loss, nats per byte", title=part)
        axes.grid(alpha=0.3)
    axes.set_xlabel("virtual seconds")
    figure.tight_layout()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    return as_png(figure)


def main(
    context: typer.Context,
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of a learner of speed 1.", min=1)] = CYCLES,
    quick: Annotated[bool, Option("--quick", help="One seed and 15 cycles, if not given.")] = False,
    only: Annotated[
        str, Option(help="Only mixes of speeds whose name begins with this.", metavar="MIX")
    ] = "",
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Json = False,
) -> None:
    """Time and loss of rounds that wait for slow peers, and of rounds that do not.

    Assumes eight learners of a small byte-level model (200 000 parameters, the sources of the
    Python standard library), half of them 18% slower, steps that vary by 10%, fast links; then
    speeds that differ by a factor of 4; then a peer that is awake in every tenth cycle only. Rounds
    are the live peer's code, in virtual time. K = 2 stands for the reported K = 1: rounds have at
    least two members. They keep late work, which learners in the paper drop: that is a row of its
    own. Goodput counts steps, not their value; losses are compared after equally many processed
    tokens.

    Example: python -m examples.paper.heterogeneous.run --quick --out results
    """
    parts = tuple(part for part in PARTS if part.startswith(only))
    if not parts:
        names = "; ".join(PARTS)
        raise typer.BadParameter(f"no mix begins with {only!r}; there are: {names}")

    def train(run: RunJobs) -> tuple[Section, list[dict[str, Any]]]:
        rows = table(
            seeds=seeds_from(seed, short(context, "seeds", seeds, 1)),
            cycles=short(context, "cycles", cycles, 15.0),
            parts=parts,
            changes=changes_of(settings),
            run=run,
        )
        return section(rows), [record(row) for row in rows]

    train_and_show(train, workers=workers, out=out, as_json=as_json)


if __name__ == "__main__":
    run_program(main)

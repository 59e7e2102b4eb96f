"""Time to a loss over slow links, data parallel against shoal; and rounds that follow the line.

Losses come from the small model ``text_mlp``, trained for real in virtual time. Times are those of
a model of ``parameters``: the measured step time of the small model (or a given one) and all merged
bytes are multiplied by the ratio of the sizes, so that a simulated round takes as long as a round
of the large model.

Data parallel sends bf16 gradients through a ring at every step, hidden behind the backward pass of
two thirds of a step; a ring of M peers has 2 (M - 1) latencies. Peers are equally fast and never
fail: only the link differs.

With ``--following`` a swarm trains on each line with the levels of its rounds chosen by the rule of
live peers, and with fixed codecs and cycles: for each codec the shortest cycle that takes
``FIXED_SHARE`` of the line at most, and the settings from which the rule starts, whether the line
carries them or not. All rows make equally many steps in the same time. Compared are the losses of
the mean of all learners' parameters at its end, as after a last merge: merged parameters lag by up
to a cycle, by chance, which would hide what a cycle costs. Peers know the speed of their lines, as
after the first transfers; simulated learners never wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from typer import Option

from averaging.numbers.codecs import codec_named
from averaging.rules.line_levels import Level, Line
from examples.paper.paired import (
    TEXT,
    Cell,
    Job,
    LevelChange,
    Row,
    RunJobs,
    Trained,
    against,
    by_name,
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
    plain_ticks,
    run_program,
    seeds_from,
    train_and_show,
)
from examples.paper.typed import bits_per_second, milliseconds, seconds
from peer.cli.application import Json, usage_errors
from peer.simulate import Problem, Swarm
from peer.simulate.names import problem_of
from peer.simulate.problems.problem import layout_of
from peer.simulate.results import (
    Mean,
    Section,
    finished_png,
    new_axes,
    picture,
    record_of,
)
from peer.simulate.slots import BYTES_S_PER_MBIT

LINKS_MBIT = (100.0, 1000.0, 5000.0)
LATENCIES_S = (0.02, 0.1)
"""One-way latencies."""
CYCLES = 40
LOSS_AT = 0.75
"""Share of its tokens after which the loss of data parallel is the default target."""
OVERLAP_STEPS = 12
"""tau: half a cycle, as a round over a slow link may take so long. With a smaller tau rounds over
such links would close without waiting for any peer."""
BF16_BITS = 16
BACKWARD_SHARE = 2 / 3
_MEASURED_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model, its learners, and the loss to reach."""

    parameters: float = 3e8
    step_s: float | None = None
    """Default: measured for the small model, and scaled to the size of this one."""
    learners: int = 8
    loss: float | None = None
    """Loss to reach. Default: that of data parallel after three quarters of its tokens."""
    cycles: float = CYCLES

    def __post_init__(self) -> None:
        if self.learners < 2:
            raise ValueError(f"learners is {self.learners}; a comparison needs at least 2")
        for name in ("parameters", "step_s", "loss", "cycles"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above zero")


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Times over one kind of link."""

    link_mbit: float
    latency_s: float
    step_s: float
    """Computing time of a step."""
    loss: float
    """Loss to reach."""
    data_parallel_step_s: float
    data_parallel_s: float
    shoal_s: Mean | None
    """``None``: not reached within the tokens of the run."""
    speedup: float | None
    shoal_goodput: float


def all_reduce_s(setting: Setting, *, link_mbit: float, latency_s: float) -> float:
    """Duration of a ring all-reduce of bf16 gradients."""
    peers = setting.learners
    bits = 2 * (peers - 1) / peers * BF16_BITS * setting.parameters
    return bits / (link_mbit * 1e6) + 2 * (peers - 1) * latency_s


def data_parallel_step_s(
    setting: Setting, step_s: float, *, link_mbit: float, latency_s: float
) -> float:
    """Duration of a step with its all-reduce, as far as the backward pass does not hide it."""
    sending_s = all_reduce_s(setting, link_mbit=link_mbit, latency_s=latency_s)
    return step_s + max(0.0, sending_s - BACKWARD_SHARE * step_s)


def measured_step_s(problem: Problem, *, clock: Callable[[], float] = time.process_time) -> float:
    """Processor time of one step of the small model on one core of this machine."""
    learner = problem.learner([0], seed=0)
    learner.train(_MEASURED_STEPS)  # warm-up of caches, allocator and data stream
    began = clock()
    learner.train(_MEASURED_STEPS)
    return (clock() - began) / _MEASURED_STEPS


def step_s_of(setting: Setting, changes: Mapping[str, Any] | None = None) -> float:
    """The duration of a step that is given; otherwise that of the small model, scaled up."""
    if setting.step_s is not None:
        return setting.step_s
    problem = problem_of(Swarm().with_settings({**TEXT, **(changes or {})}))
    return measured_step_s(problem) * setting.parameters / layout_of(problem, 1).size


def experiment_of(
    setting: Setting,
    *,
    step_s: float,
    link_mbit: float,
    latency_s: float,
    changes: Mapping[str, Any] | None = None,
) -> Swarm:
    """The swarm on one kind of link, with messages scaled to the size of the large model."""
    experiment = Swarm().with_settings(
        {
            **TEXT,
            "peers.count": setting.learners,
            "peers.step_time_s": step_s,
            "end.cycles": setting.cycles,
            "weather.latency_s": [latency_s, latency_s],
            "weather.mbit_s": [link_mbit, link_mbit],
            "outer.overlap_steps": OVERLAP_STEPS,
            "measure.peers_max": 0,
            **(changes or {}),
        }
    )
    size = layout_of(problem_of(experiment), experiment.outer.fragments).size
    factor = setting.parameters / size
    # Scaled down, so that there are as many reducers as for the large model.
    slice_bytes = max(1, int(experiment.rounds.slice_bytes_min / factor))
    return experiment.with_settings(
        {"weather.bulk_factor": factor, "rounds.slice_bytes_min": slice_bytes}
    )


def table(
    setting: Setting,
    *,
    seeds: Sequence[int],
    links_mbit: Sequence[float] = LINKS_MBIT,
    latencies_s: Sequence[float] = LATENCIES_S,
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> list[LinkRow]:
    """A row for each kind of link."""
    places = [(mbit, latency) for mbit in links_mbit for latency in latencies_s]
    step_s = step_s_of(setting, changes)
    jobs = []
    for seed in seeds:
        for mbit, latency in places:
            experiment = experiment_of(
                setting, step_s=step_s, link_mbit=mbit, latency_s=latency, changes=changes
            )
            jobs.append(Job(_name(mbit, latency), experiment, seed))
        jobs.append(Job("data parallel", experiment, seed, central=True))
    groups = by_name(run(jobs))
    central = groups["data parallel"]
    wanted = setting.loss or Mean.of(_loss_at(one, LOSS_AT) for one in central).value
    rows = []
    for mbit, latency in places:
        slow = data_parallel_step_s(setting, step_s, link_mbit=mbit, latency_s=latency)
        needed = [found for one in central if (found := one.time_to(wanted)) is not None]
        if len(needed) < len(central):
            raise ValueError(
                f"data parallel does not reach the loss {wanted:.3f} in this run: ask for a higher "
                "loss or for more cycles"
            )
        reference_s = Mean.of(needed).value / step_s * slow
        group = groups[_name(mbit, latency)]
        times = [found for one in group if (found := one.time_to(wanted)) is not None]
        shoal = Mean.of(times) if len(times) == len(group) else None
        rows.append(
            LinkRow(
                link_mbit=mbit,
                latency_s=latency,
                step_s=step_s,
                loss=wanted,
                data_parallel_step_s=slow,
                data_parallel_s=reference_s,
                shoal_s=shoal,
                speedup=None if shoal is None else reference_s / shoal.value,
                shoal_goodput=Mean.of(one.goodput for one in group).value,
            )
        )
    return rows


def _name(mbit: float, latency_s: float) -> str:
    return f"{mbit:g} Mbit/s, {1e3 * latency_s:g} ms"


def _loss_at(one: Trained, share: float) -> float:
    wanted = share * one.tokens[-1]
    return next(loss for at, loss in zip(one.tokens, one.losses, strict=True) if at >= wanted)


def section(rows: Sequence[LinkRow], setting: Setting) -> Section:
    shown = []
    for row in rows:
        shown.append(
            [
                _name(row.link_mbit, row.latency_s),
                f"{row.data_parallel_step_s:.2f}",
                f"{row.data_parallel_s / 3600:.2f}",
                "not within the run" if row.shoal_s is None else row.shoal_s.text(2, per=3600),
                "" if row.speedup is None else f"{row.speedup:.1f} x",
            ]
        )
    first = rows[0]
    text = (
        f"{setting.learners} learners, a model of {setting.parameters:.3g} parameters, a step "
        f"of {first.step_s:.2f} s computing; hours of virtual time until the held-out loss is "
        f"{first.loss:.3f}. Losses are those of a small model; times and bytes are scaled to the "
        "given size. Data parallel: bf16 ring, hidden behind the backward pass."
    )
    columns = ["link", "s per step, data parallel", "hours, data parallel", "hours, shoal", "gain"]
    return Section("Time to a loss", text, columns, shown, picture(_picture, rows))


def _picture(rows: Sequence[LinkRow]) -> bytes:
    axes = new_axes()
    for latency in dict.fromkeys(row.latency_s for row in rows):
        some = [row for row in rows if row.latency_s == latency]
        xs = [row.link_mbit for row in some]
        label = f"{1e3 * latency:g} ms"
        (line,) = axes.plot(
            xs, [row.data_parallel_s / 3600 for row in some], "o--", label=f"data parallel, {label}"
        )
        reached = [(row.link_mbit, row.shoal_s.value / 3600) for row in some if row.shoal_s]
        if reached:
            axes.plot(
                *zip(*reached, strict=True), "o-", color=line.get_color(), label=f"shoal, {label}"
            )
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="hours to the loss")
    plain_ticks(axes.xaxis, sorted({row.link_mbit for row in rows}))
    plain_ticks(axes.yaxis)
    return finished_png(axes)


# Rounds that follow the line

FIRST = Level(codec="int4", codec_down="int4", cycle_steps=30)
"""Level that the rule prefers."""
FIXED_CODECS = (("int4", "int4"), ("int2", "int4"), ("int2", "int2"))
FIXED_SHARE = 0.75
"""Largest share of the line that a fixed setting takes. Above that peers sit versions out
(``averaging.rules.line_levels``), as they do with ``FIRST`` on slow lines."""
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
FOLLOWING_OVERLAP_STEPS = 6
"""tau of a new run."""
BEHIND_MAX = 0.02
"""Largest acceptable distance of the loss from that of the best fixed setting."""


def fixed_levels(setting: Setting, step_s: float, *, link_mbit: float) -> list[Level]:
    """The fixed settings that are compared on a line: ``FIRST``, whether the line carries it or
    not, then the shortest cycle that the line carries with each pair of codecs, up and down. No
    cycle is shorter than its."""
    line = Line(
        bytes_per_s=link_mbit * BYTES_S_PER_MBIT,
        step_s=step_s,
        fragments=1,
        members=setting.learners,
        share_max=FIXED_SHARE,
    )

    def encoded_bytes(codec: str) -> int:
        return codec_named(codec).encoded_size([int(setting.parameters)])

    levels = [FIRST]
    for up, down in FIXED_CODECS:
        shortest = Level(codec=up, codec_down=down, cycle_steps=FIRST.cycle_steps)
        share = line.share_of(encoded_bytes, shortest)
        steps = math.ceil(FIRST.cycle_steps * max(1.0, share / FIXED_SHARE))
        levels.append(Level(codec=up, codec_down=down, cycle_steps=steps))
    return list(dict.fromkeys(levels))


def following_experiment(
    setting: Setting,
    settings: Mapping[str, Any],
    *,
    step_s: float,
    link_mbit: float,
    latency_s: float,
    changes: Mapping[str, Any] | None = None,
) -> Swarm:
    """A swarm on one line, which lasts ``setting.cycles`` cycles of ``FIRST``."""
    steps = setting.cycles * FIRST.cycle_steps
    own = {"outer.steps_per_cycle": FIRST.cycle_steps, **settings}
    cycles = steps / own["outer.steps_per_cycle"]
    return experiment_of(
        setting,
        step_s=step_s,
        link_mbit=link_mbit,
        latency_s=latency_s,
        changes={
            "weather.lines": [(link_mbit, link_mbit)],
            "outer.overlap_steps": FOLLOWING_OVERLAP_STEPS,
            "end.cycles": cycles,
            "end.counts": "processed",
            "measure.every_cycles": cycles,  # only the final loss is reported
            **(changes or {}),
            **own,
        },
    )


def following_table(
    setting: Setting,
    *,
    seeds: Sequence[int],
    links_mbit: Sequence[float] = (10.0, 50.0, 200.0, 1000.0),
    latency_s: float = 0.02,
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> list[Row]:
    """Rows for each line: fixed settings, then those that follow it."""
    step_s = step_s_of(setting, changes)
    speeds = {f"{mbit:g} Mbit/s": mbit for mbit in links_mbit}
    cells = []
    for part, mbit in speeds.items():
        levels = fixed_levels(setting, step_s, link_mbit=mbit)
        choices = {str(level): _fixed(level) for level in levels} | dict(FOLLOWING)
        cells += [Cell(part, label, settings) for label, settings in choices.items()]
    rows = train_all(
        cells,
        lambda cell: following_experiment(
            setting,
            cell.settings,
            step_s=step_s,
            link_mbit=speeds[cell.part],
            latency_s=latency_s,
            changes=changes,
        ),
        seeds=seeds,
        run=run,
    )
    rows = [_of_learners(row) for row in rows]
    best = {
        part: min((row for row in rows if row.cell.part == part and not follows(row)), key=_loss)
        for part in speeds
    }
    return [replace(row, change=against(row.trained, best[row.cell.part].trained)) for row in rows]


def _of_learners(row: Row) -> Row:
    """The row with the losses of the mean of the learners' own parameters."""
    trained = [replace(one, loss=one.learners_loss or one.loss) for one in row.trained]
    return replace(row, trained=trained, loss=Mean.of(one.loss for one in trained))


def _loss(row: Row) -> float:
    return row.loss.value


def follows(row: Row) -> bool:
    return row.cell.label in FOLLOWING


def _fixed(level: Level) -> Mapping[str, Any]:
    return {
        "outer.codec_up": level.codec,
        "outer.codec_down": level.codec_down,
        "outer.steps_per_cycle": level.cycle_steps,
    }


def following_record(row: Row, setting: Setting) -> dict[str, Any]:
    """A row for scripts."""
    link_mbit = float(row.cell.part.split()[0])
    line_bytes_s = setting.learners * link_mbit * BYTES_S_PER_MBIT
    changed = [change for one in row.trained for change in one.levels]
    taken = [change for change in changed if not change.reason]
    reasons = [change.reason for change in changed if change.reason]
    assert row.change is not None
    return {
        "link_mbit": link_mbit,
        "label": row.cell.label,
        "follows": follows(row),
        "loss": row.loss.value,
        "loss_error": row.loss.error,
        "behind": row.change.value,
        "behind_error": row.change.error,
        "line_share": row.mean(lambda one: one.bytes_sent / one.duration_s / line_bytes_s),
        "computing": row.mean(lambda one: one.goodput),
        "missed": row.mean(lambda one: one.missed),
        "duration_s": row.mean(lambda one: one.duration_s),
        "last": taken[-1].level if taken else str(FIRST) if follows(row) else row.cell.label,
        "changes": max((most_changes(one.levels) for one in row.trained), default=0),
        "settled_s": max((change.time_s for change in taken), default=0.0),
        "reason": reasons[-1] if reasons else "",
    }


def most_changes(levels: Sequence[LevelChange]) -> int:
    """Largest number of changes that one fragment of one peer has made: 1 if it never went back."""
    taken = [(change.peer, change.fragment) for change in levels if not change.reason]
    return max((taken.count(node) for node in set(taken)), default=0)


def following_section(rows: Sequence[Row], setting: Setting) -> Section:
    def figure(name: str) -> Callable[[Row], Any]:
        return lambda row: following_record(row, setting)[name]

    def behind(row: Row) -> str:
        assert row.change is not None
        if not follows(row):
            return row.change.percent(2)
        return f"{row.change.percent(2)} ({'held' if row.change.value <= BEHIND_MAX else 'missed'})"

    def chosen(row: Row) -> str:
        if not follows(row):
            return ""
        made = following_record(row, setting)
        when = " from the start"
        if made["changes"]:
            when = f" after {made['settled_s']:.1f} s, {made['changes']} x"
        return f"{made['last']}{when}" + (f": {made['reason']}" if made["reason"] else "")

    lasts_s = figure("duration_s")(rows[0])
    text = (
        f"{setting.learners} learners, a model of {setting.parameters:.3g} parameters, "
        f"{setting.cycles * FIRST.cycle_steps:g} steps of each learner in {lasts_s:.0f} "
        "s. Losses are those of a small model; times and bytes are scaled to the given size. "
        "Behind: distance of the loss from that of the best fixed setting on the line after the "
        f"same time; bar {BEHIND_MAX:+.0%}. Missed: share of contributions that missed their merge."
    )
    made = shown(
        "Rounds that follow the line",
        text,
        rows,
        lambda row: row.cell.part,
        {
            "": lambda row: row.cell.label,
            "loss": lambda row: row.loss.text(4),
            "behind": behind,
            "line": lambda row: f"{figure('line_share')(row):.0%}",
            "computing": lambda row: f"{figure('computing')(row):.1%}",
            "missed": lambda row: f"{figure('missed')(row):.0%}",
            "chosen": chosen,
        },
    )
    return replace(made, picture_png=picture(_following_picture, rows))


def _following_picture(rows: Sequence[Row]) -> bytes:
    axes = new_axes()
    for is_following, mark in ((False, "o"), (True, "s")):
        some = [row for row in rows if follows(row) is is_following]
        axes.plot(
            [float(row.cell.part.split()[0]) for row in some],
            [row.loss.value for row in some],
            mark,
            label="follows the line" if is_following else "fixed",
        )
    axes.set(xscale="log", xlabel="line, Mbit/s", ylabel="held-out loss")
    plain_ticks(axes.xaxis, sorted({float(row.cell.part.split()[0]) for row in rows}))
    return finished_png(axes)


def main(
    params: Annotated[float, Option(help="Number of parameters of the model.")] = 3e8,
    step: Annotated[
        str, Option(help="Duration of a step, such as 1s; by default measured and scaled up.")
    ] = "measured",
    learners: Annotated[int, Option(help="Number of learners.", min=2)] = 8,
    loss: Annotated[
        float | None,
        Option(help="Loss to reach; by default data parallel's after 3/4 of its tokens."),
    ] = None,
    link: Annotated[str, Option(help="Bandwidths to compare.")] = "100Mbit,1Gbit,5Gbit",
    latency: Annotated[str, Option(help="One-way latencies, in milliseconds.")] = "20,100",
    cycles: Annotated[float, Option(help="Length of the training.", min=2)] = CYCLES,
    following: Annotated[
        bool,
        Option(
            "--following",
            help="Compare rounds that follow the line with fixed codecs and cycles instead.",
        ),
    ] = False,
    seeds: PairedSeeds = 1,
    seed: FirstSeed = 0,
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Json = False,
) -> None:
    """Time to a given loss over slow links: data parallel against shoal.

    Losses are those of a small byte-level model, times and traffic those of a model of --params
    parameters: the step time measured here for the small model, and all traffic, are multiplied by
    the ratio of the sizes. Data parallel sends bf16 gradients through a ring at every step, hidden
    behind two thirds of the step. Peers are equally fast and never fail.
    With --following: the loss after --cycles cycles of 30 steps, with levels that follow the line,
    and with fixed codecs whose cycles are as short as the line allows.

    Example: python -m examples.paper.compare.run --params 3e8 --link 100Mbit --latency 20
    """
    with usage_errors():
        setting = Setting(
            parameters=params,
            step_s=None if step == "measured" else seconds(step, option="--step"),
            learners=learners,
            loss=loss,
            cycles=cycles,
        )
        links = [bits_per_second(text) / 1e6 for text in link.split(",")]
        latencies = [milliseconds(text) for text in latency.split(",")]
    if following and len(latencies) != 1:
        raise typer.BadParameter("--following takes one --latency")
    chosen, changes = seeds_from(seed, seeds), changes_of(settings)

    def train(run: RunJobs) -> tuple[Section, list[dict[str, Any]]]:
        if following:
            rows = following_table(
                setting,
                seeds=chosen,
                links_mbit=links,
                latency_s=latencies[0],
                changes=changes,
                run=run,
            )
            records = [following_record(row, setting) for row in rows]
            return following_section(rows, setting), records
        found = table(
            setting,
            seeds=chosen,
            links_mbit=links,
            latencies_s=latencies,
            changes=changes,
            run=run,
        )
        return section(found, setting), [record_of(row) for row in found]

    train_and_show(train, workers=workers, out=out, as_json=as_json)


if __name__ == "__main__":
    run_program(main)

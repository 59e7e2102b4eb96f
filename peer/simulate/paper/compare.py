"""`shoal simulate compare`: time to a given loss over slow links, data parallel against shoal.

Losses come from the small model ``text_mlp``, trained for real in virtual time. Times are those of
a model of ``parameters``: the measured step time of the small model (or a given one) and all merged
bytes are multiplied by the ratio of the sizes, so that a simulated round takes as long as a round
of the large model.

Data parallel sends bf16 gradients through a ring at every step, hidden behind the backward pass of
two thirds of a step (as ``shoal simulate bandwidth`` assumes); a ring of M peers has 2 (M - 1)
latencies. Peers are equally fast and never fail: only the link differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer.results import Mean, Section, finished_png, new_axes, picture, plain_ticks
from peer.simulate.paper.bandwidth import BITS
from peer.simulate.paper.training import TEXT, Job, RunJobs, Trained, by_name, run_jobs
from peer.simulate.problems.problem import Problem, layout_of
from peer.simulate.swarm.experiment import Experiment
from peer.simulate.swarm.resolving import problem_of

LINKS_MBIT = (100.0, 1000.0, 5000.0)
LATENCIES_S = (0.02, 0.1)
"""One-way latencies."""
CYCLES = 40
LOSS_AT = 0.75
"""Share of its tokens after which the loss of data parallel is the default target."""
OVERLAP_STEPS = 12
"""tau: half a cycle, as a round over a slow link may take so long. With a smaller tau rounds over
such links would close without waiting for any peer."""
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
class Row:
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
    bits = 2 * (peers - 1) / peers * BITS["bf16"] * setting.parameters
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
    problem = problem_of(Experiment().with_settings({**TEXT, **(changes or {})}))
    return measured_step_s(problem) * setting.parameters / layout_of(problem, 1).size


def experiment_of(
    setting: Setting,
    *,
    step_s: float,
    link_mbit: float,
    latency_s: float,
    changes: Mapping[str, Any] | None = None,
) -> Experiment:
    """The swarm on one kind of link, with messages scaled to the size of the large model."""
    experiment = Experiment().with_settings(
        {
            **TEXT,
            "peers.count": setting.learners,
            "peers.step_time_s": step_s,
            "end.cycles": setting.cycles,
            "network.latency_s": [latency_s, latency_s],
            "network.mbit_s": [link_mbit, link_mbit],
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
        {"network.bulk_factor": factor, "rounds.slice_bytes_min": slice_bytes}
    )


def table(
    setting: Setting,
    *,
    seeds: Sequence[int],
    links_mbit: Sequence[float] = LINKS_MBIT,
    latencies_s: Sequence[float] = LATENCIES_S,
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> tuple[list[Row], list[Trained]]:
    """A row for each kind of link, and the trainings behind them."""
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
    trained = run(jobs)
    groups = by_name(trained)
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
            Row(
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
    return rows, trained


def _name(mbit: float, latency_s: float) -> str:
    return f"{mbit:g} Mbit/s, {1e3 * latency_s:g} ms"


def _loss_at(one: Trained, share: float) -> float:
    wanted = share * one.tokens[-1]
    return next(loss for at, loss in zip(one.tokens, one.losses, strict=True) if at >= wanted)


def section(rows: Sequence[Row], setting: Setting) -> Section:
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


def _picture(rows: Sequence[Row]) -> bytes:
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

"""`shoal simulate goodput`: the reported table of goodput under failures, and your own swarm's.

Goodput is the share of chip time spent computing here, since all computed work is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from peer.results import Section, finished_png, new_axes, picture, plain_ticks
from peer.simulate.paper.failures import (
    YEAR_S,
    Job,
    ReturnDelay,
    Timeline,
    run_job,
    share_with_nobody_stepping,
)

System = Literal["rigid", "elastic", "decoupled"]

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

# arXiv 2604.21428, table 1, as reported: percent, one failure per chip and year.
REPORTED: dict[tuple[System, int], tuple[int, ...]] = {
    ("rigid", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}

FAILURES_PER_CELL = 6_000
"""Number of failures after which the simulation of a cell ends. Cells of any size then take equally
long and have about equal statistical errors."""


AWAY = ReturnDelay(scale_s=1500.0, shape=0.9, power=1.5)
"""About 33 minutes on average: 0.4% of the chips are away at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """Assumptions about a cluster. The values of the reported table were not published.

    Its authors report Poisson failures, one per chip and year, of slices of chips, and returns that
    follow an exponentiated Weibull distribution. The elastic pauses are calibrated on the five
    elastic cells of the table, the rigid pause on one rigid cell (1.2M chips); the tests of this
    module repeat it. Every decoupled cell is a prediction from these numbers.
    """

    failures_per_chip_year: float = 1.0
    slice_chips: int = 64
    """Chips that fail and return together."""
    away: ReturnDelay = AWAY
    elastic_stop_s: float = 18.0
    """Pause of all chips after a failure."""
    elastic_return_s: float = 10.0
    """Pause of all chips while slices are readmitted."""
    elastic_return_every_s: float = 180.0
    """Shortest time between two readmissions."""
    rigid_stop_s: float = 71.0
    """Time to detect a failure, replace the chips by a spare, reload, and redo the lost steps."""

    def job(self, chips: float, system: System) -> Job:
        """A job on this number of chips. A decoupled learner is an elastic job of its own."""
        slices = max(1, round(chips / self.slice_chips))
        rigid = system == "rigid"
        return Job(
            slices=slices,
            failures_per_slice_s=self.failures_per_chip_year * self.slice_chips / YEAR_S,
            away=self.away,
            stop_s=self.rigid_stop_s if rigid else self.elastic_stop_s,
            return_s=0.0 if rigid else self.elastic_return_s,
            return_every_s=0.0 if rigid else self.elastic_return_every_s,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table, in percent."""

    system: System
    learners: int
    chips: int
    goodput: float
    standard_error: float
    uptime: float
    """Share of time in which at least one learner trains."""

    reported: int | None


def table(
    model: ClusterModel,
    *,
    seeds: Sequence[int],
    rows: Sequence[tuple[System, int]] = tuple(REPORTED),
    failures_per_cell: int = FAILURES_PER_CELL,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Cell]:
    """Simulate the cells of the reported table."""
    todo = list(product(rows, range(len(CHIPS))))
    cells = []
    for index, ((system, learners), column) in enumerate(todo):
        chips = CHIPS[column]
        reported = REPORTED.get((system, learners))
        runs = [
            _run(model, system, learners, chips, failures_per_cell // len(seeds), seed)
            for seed in seeds
        ]
        goodputs = np.array([np.mean([t.goodput for t in run]) for run in runs]) * 100
        uptimes = [100 * (1 - share_with_nobody_stepping(run)) for run in runs]
        error = goodputs.std(ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else float("nan")
        cells.append(
            Cell(
                system,
                learners,
                chips,
                float(goodputs.mean()),
                float(error),
                float(np.mean(uptimes)),
                reported[column] if reported else None,
            )
        )
        progress((index + 1) / len(todo))
    return cells


def _run(
    model: ClusterModel, system: System, learners: int, chips: int, failures: int, seed: int
) -> list[Timeline]:
    job = model.job(chips / learners, system)
    horizon_s = failures / (learners * job.slices * job.failures_per_slice_s)
    streams = np.random.default_rng([seed, learners, chips, system == "rigid"]).spawn(learners)
    return [run_job(job, horizon_s=horizon_s, rng=rng) for rng in streams]


@dataclass(frozen=True, slots=True)
class SwarmGoodput:
    """Goodput of a swarm of single machines, in percent."""

    system: System
    goodput: float
    uptime: float


def swarm(*, learners: int, mtbf_s: float, rejoin_s: float, seed: int) -> list[SwarmGoodput]:
    """The same three systems with one learner per machine, such as volunteers' computers.

    Rigid: after a failure all learners wait until that machine is back. Elastic: the others go on
    once a synchronous framework has noticed and re-formed (a quarter of ``rejoin_s``, at most a
    minute), and pause again for the return. Decoupled: no other learner is affected.
    """
    for name, value in (("learners", learners), ("mtbf", mtbf_s), ("rejoin", rejoin_s)):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be above zero")
    away = ReturnDelay(scale_s=rejoin_s, shape=8.0, power=1.0)
    reform_s = min(60.0, rejoin_s / 4)
    horizon_s = 4_000 * mtbf_s / learners + 100 * rejoin_s
    rng = np.random.default_rng(seed)

    def timelines(stop_s: float, slices: int, jobs: int) -> list[Timeline]:
        job = Job(
            slices=slices,
            failures_per_slice_s=1.0 / mtbf_s,
            away=away,
            stop_s=stop_s,
            return_s=stop_s,
            return_every_s=0.0,
        )
        return [run_job(job, horizon_s=horizon_s, rng=r) for r in rng.spawn(jobs)]

    elastic = timelines(reform_s, learners, 1)
    decoupled = timelines(0.0, 1, learners)
    rigid = _rigid_swarm(learners, mtbf_s, rejoin_s)
    none_trains = (rejoin_s / (mtbf_s + rejoin_s)) ** learners
    return [
        SwarmGoodput("rigid", 100 * rigid, 100 * rigid),
        SwarmGoodput(
            "elastic",
            100 * elastic[0].goodput,
            100 * (1 - share_with_nobody_stepping(elastic)),
        ),
        SwarmGoodput(
            "decoupled",
            100 * float(np.mean([t.goodput for t in decoupled])),
            100 * (1 - none_trains),
        ),
    ]


def _rigid_swarm(learners: int, mtbf_s: float, rejoin_s: float) -> float:
    """Goodput when no machine fails during a pause: work for mtbf/learners, wait for rejoin."""
    work_s = mtbf_s / learners
    return work_s / (work_s + rejoin_s)


def rms_difference(cells: Sequence[Cell]) -> float:
    """Root mean square of the differences from the reported cells, in percentage points."""
    return float(np.sqrt(np.mean([(c.goodput - c.reported) ** 2 for c in cells if c.reported])))


def section(cells: Sequence[Cell]) -> Section:
    """The simulated table beside the reported one."""
    chips = sorted({c.chips for c in cells})
    rows = []
    for name, group in _by_system(cells).items():
        values = {c.chips: c for c in group}
        rows.append([name, *(_compared(values[n]) for n in chips)])
        uptimes = [f"{values[n].uptime:.1f}" for n in chips]
        rows.append(["  some learner trains", *uptimes])
    predicted = [c for c in cells if c.system == "decoupled" and c.reported is not None]
    text = (
        "Goodput in percent: simulated ± standard error over seeds (reported, difference). "
        f"The {len(predicted)} decoupled cells are predictions; they differ from the reported "
        f"ones by {rms_difference(predicted):.1f} points rms."
    )
    columns = ["", *(f"{n / 1e6:g}M chips" for n in chips)]
    return Section("Goodput under failures", text, columns, rows, picture(_picture, cells))


def _compared(cell: Cell) -> str:
    known = math.isfinite(cell.standard_error)  # not of one seed
    measured = f"{cell.goodput:.1f}" + (f" ±{cell.standard_error:.1f}" if known else "")
    if cell.reported is None:
        return measured
    return f"{measured} ({cell.reported}, {cell.goodput - cell.reported:+.1f})"


def _by_system(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        name = cell.system if cell.system != "decoupled" else f"decoupled, M={cell.learners}"
        groups.setdefault(name, []).append(cell)
    return groups


def _picture(cells: Sequence[Cell]) -> bytes:
    axes = new_axes()
    for name, group in _by_system(cells).items():
        (line,) = axes.plot([c.chips for c in group], [c.goodput for c in group], label=name)
        reported = [(c.chips, c.reported) for c in group if c.reported is not None]
        axes.plot(*zip(*reported, strict=True), "o", color=line.get_color(), mfc="none")
    axes.set(xscale="log", xlabel="chips", ylabel="goodput, percent", ylim=(0, 101))
    plain_ticks(axes.xaxis, sorted({cell.chips for cell in cells}))
    axes.set_title("Goodput: simulated (lines) and reported (circles)")
    return finished_png(axes)

"""The reported table of goodput under failures, and your own swarm's.

Goodput is the share of chip time spent computing here, since all computed work is used. Jobs of
chips that fail and come back are simulated, exactly in time: every failure and every return of a
slice of chips is an event. There are no models and no networks; a pause is a time in which the
job's chips wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from typer import Option

from examples.paper.program import plain_ticks, run_program, show_rows
from examples.paper.typed import seconds
from peer.cli.application import Json, json_text, progress
from peer.simulate.results import Section, finished_png, new_axes, picture

YEAR_S = 365.25 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnDelay:
    """Exponentiated Weibull distribution of the time that a failed slice is away."""

    scale_s: float
    shape: float
    power: float
    """1: ordinary Weibull distribution; above 1 very short absences become rare."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        uniform = rng.random(count)
        return self.scale_s * (-np.log1p(-(uniform ** (1.0 / self.power)))) ** (1.0 / self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Chips that train in step, and the pauses that changes among them cause."""

    slices: int
    failures_per_slice_s: float
    away: ReturnDelay
    stop_s: float
    """Pause of all chips after a failure. A failure during a pause does not extend it: the restart
    in progress leaves the newly failed slice out as well."""

    return_s: float
    """Pause of all chips to readmit slices. Those that return during a pause join at its end."""

    return_every_s: float
    """Shortest time between two readmissions."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Outcome of one job."""

    horizon_s: float
    goodput: float
    """Share of the chip time spent computing; the time of absent chips counts as lost."""

    idle: NDArray[np.float64]
    """Intervals (from, to) in which the job did not train, in order, not overlapping."""

    failures: int


def run_job(job: Job, *, horizon_s: float, rng: np.random.Generator) -> Timeline:
    """Simulate one job on a cluster in its steady state."""
    returning = _already_away(job, rng)
    alive = job.slices - len(returning)
    waiting = 0  # slices that are back and wait to be readmitted
    pause_until = 0.0
    next_entry_at = 0.0
    pauses: list[tuple[float, float]] = []
    now = capacity = 0.0
    failures = 0
    draws = _Draws(job, rng)

    next_failure = draws.until_failure(alive)
    while now < horizon_s:
        entry_at = max(now, pause_until, next_entry_at) if waiting else np.inf
        back_at = returning[0] if returning else np.inf
        at = min(now + next_failure, entry_at, back_at, horizon_s)
        stepping_from = min(max(now, pause_until), at)
        capacity += alive * (at - stepping_from)
        elapsed, now = at - now, at
        if now >= horizon_s:
            break
        if at == back_at:
            heapq.heappop(returning)
            waiting += 1
            next_failure -= elapsed
        elif at == entry_at:
            # Slices that came back during a pause start with the others at its end, without cost.
            joined_in_a_pause = at == pause_until
            alive += waiting
            waiting = 0
            if not joined_in_a_pause:
                pauses.append((at, at + job.return_s))
                pause_until = at + job.return_s
                next_entry_at = at + job.return_every_s
            next_failure = draws.until_failure(alive)
        else:
            failures += 1
            alive -= 1
            heapq.heappush(returning, at + draws.away())
            if at >= pause_until:
                pauses.append((at, at + job.stop_s))
                pause_until = at + job.stop_s
            next_failure = draws.until_failure(alive)

    idle = np.minimum(np.array(pauses, dtype=np.float64).reshape(-1, 2), horizon_s)
    return Timeline(horizon_s, capacity / (job.slices * horizon_s), idle, failures)


def share_with_nobody_stepping(timelines: list[Timeline]) -> float:
    """Share of the time in which all of these jobs paused at once."""
    starts = np.concatenate([t.idle[:, 0] for t in timelines])
    ends = np.concatenate([t.idle[:, 1] for t in timelines])
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    idle_jobs = np.cumsum(steps[order])[:-1]
    lengths = np.diff(times[order])
    return float(lengths[idle_jobs >= len(timelines)].sum()) / timelines[0].horizon_s


def _already_away(job: Job, rng: np.random.Generator) -> list[float]:
    """Return times of the slices that are away at the start, distributed as in the steady state."""
    sample = job.away.draw(rng, 4096)
    expected = min(float(job.slices), job.slices * job.failures_per_slice_s * float(sample.mean()))
    count = min(int(rng.poisson(expected)), job.slices)
    # At a random moment, absences occur with a probability proportional to their length, and part
    # of them is over.
    lengths = rng.choice(sample, size=count, p=sample / sample.sum())
    remaining = [float(r) for r in lengths * rng.random(count)]
    heapq.heapify(remaining)
    return remaining


class _Draws:
    """Draws random numbers in blocks: one by one would take longer than the simulation."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        self._job, self._rng = job, rng
        self._unit: list[float] = []
        self._away: list[float] = []

    def until_failure(self, alive: int) -> float:
        if alive == 0:
            return float("inf")
        if not self._unit:
            self._unit = self._rng.exponential(1.0, 1024).tolist()
        return self._unit.pop() / (self._job.failures_per_slice_s * alive)

    def away(self) -> float:
        if not self._away:
            self._away = self._job.away.draw(self._rng, 1024).tolist()
        return self._away.pop()


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


def main(
    seeds: Annotated[
        int, Option(help="Number of simulations of each cell of the table.", min=1)
    ] = 3,
    learners: Annotated[
        int | None,
        Option(help="Simulate your own swarm: number of machines.", min=1, max=100_000),
    ] = None,
    mtbf: Annotated[
        str | None,
        Option(help="Your swarm: mean time between failures; by default 9h.", show_default=False),
    ] = None,
    rejoin: Annotated[
        str | None,
        Option(
            help="Your swarm: time that a failed machine is away; by default 4m.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for CSV, PNG and an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Training time that failures leave: the reported table, or your own swarm.

    Assumes Poisson failures, one per chip and year, in slices of chips that are away for about half
    an hour; after a failure and at returns all chips of a job pause. The pauses are calibrated on
    the five elastic cells and one rigid cell of the reported table; all decoupled cells are
    predictions.

    Example: python -m examples.paper.goodput.run --learners 12 --mtbf 9h --rejoin 4m
    """
    if learners is not None:
        if out is not None:
            raise typer.BadParameter("--out is for the reported table: leave --learners out")
        own = swarm(
            learners=learners,
            mtbf_s=seconds(mtbf or "9h", option="--mtbf"),
            rejoin_s=seconds(rejoin or "4m", option="--rejoin"),
            seed=0,
        )
        if as_json:
            print(json_text({"swarm": [asdict(row) for row in own]}))
            return
        for row in own:
            print(
                f"{row.system:10}  goodput {row.goodput:6.2f}%  "
                f"some learner trains {row.uptime:6.2f}%"
            )
        return
    if mtbf is not None or rejoin is not None:
        raise typer.BadParameter("--mtbf and --rejoin are of your own swarm: pass --learners, too")
    with progress("simulating", quiet=as_json) as advance:
        cells = table(ClusterModel(), seeds=range(seeds), progress=advance)
    show_rows(section(cells), [asdict(cell) for cell in cells], out=out, as_json=as_json)


if __name__ == "__main__":
    run_program(main)

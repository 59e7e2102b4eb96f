"""Experiments that train: cells of settings, each with the same seeds, compared seed by seed.

A ``Cell`` is one row of a table: settings of a swarm, or of the central reference, a single learner
that takes the mean gradient of all peers' batches at each step. ``train_all`` trains every cell
with every seed, in several processes, and compares each with the cell of its part that it names.
Trainings of equal seed are paired: they have the same first weights, and each peer the same data.
``shown`` makes a table of the rows, with the columns that an experiment chooses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import blake3
import msgspec
import numpy as np

from dht.whole_files import read_json, write_whole
from peer.simulate.names import problem_of
from peer.simulate.outcome import SwarmResult
from peer.simulate.report import run_all
from peer.simulate.results import Mean, Section
from peer.simulate.settings import Swarm
from peer.simulate.simulation import run as run_swarm

TEXT: Mapping[str, Any] = {
    "problem.name": "examples.paper.text_mlp:TextMlp",
    "problem.warmup_share": 0.05,
    "problem.decay": "cosine",
    "outer.momentum": 0.5,
    "measure.peers_max": 0,
}
"""A small real model, with a learning rate that rises and falls within the run, and the outer
momentum that new runs had when these figures were measured. Only the mean of all peers is
evaluated: an evaluation costs as much as twenty steps."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training: of the swarm, or if ``central`` of the reference for its experiment."""

    name: str
    experiment: Swarm
    seed: int
    central: bool = False

    @property
    def cost(self) -> float:
        """Estimate of the time to simulate it, in arbitrary units."""
        return self.experiment.end.cycles * self.experiment.peers.count


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A fragment of a peer needs another level (``averaging.rules.line_levels``), or takes it."""

    time_s: float
    peer: str
    fragment: int
    level: str
    reason: str = ""
    """The reason why the peer's line needs it; empty: it is the level of a round that has begun."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a job. Losses are held-out losses of the mean of the peers' slow weights."""

    name: str
    seed: int
    loss: float
    goodput: float
    """Steps made, over those that the same peers would make without waiting or absence."""
    missed: float
    """Share of the live peers' possible contributions that are missing from the merges."""
    staleness: float
    """Mean number of versions between a contribution's base and its merge."""
    duration_s: float
    bytes_sent: int
    times_s: tuple[float, ...]
    tokens: tuple[float, ...]
    losses: tuple[float, ...]
    levels: tuple[LevelChange, ...] = ()
    learners_loss: float | None = None
    """Loss of the mean of the learners' own parameters at the end, of a swarm."""

    def time_to(self, loss: float) -> float | None:
        """Time at which the loss first reached ``loss``, interpolated; ``None`` if it never did."""
        for index, value in enumerate(self.losses):
            if value <= loss:
                if not index:
                    return self.times_s[0]
                before, drop = self.losses[index - 1], self.losses[index - 1] - value
                part = (before - loss) / drop if drop > 0 else 1.0
                began = self.times_s[index - 1]
                return began + part * (self.times_s[index] - began)
        return None


def train(job: Job, progress: Callable[[float], None] = lambda share: None) -> Trained:
    """Run one job. Equal jobs have equal results on the same machine."""
    trained = _train_centrally(job, progress) if job.central else _train_swarm(job, progress)
    if job.experiment.problem.device is not None:  # ten trainings fill a device with 80 GB
        import torch

        gc.collect()  # learners are parts of cycles
        torch.cuda.empty_cache()
    return trained


def _train_swarm(job: Job, progress: Callable[[float], None]) -> Trained:
    levels: list[LevelChange] = []

    def see(record: Mapping[str, Any]) -> None:
        if record["event"] in ("line_needs", "level"):
            levels.append(msgspec.convert(record, LevelChange))

    result = run_swarm(job.experiment, job.seed, progress=progress, on_event=see)
    points = result.points
    return Trained(
        name=job.name,
        seed=job.seed,
        loss=result.final.loss,
        goodput=result.goodput,
        missed=_missed(result),
        staleness=result.mean_staleness,
        duration_s=result.duration_s,
        bytes_sent=result.bytes_sent,
        times_s=tuple(point.time_s for point in points),
        tokens=tuple(point.merged_tokens for point in points),
        losses=tuple(point.loss for point in points),
        levels=tuple(levels),
        learners_loss=result.learners_loss,
    )


def _missed(result: SwarmResult) -> float:
    possible = sum(record.live for record in result.rounds)
    came = sum(record.contributors for record in result.rounds)
    return 1.0 - came / possible if possible else 0.0


def central_steps(experiment: Swarm) -> int:
    """Number of steps after which the reference has seen as many tokens as the experiment."""
    if experiment.end.tokens is not None:
        step_tokens = experiment.peers.count * problem_of(experiment).step_tokens
        return max(1, experiment.end.tokens // step_tokens)
    return max(1, round(experiment.end.cycles * experiment.outer.steps_per_cycle))


def _train_centrally(job: Job, progress: Callable[[float], None]) -> Trained:
    experiment, problem = job.experiment, problem_of(job.experiment)
    steps = central_steps(experiment)
    every = max(1, round(experiment.measure.every_cycles * experiment.outer.steps_per_cycle))
    learner = problem.learner(range(experiment.peers.count), seed=job.seed)
    measured = [(0, problem.evaluate(learner.values))]
    for step in range(1, steps + 1):
        learner.train(1, rate=experiment.problem.rate_at(step / steps))
        if step % every == 0 or step == steps:
            measured.append((step, problem.evaluate(learner.values)))
            progress(step / steps)
    step_s, step_tokens = experiment.peers.step_time_s, experiment.peers.count * problem.step_tokens
    return Trained(
        name=job.name,
        seed=job.seed,
        loss=measured[-1][1],
        goodput=1.0,
        missed=0.0,
        staleness=0.0,
        duration_s=steps * step_s,
        bytes_sent=0,
        times_s=tuple(step * step_s for step, _ in measured),
        tokens=tuple(float(step * step_tokens) for step, _ in measured),
        losses=tuple(loss for _, loss in measured),
    )


def key_of(job: Job) -> str:
    """A digest that is equal for jobs with equal results: of everything except the names."""
    settings = {**msgspec.to_builtins(job.experiment), "name": ""}
    encoded = msgspec.json.encode([settings, job.seed, job.central], order="deterministic")
    return blake3.blake3(encoded).hexdigest(16)


class TrainingFolder:
    """Finished trainings, one small file each, so that a long table can be resumed.

    A file is found by what was trained, not by the code that trained it: after a change of the
    code start with an empty folder.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def find(self, key: str) -> Trained | None:
        """The result of the job with this key, unless it is missing or damaged."""
        return read_json(self._file(key), Trained)

    def store(self, key: str, trained: Trained) -> None:
        write_whole(self._file(key), msgspec.json.encode(trained))

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.json"


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    kept: TrainingFolder | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Trained]:
    """Run all jobs, the longest first; returns the results in the order of ``jobs``.

    Jobs that differ only in their names run once; results in the folder ``kept`` are reused.
    """
    by_key = {key_of(job): job for job in jobs}
    found: dict[str, Trained] = {}
    for key in by_key:
        if kept is not None and (known := kept.find(key)) is not None:
            found[key] = known
    todo = {key: job for key, job in by_key.items() if key not in found}
    whole = sum(job.cost for job in by_key.values())
    left = sum(job.cost for job in todo.values())

    def keep(job: Job, trained: Trained) -> None:
        if kept is not None:
            kept.store(key_of(job), trained)

    trained = run_all(
        list(todo.values()),
        train,
        workers=workers,
        cost=lambda job: job.cost,
        on_done=keep,
        progress=lambda share: progress(1.0 - (1.0 - share) * left / whole),
    )
    found |= zip(todo, trained, strict=True)
    return [replace(found[key_of(job)], name=job.name) for job in jobs]


RunJobs: TypeAlias = Callable[[Sequence[Job]], list[Trained]]
"""``run_jobs``, with its keywords bound."""


def by_name(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """The results grouped by name, each group in the order of seeds."""
    groups: dict[str, list[Trained]] = {}
    for one in trained:
        groups.setdefault(one.name, []).append(one)
    for group in groups.values():
        group.sort(key=lambda one: one.seed)
    return groups


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table: a training for each seed."""

    part: str
    """Heading in the table; cells are compared within it."""
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    """Label of the row in the same part that it is compared with."""
    bound: float | None = None
    """Largest acceptable relative difference of its loss to that row's."""
    central: bool = False

    @property
    def name(self) -> str:
        return f"{self.part}/{self.label}"


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one cell, over its seeds."""

    cell: Cell
    trained: Sequence[Trained]
    loss: Mean
    change: Mean | None
    """Relative difference of the loss, paired by seed."""

    def mean(self, of: Callable[[Trained], float]) -> float:
        return Mean.of(of(one) for one in self.trained).value

    @property
    def held(self) -> bool | None:
        """A bound counts as missed only if it is exceeded by more than two standard errors;
        ``None``: there is none."""
        if self.change is None or self.cell.bound is None:
            return None
        return self.change.value - 2 * self.change.error <= self.cell.bound


def train_all(
    cells: Sequence[Cell],
    experiment_of: Callable[[Cell], Swarm],
    *,
    seeds: Sequence[int],
    run: RunJobs = run_jobs,
) -> list[Row]:
    """Train every cell with every seed."""
    trained = run(
        [
            Job(cell.name, experiment_of(cell), seed, central=cell.central)
            for cell in cells
            for seed in seeds
        ]
    )
    groups = by_name(trained)
    return [row_of(cell, groups) for cell in cells]


def row_of(cell: Cell, groups: Mapping[str, Sequence[Trained]]) -> Row:
    """A cell's results among those of all cells, by their names."""
    group, change = groups[cell.name], None
    if cell.against is not None:
        change = against(group, groups[f"{cell.part}/{cell.against}"])
    return Row(cell, group, Mean.of(one.loss for one in group), change)


R = TypeVar("R")


def shown(
    heading: str,
    text: str,
    rows: Sequence[R],
    part_of: Callable[[R], str],
    columns: Mapping[str, Callable[[R], str]],
) -> Section:
    """A table with a line for each row, and a heading where another part begins."""
    lines: list[list[str]] = []
    part = None
    for row in rows:
        if part_of(row) != part:
            part = part_of(row)
            lines.append([part])
        first, *others = (column(row) for column in columns.values())
        lines.append([f"  {first}", *others])
    return Section(heading, text, list(columns), lines)


def against(group: Sequence[Trained], base: Sequence[Trained]) -> Mean:
    """Relative difference of the loss to that of ``base``, paired by seed."""
    bases = {one.seed: one.loss for one in base}
    return Mean.of(one.loss / bases[one.seed] - 1.0 for one in group if one.seed in bases)


def mean_curve(group: Sequence[Trained]) -> tuple[list[float], list[float]]:
    """Times and mean losses over the seeds, up to the end of the shortest training."""
    xs = np.linspace(0.0, min(one.times_s[-1] for one in group), 60)
    losses = [np.interp(xs, one.times_s, one.losses) for one in group]
    return xs.tolist(), np.mean(losses, axis=0).tolist()

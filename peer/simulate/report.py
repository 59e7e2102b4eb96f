"""Runs an experiment for all swept settings and seeds, and reports the results.

``cells`` combines swept settings with seeds, ``simulate`` runs the cells in several processes, and
``rows`` and ``sections`` present the results. The result of a cell depends on its settings and its
seed alone, so it can be repeated by itself.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from peer.simulate.outcome import SwarmResult
from peer.simulate.results import Mean, Section, finished_png, new_axes, picture
from peer.simulate.settings import Swarm
from peer.simulate.simulation import run

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cell:
    """One swarm to simulate."""

    label: str
    """The swept settings of this cell."""
    experiment: Swarm
    seed: int


def cells(
    experiment: Swarm, settings: Iterable[Mapping[str, Any]], seeds: Sequence[int]
) -> list[Cell]:
    """Every combination of settings with every seed."""
    combinations = list(settings)
    swept = [
        name
        for name in (combinations[0] if combinations else {})
        if len({repr(combination[name]) for combination in combinations}) > 1
    ]
    made = []
    for combination in combinations:
        changed = experiment.with_settings(combination)
        label = ", ".join(f"{name}={_shown(combination[name])}" for name in swept)
        made += [Cell(label or experiment.name, changed, seed) for seed in seeds]
    return made


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def simulate(
    todo: Sequence[Cell],
    *,
    workers: int = 1,
    out: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[SwarmResult]:
    """The results of all cells, in their order. With ``out``, each cell's event log goes there."""
    return run_all(todo, partial(_run, out=out), workers=workers, progress=progress)


Progress: TypeAlias = Callable[[float], None]
Work: TypeAlias = Callable[[T, Progress], R]


def run_all(
    todo: Sequence[T],
    work: Work[T, R],
    *,
    workers: int = 1,
    cost: Callable[[T], float] = lambda one: 1.0,
    on_done: Callable[[T, R], None] = lambda one, result: None,
    progress: Progress = lambda share: None,
) -> list[R]:
    """The results of ``work`` on each, in the order of ``todo``; those of the largest cost first.

    With more than one worker each runs in another process. ``on_done`` is called as they end.
    """
    costs = [cost(one) for one in todo]
    order = sorted(range(len(todo)), key=lambda index: -costs[index])
    found: dict[int, R] = {}
    done = 0.0

    def finish(index: int, result: R) -> None:
        nonlocal done
        found[index] = result
        on_done(todo[index], result)
        done += costs[index]
        progress(done / sum(costs))

    def advance(index: int, share: float) -> None:
        progress((done + share * costs[index]) / sum(costs))

    if workers == 1 or len(todo) == 1:
        for index in order:
            finish(index, work(todo[index], partial(advance, index)))
    else:
        # spawn: torch's threads do not survive a fork
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            futures = {pool.submit(work, todo[index], untold): index for index in order}
            for future in as_completed(futures):
                finish(futures[future], future.result())
    return [found[index] for index in range(len(todo))]


def untold(share: float) -> None:
    """The progress of work in another process, which is told when it is done."""


def _run(cell: Cell, progress: Progress, *, out: Path | None) -> SwarmResult:
    if out is None:
        return run(cell.experiment, cell.seed, progress=progress)
    with (out / f"{_file_name(cell)}.events.jsonl").open("w", encoding="utf-8") as file:

        def write(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")

        return run(cell.experiment, cell.seed, progress=progress, on_event=write)


def _file_name(cell: Cell) -> str:
    plain = "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in cell.label)
    return f"{plain}.seed-{cell.seed}"


# Tables


@dataclass(frozen=True, slots=True)
class Row:
    """Summary of one cell: a line of the CSV file."""

    label: str
    seed: int
    loss: float
    """Held-out loss of the mean of all peers' slow weights."""
    peer_loss: float
    """Mean held-out loss of some peers' own slow weights."""
    dispersion: float
    """Rms distance of a peer from the mean, over the norm of the mean, at the end."""
    dispersion_max: float
    merged_tokens: float
    merged_share: float
    """Share of the processed tokens; likewise the next two."""
    pending_share: float
    discarded_share: float
    goodput: float
    group_size: float
    """Mean number of contributors of a round."""
    rounds: int
    melds: int
    staleness: float
    bytes_per_token: float
    """Bytes sent by all peers together, per processed token."""
    fetched_bytes: int
    duration_s: float
    trace: str


def rows(todo: Sequence[Cell], results: Sequence[SwarmResult]) -> list[Row]:
    return [_row(cell, result) for cell, result in zip(todo, results, strict=True)]


def _row(cell: Cell, result: SwarmResult) -> Row:
    fate, final = result.fate, result.final
    processed = max(1.0, fate.processed)
    kinds = Counter(record.kind for record in result.rounds)
    sizes = [record.contributors for record in result.rounds]
    return Row(
        label=cell.label,
        seed=cell.seed,
        loss=final.loss,
        peer_loss=final.peer_loss,
        dispersion=final.dispersion,
        dispersion_max=max(point.dispersion for point in result.points),
        merged_tokens=final.merged_tokens,
        merged_share=fate.merged / processed,
        pending_share=fate.pending / processed,
        discarded_share=fate.discarded_total / processed,
        goodput=result.goodput,
        group_size=statistics.fmean(sizes) if sizes else 0.0,
        rounds=len(result.rounds),
        melds=kinds["meld"],
        staleness=result.mean_staleness,
        bytes_per_token=result.bytes_sent / processed,
        fetched_bytes=result.fetched_bytes,
        duration_s=result.duration_s,
        trace=result.trace,
    )


def point_rows(todo: Sequence[Cell], results: Sequence[SwarmResult]) -> list[dict[str, Any]]:
    """One row per measured point, for the CSV file of the curves."""
    return [
        {"label": cell.label, "seed": cell.seed, **asdict(point)}
        for cell, result in zip(todo, results, strict=True)
        for point in result.points
    ]


def table(todo: Sequence[Cell], results: Sequence[SwarmResult]) -> Section:
    """The main table, with a line for each combination of settings."""
    by_label = _by_label(todo, results)
    seeds = len(todo) // max(1, len(by_label))
    return Section(
        f"{todo[0].experiment.name}: {todo[0].experiment.peers.count} peers",
        f"Mean of {seeds} seeds and its standard error. Loss: held-out loss of the mean of all "
        "peers' slow weights. Peer: mean loss of some peers' own slow weights. Dispersion: rms "
        "distance of a peer from the mean, over the norm of the mean, at the end. Group: mean "
        "number of contributors of a round. Bytes: sent by all peers, per token.",
        ["", "loss", "peer", "dispersion", "merged", "goodput", "group", "rounds", "bytes"],
        [_summary(label, group) for label, group in by_label.items()],
    )


def _by_label(todo: Sequence[Cell], results: Sequence[SwarmResult]) -> dict[str, list[Row]]:
    by_label: dict[str, list[Row]] = {}
    for row in rows(todo, results):
        by_label.setdefault(row.label, []).append(row)
    return by_label


def sections(todo: Sequence[Cell], results: Sequence[SwarmResult]) -> list[Section]:
    """All sections of the page: the main table, curves, histograms, and the fate of the tokens."""
    groups: dict[str, list[SwarmResult]] = {}
    for cell, result in zip(todo, results, strict=True):
        groups.setdefault(cell.label, []).append(result)
    by_label = _by_label(todo, results)
    return [
        table(todo, results),
        *(
            Section(heading, text, (), (), picture(_curves, groups, over, of))
            for heading, text, over, of in (
                (
                    "Loss against tokens",
                    "Loss of the mean model; merged tokens.",
                    "merged_tokens",
                    "loss",
                ),
                ("Loss against time", "Time in virtual seconds.", "time_s", "loss"),
                ("Loss against bytes", "Bytes sent by all peers.", "bytes_sent", "loss"),
                ("Dispersion", "Distance of the peers from their mean.", "time_s", "dispersion"),
            )
        ),
        Section(
            "Achieved group size",
            "Share of all rounds by number of contributors.",
            (),
            (),
            picture(
                _bars, {label: _sizes(group) for label, group in groups.items()}, "contributors"
            ),
        ),
        Section(
            "Staleness",
            "Share of contributions by number of versions between their base and their merge.",
            (),
            (),
            picture(
                _bars, {label: _staleness(group) for label, group in groups.items()}, "versions"
            ),
        ),
        Section(
            "Fate of the tokens",
            "Percent of the processed tokens. Goodput: processed tokens, in percent of those that "
            "all peers would process without absence or waiting.",
            ["", "merged", "pending", "discarded", "goodput"],
            [
                [
                    label,
                    *(
                        Mean.of(100 * getattr(row, name) for row in group).text(1)
                        for name in ("merged_share", "pending_share", "discarded_share", "goodput")
                    ),
                ]
                for label, group in by_label.items()
            ],
        ),
    ]


def _summary(label: str, group: Sequence[Row]) -> list[str]:
    return [
        label,
        Mean.of(row.loss for row in group).text(4),
        Mean.of(row.peer_loss for row in group).text(4),
        Mean.of(row.dispersion for row in group).text(4),
        f"{100 * Mean.of(row.merged_share for row in group).value:.0f}%",
        f"{100 * Mean.of(row.goodput for row in group).value:.1f}%",
        f"{Mean.of(row.group_size for row in group).value:.1f}",
        f"{Mean.of(row.rounds for row in group).value:.0f}",
        f"{Mean.of(row.bytes_per_token for row in group).value:.1f}",
    ]


# Pictures


def _curves(groups: Mapping[str, Sequence[SwarmResult]], over: str, of: str) -> bytes:
    axes = new_axes()
    for label, results in groups.items():
        curves = [_curve(result, over, of) for result in results]
        xs = np.linspace(0.0, min(float(x[-1]) for x, _ in curves), 100)
        ys = np.array([np.interp(xs, x, y) for x, y in curves])
        (line,) = axes.plot(xs, ys.mean(axis=0), label=label)
        if len(results) > 1:
            low, high = ys.min(axis=0), ys.max(axis=0)
            axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel=over.replace("_", " "), ylabel=of)
    return finished_png(axes, fontsize="small")


def _curve(result: SwarmResult, over: str, of: str) -> tuple[list[float], list[float]]:
    points = result.points[1:] if of == "loss" and len(result.points) > 2 else result.points
    return [getattr(point, over) for point in points], [getattr(point, of) for point in points]


def _sizes(group: Sequence[SwarmResult]) -> Counter[int]:
    return Counter(record.contributors for result in group for record in result.rounds)


def _staleness(group: Sequence[SwarmResult]) -> Counter[int]:
    total: Counter[int] = Counter()
    for result in group:
        total.update(result.staleness)
    return total


def _bars(counts: Mapping[str, Counter[int]], name: str) -> bytes:
    axes = new_axes()
    width = 0.8 / max(1, len(counts))
    for index, (label, counted) in enumerate(counts.items()):
        whole = max(1, counted.total())
        values = sorted(counted)
        axes.bar(
            [value + (index - (len(counts) - 1) / 2) * width for value in values],
            [100 * counted[value] / whole for value in values],
            width,
            label=label,
        )
    axes.set(xlabel=name, ylabel="percent")
    axes.set_xticks(sorted({value for counted in counts.values() for value in counted}))
    return finished_png(axes, fontsize="small")

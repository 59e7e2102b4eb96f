"""The loss that each choice costs at equal tokens: `python -m examples.paper.quality.run --help`.

One factor is varied at a time from a base point, the settings of a new run file, with paired seeds.
All rows process equally many tokens, whether these are merged, pending or dropped in the end: at
equal merged tokens, rows that drop work would train longer. The central reference takes the mean
gradient of all peers' batches at every step. A row is compared with another row of its factor
(``against``), seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer import Option

from examples.paper.paired import TEXT, Cell, Row, RunJobs, run_jobs, shown, train_all
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

BASE_LEARNERS = 4
CYCLES = 40
"""960 steps of each learner."""
LAST_ROUND_CYCLES = 0.1
"""Additional length that lets the last round of synchronous DiLoCo finish."""
HALF_CYCLE = 12
NORM_MAX_RATIO = 50.0
"""The bound of a new run on norms of uploads."""
ROBUST_BOUND = 0.02
"""Largest acceptable difference of the loss with liars to the loss without."""

# eta and mu of the outer optimizer.
OUTER_OPTIMIZERS = (
    *((1.0, mu) for mu in (0.5, 0.0, 0.3, 0.6, 0.7, 0.8)),
    *((0.7, mu) for mu in (0.5, 0.8, 0.9)),
    (0.4, 0.9),
)
FAILING: Mapping[int, Mapping[str, Any]] = {
    2: {"peers.misses": 0.55},
    4: {"peers.misses": 0.55},
    8: {"peers.misses": 0.5},
    16: {"peers.misses": 0.33},
}
"""Settings, by number of learners, with which about 30% of the contributions are missing. Rounds
wait for a majority, so at most 25% can be missing with four learners and none with two. The table
shows the actual share."""
PER_CYCLE = {"outer.late_work": "per_cycle"}
"""Late work counts as the mean of its cycles, as in new runs with Muon."""
SLOW_LINES = {"weather.latency_s": [1.6, 2.0], "outer.overlap_steps": HALF_CYCLE}
"""A round takes about half a cycle."""
MIXED_SPEEDS = {"peers.speed_spread": 0.4, "peers.step_jitter": 0.1}
SYNCHRONOUS = {
    "outer.fragments": 1,
    "outer.overlap_steps": 0,
    "outer.waits": True,
    "rounds.quorum": "all",
}


PAIR = "int2 up, int4 down"
CODECS: Sequence[tuple[str, Mapping[str, Any]]] = (
    *((name, {"outer.codec": name}) for name in ("f32", "f16", "int8", "int4")),
    (PAIR, {"outer.codec_up": "int2", "outer.codec_down": "int4"}),
    (f"{PAIR}, no feedback", {"outer.codec_up": "int2", "outer.feedback": "off"}),
    ("int2", {"outer.codec": "int2"}),
    ("int2, feedback of uploads alone", {"outer.codec": "int2", "outer.feedback": "uploads"}),
)


def cells(*, learners: Sequence[int]) -> list[Cell]:
    """The whole table."""
    found: list[Cell] = []
    for count in learners:
        factor, peers = f"method, M = {count}", {"peers.count": count}
        synchronous = "synchronous DiLoCo"
        found += [
            Cell(factor, "data parallel", peers, synchronous, central=True),
            Cell(factor, synchronous, {**peers, **SYNCHRONOUS}),
            Cell(factor, "decoupled", peers, synchronous, 0.01),
            Cell(factor, "decoupled, 30% fail", {**peers, **failing(count)}, "decoupled", 0.02),
        ]
    found += _factor("codec", CODECS, bounds={"int4": 0.005, PAIR: 0.003, "int2": 0.01})
    found += _factor(
        "outer optimizer",
        [
            (f"eta {eta:g}, mu {mu:g}", {"outer.learning_rate": eta, "outer.momentum": mu})
            for eta, mu in OUTER_OPTIMIZERS
        ],
    )
    for where, others in (
        ("where a round takes half a cycle", SLOW_LINES),
        ("30% fail", failing(BASE_LEARNERS)),
    ):
        found += _factor(
            f"outer momentum, {where}",
            [(f"mu {mu:g}", {**others, "outer.momentum": mu}) for mu in (0.5, 0.6, 0.7, 0.8)],
        )
    found += _factor(
        "merge",
        [
            ("mean", {}),
            ("RDA, eta 1", {"outer.merge": "rda"}),
            ("RDA, eta 0.7", {"outer.merge": "rda", "outer.learning_rate": 0.7}),
            ("RDA, eta 0.5", {"outer.merge": "rda", "outer.learning_rate": 0.5}),
        ],
    )
    found += _factor(
        "work that missed its round (30% fail)",
        [
            ("kept whole", failing(BASE_LEARNERS)),
            ("mean of its cycles", {**failing(BASE_LEARNERS), **PER_CYCLE}),
            ("damped to a half", {**failing(BASE_LEARNERS), "outer.missed": "damp"}),
            ("dropped", {**failing(BASE_LEARNERS), "outer.missed": "drop"}),
        ],
    )
    found += _factor(
        "overlap, where a round takes half a cycle",
        [
            (f"tau = {HALF_CYCLE}", SLOW_LINES),
            ("tau = 2", {**SLOW_LINES, "outer.overlap_steps": 2}),
        ],
    )
    found += _factor(
        "due times (speeds differ by 40%)",
        [
            ("scaled by speed", MIXED_SPEEDS),
            ("flat H", {**MIXED_SPEEDS, "rounds.scale_by_speed": False}),
        ],
    )
    return found


POISONED_LEARNERS = 10
LIARS = 0.3
ROBUST: Sequence[str] = ("mean", "centered_clip")
POISONS: Sequence[tuple[str, float]] = (("sign", 1), ("noise", 1), ("drift", 1), ("sign", 10))
"""Kinds of poison, and lengths relative to an honest upload. Both are within the bound on norms."""


def liar_cells() -> list[Cell]:
    """Merge rules with 30% of the members poisoning; only on request, because they take long.

    Each rule is compared with the mean of honest peers only. Rows of one poison are a factor, and
    the first two rows show what is lost with the liars' work alone.
    """
    found: list[Cell] = []
    peers = {"peers.count": POISONED_LEARNERS, "rounds.norm_max_ratio": NORM_MAX_RATIO}
    honest = {**peers, "peers.count": round((1 - LIARS) * POISONED_LEARNERS)}
    without = "mean, none lies"
    fewer = Cell("", "mean, liars' work missing", honest, without)

    def factor(name: str, settings: Mapping[str, Any]) -> None:
        found.append(Cell(name, without, peers))
        if settings:
            found.append(replace(fewer, part=name))
        for rule in ROBUST:
            if settings or rule != "mean":
                merged = {**peers, **settings, "outer.merge": rule}
                found.append(Cell(name, rule, merged, without, ROBUST_BOUND))

    factor("liars: none", {})
    for kind, length in POISONS:
        settings = {"peers.liars": LIARS, "peers.poison": kind, "peers.poison_length": length}
        factor(f"liars: {LIARS:.0%}, {kind} x {length:g}", settings)
    return found


MUON: Mapping[str, Any] = {"problem.name": "text_gpt", "outer.steps_per_cycle": 30}
"""A transformer, whose blocks have matrices, and the cycle of a new run of a named size."""
RATES: Mapping[str, float] = {"adamw": 1.2e-2, "muon": 2.4e-2}
"""Peak learning rates: the best ones of the factor ``muon, rates``."""
RATES_TRIED = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
MOMENTA_TRIED = (0.95, 0.9)
"""Momenta of Muon in the factor ``muon, momentum``."""
OPTIMIZERS: Mapping[str, str] = {"adamw": "AdamW", "muon": "Muon"}
MUON_BOUNDS: Mapping[int, float] = {4: 0.03, 8: 0.03, 16: 0.05}
"""Largest acceptable distance from data parallel with Muon, by number of learners."""


def muon_cells() -> list[Cell]:
    """Muon as the inner optimizer, beside AdamW; only on request, because they take long."""
    found: list[Cell] = []
    reference = "data parallel, Muon"
    for count, bound in MUON_BOUNDS.items():
        factor = f"muon, M = {count}"
        peers = {**MUON, "peers.count": count}
        adamw, muon = ({**peers, **_inner(name, RATES[name])} for name in OPTIMIZERS)
        found += [
            Cell(factor, reference, muon, central=True),
            Cell(factor, "data parallel, AdamW", adamw, reference, central=True),
            Cell(factor, "AdamW", adamw, "data parallel, AdamW"),
        ]
        found += [
            Cell(
                factor,
                f"Muon, mu {mu:g}",
                {**muon, "outer.momentum": mu},
                reference,
                bound if mu == 0.5 else None,
            )
            for mu in (0.5, 0.0, 0.7)
        ]
        fails = {**muon, **failing(count)}
        found += [
            Cell(factor, f"Muon, mu 0.5, 30% fail{rule}", {**fails, **late}, "Muon, mu 0.5", 0.02)
            for rule, late in (("", {}), (", per cycle", PER_CYCLE))
        ]
    muon = {**MUON, "peers.count": 8, **_inner("muon", RATES["muon"])}
    # For other lengths of the cycle: --set outer.steps_per_cycle=15 --cycles 80, and so on.
    found.append(Cell("muon, cycle", reference, muon, central=True))
    found.append(Cell("muon, cycle", "Muon", muon, reference))
    for momentum in MOMENTA_TRIED:
        tried = {**muon, "problem.momentum": momentum}
        central, swarm = f"data parallel, {momentum:g}", f"Muon, {momentum:g}"
        fails = {**tried, **failing(8), **PER_CYCLE}
        found += [
            Cell("muon, momentum", central, tried, central=True),
            Cell("muon, momentum", swarm, tried, central),
            Cell("muon, momentum", f"{swarm}, 30% fail, per cycle", fails, swarm, 0.02),
        ]
    for name, word in OPTIMIZERS.items():
        for rate in RATES_TRIED:
            tried = {**MUON, "peers.count": 8, **_inner(name, rate)}
            factor, central = "muon, rates", f"data parallel, {word}, {rate:g}"
            found += [
                Cell(factor, central, tried, central=True),
                Cell(factor, f"{word}, {rate:g}", tried, central),
            ]
    return found


LARGE: Mapping[str, Any] = {
    **MUON,
    **{"problem.size": 384, "problem.layers": 6, "problem.length": 256, "problem.batch": 16},
    **{"peers.count": 8, "problem.device": "cuda"},
}
"""A model of 10.7 million parameters in steps of 4096 tokens, for a GPU."""
LARGE_RATES: Mapping[str, float] = {"adamw": 2e-3, "muon": 4e-3}
"""The best rates of a swarm of eight of this size, of 0.001 to 0.004."""


def large_cells() -> list[Cell]:
    """The main rows of ``muon_cells`` and the codecs with a larger model; only on request."""
    factor, reference = "10 M parameters, M = 8", "data parallel, Muon"
    adamw, muon = ({**LARGE, **_inner(name, LARGE_RATES[name])} for name in OPTIMIZERS)
    base, fails = "Muon, int4", {**muon, **failing(8), **PER_CYCLE}
    bounds = {PAIR: 0.003, "int2": 0.01}
    return [
        Cell(factor, reference, muon, central=True),
        Cell(factor, base, muon, reference, MUON_BOUNDS[8]),
        Cell(factor, "Muon, int4, 30% fail, per cycle", fails, base, 0.02),
        *(
            Cell(factor, f"Muon, {name}", {**muon, **codec}, "Muon, f32", bounds.get(name))
            for name, codec in CODECS
            if name in ("f32", PAIR, "int2")
        ),
        Cell(factor, "data parallel, AdamW", adamw, reference, central=True),
        Cell(factor, "AdamW, int4", adamw, "data parallel, AdamW"),
    ]


def _inner(optimizer: str, rate: float) -> Mapping[str, Any]:
    return {"problem.optimizer": optimizer, "problem.learning_rate": rate}


def failing(learners: int) -> Mapping[str, Any]:
    """Settings with which about 30% of the contributions are missing."""
    return FAILING[min(FAILING, key=lambda count: abs(count - learners))]


def _factor(
    factor: str,
    choices: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    bounds: Mapping[str, float] | None = None,
) -> list[Cell]:
    """Cells of one factor, each compared with the first."""
    first = choices[0][0]
    return [
        Cell(factor, label, settings, None if label == first else first, (bounds or {}).get(label))
        for label, settings in choices
    ]


def experiment_of(cell: Cell, *, cycles: float, changes: Mapping[str, Any] | None = None) -> Swarm:
    settings: dict[str, Any] = {**TEXT, "peers.count": BASE_LEARNERS}
    settings |= {"end.cycles": cycles + LAST_ROUND_CYCLES, "end.counts": "processed"}
    settings["measure.every_cycles"] = cycles  # only the final loss is reported
    settings |= {**cell.settings, **(changes or {})}
    return Swarm(name=cell.name).with_settings(settings)


def table(
    *,
    seeds: Sequence[int],
    learners: Sequence[int] = (2, 4, 8, 16),
    cycles: float = CYCLES,
    only: str = "",
    changes: Mapping[str, Any] | None = None,
    run: RunJobs = run_jobs,
) -> list[Row]:
    """All rows of the factors whose names begin with ``only``.

    Those of ``liar_cells``, ``muon_cells`` and ``large_cells`` are among them only if ``only``
    names some.
    """
    special = [*liar_cells(), *muon_cells(), *large_cells()] if only else []
    there = cells(learners=learners) + special
    chosen = [cell for cell in there if cell.part.startswith(only)]
    if not chosen:
        names = dict.fromkeys(cell.part for cell in there)
        raise ValueError(f"no factor begins with {only!r}; there are: {'; '.join(names)}")
    return train_all(
        chosen,
        lambda cell: experiment_of(cell, cycles=cycles, changes=changes),
        seeds=seeds,
        run=run,
    )


def record(row: Row) -> dict[str, Any]:
    """A row for scripts."""
    cell, change = row.cell, row.change
    return {
        "factor": cell.part,
        "label": cell.label,
        "loss": row.loss.value,
        "loss_error": row.loss.error,
        "against": cell.against,
        "change": None if change is None else change.value,
        "change_error": None if change is None else change.error,
        "bound": cell.bound,
        "missed": row.mean(lambda one: one.missed),
        "staleness": row.mean(lambda one: one.staleness),
        "goodput": row.mean(lambda one: one.goodput),
        "sent_mb": row.mean(lambda one: one.bytes_sent / 1e6),
        "held": row.held,
    }


def _bound(row: Row) -> str:
    if row.cell.bound is None:
        return ""
    return f"{row.cell.bound:+.1%}: {'held' if row.held else 'missed'}"


def section(rows: Sequence[Row], *, seeds: int) -> Section:
    text = (
        "Loss: held-out loss in nats per byte of the mean of the peers' slow weights after equally "
        f"many processed tokens, mean and standard error of {seeds} seeds. Difference: relative to "
        "the first row of the factor, paired by seed (methods: to synchronous DiLoCo; 30% fail: to "
        "decoupled). Bound: held if the difference less two standard errors is within it. Missed: "
        "share of contributions that missed their merge. Sent: megabytes of all peers together."
    )
    table = shown(
        "Quality at equal tokens",
        text,
        rows,
        lambda row: row.cell.part,
        {
            "": lambda row: row.cell.label,
            "loss": lambda row: row.loss.text(4),
            "difference": lambda row: "" if row.change is None else row.change.percent(2),
            "bound": _bound,
            "missed": lambda row: f"{100 * row.mean(lambda one: one.missed):.0f}%",
            "sent": lambda row: f"{row.mean(lambda one: one.bytes_sent / 1e6):.1f}",
        },
    )
    return replace(table, picture_png=picture(_picture, rows))


def _picture(rows: Sequence[Row]) -> bytes:
    """Differences of all rows with their error bars, factor by factor."""
    drawn: list[tuple[str, Row | None]] = []
    for row in rows:
        if row.cell.part not in [name for name, _ in drawn]:
            drawn.append((row.cell.part, None))
        if row.change is not None:
            drawn.append((f"{row.cell.label}, against {row.cell.against}", row))
    figure = new_figure(height=1 + 0.24 * len(drawn))
    axes = figure.add_subplot()
    axes.axvline(0.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(drawn)), [name for name, _ in drawn])
    for place, (label, (_, one)) in enumerate(zip(axes.get_yticklabels(), drawn, strict=True)):
        if one is None or one.change is None:
            label.set_fontweight("bold")
            continue
        change, error = 100 * one.change.value, 100 * one.change.error
        color = "tab:red" if one.held is False else "tab:blue"
        axes.errorbar(change, place, xerr=2 * error, fmt="o", color=color, capsize=3)
        if one.cell.bound is not None:
            axes.plot(100 * one.cell.bound, place, "|", color="black", markersize=12)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel("difference of held-out loss, percent (two standard errors; black: bound)")
    axes.grid(alpha=0.3, axis="x")
    return as_png(figure)


def main(
    context: typer.Context,
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of each training.", min=1)] = CYCLES,
    quick: Annotated[
        bool,
        Option("--quick", help="One seed, 15 cycles, two and four learners, if not given."),
    ] = False,
    learners: Annotated[
        str, Option(help="Numbers of learners for the comparison of methods.", metavar="M,M,...")
    ] = "2,4,8,16",
    only: Annotated[
        str,
        Option(
            help="Only factors whose name begins with this. Left out otherwise: 'liars', merge "
            "rules where members poison, 'muon', a transformer trained with Muon, and '10 M', a "
            "larger one for a GPU.",
            metavar="FACTOR",
        ),
    ] = "",
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Json = False,
) -> None:
    """Loss that each choice costs at equal tokens, one factor at a time.

    Assumes a small byte-level model (200 000 parameters, the sources of the Python standard
    library), AdamW with a learning rate that rises and falls within the run, H = 24, P = 4, four
    equally fast peers on fast links unless the table says otherwise, and otherwise the settings of
    a new run. Data parallel takes the mean gradient of all peers at every step. Rounds, codecs and
    merges are the live peer's code, in virtual time. Small models in short runs show directions,
    not exact effects. A bound counts as missed when exceeded by more than two standard errors.

    Example: python -m examples.paper.quality.run --quick --only codec
    """
    chosen = seeds_from(seed, short(context, "seeds", seeds, 1))
    learners = short(context, "learners", learners, "2,4")
    try:
        counts = tuple(int(count) for count in learners.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--learners {learners!r} is not a list of numbers") from error
    if min(counts) < 2:
        raise typer.BadParameter(f"--learners {learners!r}: one learner has nobody to merge with")

    def train(run: RunJobs) -> tuple[Section, list[dict[str, Any]]]:
        rows = table(
            seeds=chosen,
            learners=counts,
            cycles=short(context, "cycles", cycles, 15.0),
            only=only,
            changes=changes_of(settings),
            run=run,
        )
        return section(rows, seeds=len(chosen)), [record(row) for row in rows]

    train_and_show(train, workers=workers, out=out, as_json=as_json)


if __name__ == "__main__":
    run_program(main)

"""``shoal simulate``: experiments in virtual time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer
from typer import Argument, Option

from peer.cli.application import Json, json_text
from peer.cli.showing import (
    bits_per_second,
    milliseconds,
    present,
    print_section,
    progress,
    seconds,
    usage_errors,
)

if TYPE_CHECKING:
    from peer.results import Section
    from peer.simulate.paper.training import RunJobs
    from peer.simulate.swarm.report import Cell

T = TypeVar("T")

simulations = typer.Typer(help="Experiments in virtual time.", no_args_is_help=True)

Out = Annotated[Path | None, Option(help="Folder for CSV, PNG and an HTML page.")]
OutKept = Annotated[
    Path | None,
    Option(help="Folder for CSV, PNG, an HTML page and finished trainings, which are reused."),
]
PairedSeeds = Annotated[int, Option(help="Number of paired seeds of each row.", min=1)]
FirstSeed = Annotated[int, Option(help="The first seed.", min=0)]
Workers = Annotated[int, Option(help="Number of parallel processes.", min=1, max=64)]
Settings = Annotated[
    list[str] | None,
    Option("--set", help="A setting of every swarm, such as outer.momentum=0.7; repeatable."),
]


@simulations.command("goodput")
def simulate_goodput(
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
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Training time that failures leave: the reported table, or your own swarm.

    Assumes Poisson failures, one per chip and year, in slices of chips that are away for about half
    an hour; after a failure and at returns all chips of a job pause. The pauses are calibrated on
    the five elastic cells and one rigid cell of the reported table; all decoupled cells are
    predictions. Example: shoal simulate goodput --learners 12 --mtbf 9h --rejoin 4m
    """
    from peer.simulate.paper import goodput

    if learners is not None:
        if out is not None:
            raise typer.BadParameter("--out is for the reported table: leave --learners out")
        own = goodput.swarm(
            learners=learners,
            mtbf_s=seconds(mtbf or "9h", option="--mtbf"),
            rejoin_s=seconds(rejoin or "4m", option="--rejoin"),
            seed=0,
        )
        if as_json:
            print(json_text({"swarm": [asdict(row) for row in own]}))
        else:
            for row in own:
                print(
                    f"{row.system:10}  goodput {row.goodput:6.2f}%  "
                    f"some learner trains {row.uptime:6.2f}%"
                )
        return
    if mtbf is not None or rejoin is not None:
        raise typer.BadParameter("--mtbf and --rejoin are of your own swarm: pass --learners, too")
    model = goodput.ClusterModel()
    numbers = tuple(range(seeds))
    with progress("simulating", quiet=as_json) as advance:
        cells = goodput.table(model, seeds=numbers, progress=advance)
    keys = ("system", "learners", "chips", "goodput", "reported", "standard_error", "uptime")
    present(
        "goodput",
        f"shoal simulate goodput --seeds {seeds}",
        cells,
        lambda: goodput.section(cells),
        record={"cells": [{key: getattr(cell, key) for key in keys} for cell in cells]},
        title="Goodput",
        out=out,
        as_json=as_json,
    )


@simulations.command("bandwidth")
def simulate_bandwidth(
    params: Annotated[float, Option(help="Number of parameters of the model.")] = 5e9,
    step: Annotated[str, Option(help="Duration of one training step.")] = "1s",
    sites: Annotated[int, Option(help="Number of sites, with one learner each.", min=2)] = 8,
    cycle: Annotated[int, Option("--cycle", "-H", help="H: steps per cycle.", min=1)] = 24,
    fragments: Annotated[
        int, Option("--fragments", "-P", help="P: fragments of the model.", min=1)
    ] = 24,
    tau: Annotated[int, Option(help="Steps that an exchange may overlap.", min=0)] = 2,
    up: Annotated[
        str | None, Option(help="Your link, such as 20Mbit: show the largest models for it.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The link speed that each learner needs, or the models that your link can train.

    Assumes that data parallel sends bf16 gradients in a ring and hides them behind the backward
    pass, two thirds of a step; that DiLoCo waits for its exchange; that streaming overlaps tau
    steps and waits for the rest; that decoupled and shoal never wait. The reported 198 and 0.84
    Gbit/s are those for 95% utilisation.

    Example: shoal simulate bandwidth --up 20Mbit --params 1.2e9
    """
    from peer.simulate.paper import bandwidth

    with usage_errors():
        setting = bandwidth.Setting(
            parameters=params,
            step_s=seconds(step, option="--step"),
            learners=sites,
            steps_per_cycle=cycle,
            fragments=fragments,
            overlap_steps=tau,
        )
    if up is not None:
        if out is not None:
            raise typer.BadParameter("--out is for the link that is needed: leave --up out")
        link = bits_per_second(up) / 1e9
        largest = {
            method: bandwidth.largest_model(method, setting, link_gbit_s=link)
            for method in bandwidth.METHODS
        }
        if as_json:
            print(json_text({"link_gbit_s": link, "largest_model": largest, "asked": params}))
        else:
            for method, size in largest.items():
                verdict = "enough" if size >= params else "not enough"
                print(f"{method:14} up to {size / 1e6:12,.1f} M parameters: {verdict}")
            if largest["shoal"] < params:
                print(f"enough for shoal: {bandwidth.what_helps(setting, link_gbit_s=link)}")
        return
    rows = bandwidth.needs(setting)
    present(
        "bandwidth",
        f"shoal simulate bandwidth --params {params:g} --step {step} --sites {sites}",
        rows,
        lambda: bandwidth.section(rows),
        record={"rows": [asdict(row) for row in rows]},
        title="Bandwidth",
        out=out,
        as_json=as_json,
    )


@simulations.command("swarm")
def simulate_swarm(
    experiment: Annotated[
        Path | None, Argument(help="TOML file of an experiment; by default all settings' defaults.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="key=v1,v2: a swarm for each value; repeatable, for combinations."),
    ] = None,
    seeds: PairedSeeds = 1,
    seed: FirstSeed = 0,
    workers: Workers = 1,
    out: Annotated[
        Path | None, Option(help="Folder for CSV, event logs, plots and an HTML page.")
    ] = None,
    plugin: Annotated[
        list[Path] | None,
        Option(help="Your Python file that registers merge rules, codecs or groupings."),
    ] = None,
    sizes: Annotated[
        str | None,
        Option(
            help="Number of peers over time: 2,40,2 grows and shrinks; 20,20/40,40 doubles at once."
        ),
    ] = None,
    over: Annotated[str, Option(help="With --sizes: duration of the schedule.")] = "10m",
    politely: Annotated[
        bool, Option("--politely", help="With --sizes: peers leave in order, and do not crash.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a swarm of any size, with your own merge rule, network and peers.

    Rounds, grouping, codecs, merging and catching up are the live peer's code; training is real (a
    small model, or a quadratic problem for thousands of peers); network, time and membership are
    simulated. The same seed gives the same result, to the last bit. All settings and their defaults
    are in the module peer.simulate.swarm.experiment, an example in examples/swarm.toml of a
    clone.

    With --sizes the swarm follows a schedule, and a table for each seed shows merges, pauses,
    tokens and the cost of membership over time. The experiment's number of peers, events and end
    are not used then. Example:
    shoal simulate swarm --set peers.count=64 --set mixing.every=0,1,4 --seeds 3 --out results
    """
    from peer.results import write_csv, write_html
    from peer.simulate.swarm import report as swarm_report
    from peer.simulate.swarm.experiment import BadExperiment, Experiment, parse, sweep
    from peer.simulate.swarm.plugins import load

    load(plugin or ())
    try:
        chosen = parse(experiment.read_text(encoding="utf-8")) if experiment else Experiment()
    except OSError as error:
        raise BadExperiment(f"{experiment} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadExperiment(f"{experiment} is not UTF-8 text ({error.reason})") from error
    todo = swarm_report.cells(chosen, sweep(settings or []), _seeds(seeds, seed))
    if sizes is not None:
        if out is not None:
            raise typer.BadParameter("--out is for a swarm of one size: leave --sizes out")
        _follow_sizes(todo, sizes, over, politely=politely, as_json=as_json)
        return
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress("simulating", quiet=as_json) as advance:
        results = swarm_report.simulate(
            todo, workers=workers, out=out, plugins=tuple(plugin or ()), progress=advance
        )
    rows = swarm_report.rows(todo, results)
    command = " ".join(
        ["shoal simulate swarm", *([str(experiment)] if experiment else [])]
        + [f"--set {setting}" for setting in settings or []]
        + [f"--seeds {seeds} --seed {seed}"]
    )
    if out is not None:
        write_csv(out / "swarm.csv", rows)
        write_csv(out / "swarm-curves.csv", swarm_report.point_rows(todo, results))
        parts = swarm_report.sections(todo, results)
        for part in parts:
            if part.picture_png is not None:
                name = part.heading.lower().replace(" ", "-")
                (out / f"swarm-{name}.png").write_bytes(part.picture_png)
        title = f"Simulated swarm: {chosen.name}"
        write_html(out / "swarm.html", title=title, command=command, sections=parts)
    if as_json:
        print(json_text({"command": command, "rows": [asdict(row) for row in rows]}))
    else:
        print_section(swarm_report.table(todo, results))


def _follow_sizes(
    todo: Sequence[Cell], sizes: str, over: str, *, politely: bool, as_json: bool
) -> None:
    from peer.simulate.membership_cost import membership_cost
    from peer.simulate.sizes import parse
    from peer.simulate.swarm import resizing

    with usage_errors():
        schedule = parse(sizes, over_s=seconds(over, option="--over"))
    for cell in todo:
        ends = resizing.window_ends(cell.experiment, schedule)
        with progress("simulating", quiet=as_json) as advance:
            found = resizing.follow(
                cell.experiment,
                schedule,
                "leave" if politely else "crash",
                cell.seed,
                progress=advance,
            )
            costs = membership_cost(schedule, ends, politely=politely, seed=cell.seed)
        if as_json:
            windows = [asdict(window) for window in found.windows]
            record = {"label": cell.label, "seed": cell.seed, "rise": found.rise}
            print(json_text({**record, "windows": windows, "costs": [asdict(c) for c in costs]}))
        else:
            print_section(resizing.table(f"{cell.label}, seed {cell.seed}", found, costs))


@simulations.command("heterogeneous")
def simulate_heterogeneous(
    context: typer.Context,
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of a learner of speed 1.", min=1)] = 50,
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

    Example: shoal simulate heterogeneous --quick --out results
    """
    from peer.simulate.paper import heterogeneous

    chosen = _seeds(_short(context, "seeds", seeds, 1), seed)
    length = _short(context, "cycles", cycles, 15.0)
    parts = tuple(part for part in heterogeneous.PARTS if part.startswith(only))
    if not parts:
        names = "; ".join(heterogeneous.PARTS)
        raise typer.BadParameter(f"no mix begins with {only!r}; there are: {names}")

    def train(run: RunJobs) -> Shown:
        rows, trained = heterogeneous.table(
            seeds=chosen, cycles=length, parts=parts, changes=_changes(settings), run=run
        )
        return rows, lambda: heterogeneous.section(rows, trained)

    command = f"heterogeneous --seeds {len(chosen)} --seed {seed} --cycles {length:g}"
    _train_and_show(
        command, train, only=only, settings=settings, workers=workers, out=out, as_json=as_json
    )


@simulations.command("quality")
def simulate_quality(
    context: typer.Context,
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of each training.", min=1)] = 40,
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

    Example: shoal simulate quality --quick --only codec
    """
    from peer.simulate.paper import quality

    chosen = _seeds(_short(context, "seeds", seeds, 1), seed)
    length = _short(context, "cycles", cycles, 15.0)
    learners = _short(context, "learners", learners, "2,4")
    try:
        counts = tuple(int(count) for count in learners.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--learners {learners!r} is not a list of numbers") from error
    if min(counts) < 2:
        raise typer.BadParameter(f"--learners {learners!r}: one learner has nobody to merge with")

    def train(run: RunJobs) -> Shown:
        rows = quality.table(
            seeds=chosen,
            learners=counts,
            cycles=length,
            only=only,
            changes=_changes(settings),
            run=run,
        )
        return rows, lambda: quality.section(rows, seeds=len(chosen))

    command = (
        f"quality --seeds {len(chosen)} --seed {seed} --cycles {length:g} "
        f"--learners {','.join(str(count) for count in counts)}"
    )
    _train_and_show(
        command, train, only=only, settings=settings, workers=workers, out=out, as_json=as_json
    )


@simulations.command("compare")
def simulate_compare(
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
    cycles: Annotated[float, Option(help="Length of the training.", min=2)] = 40,
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

    Example: shoal simulate compare --params 3e8 --link 100Mbit --latency 20 --out results
    """
    from peer.simulate.paper import compare
    from peer.simulate.paper import following as follow

    with usage_errors():
        setting = compare.Setting(
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

    def train(run: RunJobs) -> Shown:
        chosen, changes = _seeds(seeds, seed), _changes(settings)
        if following:
            followed = follow.table(
                setting,
                seeds=chosen,
                links_mbit=links,
                latency_s=latencies[0],
                changes=changes,
                run=run,
            )
            return followed, lambda: follow.section(followed, setting)
        rows, _ = compare.table(
            setting,
            seeds=chosen,
            links_mbit=links,
            latencies_s=latencies,
            changes=changes,
            run=run,
        )
        return rows, lambda: compare.section(rows, setting)

    command = (
        f"compare --params {params:g} --step {step} --learners {learners} --link {link} "
        f"--latency {latency} --cycles {cycles:g} --seeds {seeds} --seed {seed}"
        f"{' --following' if following else ''}"
    )
    _train_and_show(command, train, settings=settings, workers=workers, out=out, as_json=as_json)


def _short(context: typer.Context, option: str, value: T, short: T) -> T:
    """The value of an option, which is ``short`` with --quick unless it was given."""
    source = context.get_parameter_source(option)
    is_given = source is not None and source.name != "DEFAULT"
    return short if context.params["quick"] and not is_given else value


def _seeds(count: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def _changes(settings: Sequence[str] | None) -> dict[str, Any]:
    from peer.simulate.swarm.experiment import BadExperiment, sweep

    combinations = list(sweep(settings or []))
    if len(combinations) > 1:
        raise BadExperiment("--set takes one value for each setting here; sweep with `swarm`")
    return combinations[0]


Shown: TypeAlias = "tuple[Sequence[Any], Callable[[], Section]]"
"""Rows of an experiment, and a function that presents them."""


def _train_and_show(
    command: str,
    train: Callable[[RunJobs], Shown],
    *,
    only: str = "",
    settings: Sequence[str] | None,
    workers: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the trainings of an experiment that are not yet in ``out``, and present the results.

    ``command``: name of the experiment, and its options, for repeating it.
    """
    from peer.results import record_of
    from peer.simulate.paper.training import TrainingFolder, run_jobs

    kept = None if out is None else TrainingFolder(out / "trainings")
    with usage_errors(), progress("training", quiet=as_json) as advance:
        rows, draw = train(partial(run_jobs, workers=workers, kept=kept, progress=advance))
    chosen = ["--only", only] if only else []
    for setting in settings or ():
        chosen += ["--set", setting]
    whole = shlex.join(["shoal", "simulate", *command.split(), *chosen])
    name = command.split()[0]
    record = {"command": whole, "rows": [record_of(row) for row in rows]}
    present(name, whole, rows, draw, record=record, out=out, as_json=as_json)

"""``shoal demo``, ``bench`` and ``chaos``: real processes on this machine."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from peer.cli.application import (
    MEASURE,
    Json,
    Plain,
    can_draw,
    complain,
    json_text,
    report_if_slow,
    start_logging,
)
from peer.cli.finding import no_peers
from peer.cli.showing import count, seconds, speed, usage_errors
from peer.signals import as_interrupts

if TYPE_CHECKING:
    from peer.run_file.sections import RunFile

commands = typer.Typer()

LogFolder = Annotated[Path | None, Option(help="Folder for logs. [default: a new folder in /tmp]")]
Check = Annotated[bool, Option("--check", help="Exit with status 1 if a bar is missed.")]


@commands.command(rich_help_panel=MEASURE)
def demo(
    peers: Annotated[int, Option(help="Number of learners.", min=2, max=16)] = 4,
    steps: Annotated[int, Option(help="Mean number of steps of a learner.", min=48)] = 240,
    directory: Annotated[
        Path | None, Option(help="Folder for logs and plots; by default a new one in /tmp.")
    ] = None,
    as_json: Json = False,
    plain: Plain = False,
) -> int:
    """Run a whole swarm on this machine in two or three minutes, with a kill -9 on the way.

    Example: shoal demo --peers 4
    """
    from rich.live import Live

    from peer.lab.demo import report as demo_report
    from peer.lab.demo.demo import Demo, DemoSettings, summary, summary_text
    from peer.results import new_figure

    start_logging(logging.WARNING)
    new_figure()  # a missing matplotlib is reported now, not after three minutes
    where = _folder(directory, "demo")
    settings = DemoSettings(peers=peers, steps=steps, directory=where)
    with as_interrupts(), Demo(settings) as swarm:
        if plain or as_json or not can_draw(sys.stdout):
            printed, tell = 0, _course(as_json=as_json)

            def look() -> None:
                nonlocal printed
                for line in swarm.news[printed:]:
                    tell(f"{swarm.elapsed_s:6.1f} s  {line}")
                printed = len(swarm.news)

            result = swarm.run(look)
        else:
            from peer.views.screen import draw

            with Live(draw(swarm.view()), auto_refresh=False) as live:
                result = swarm.run(lambda: live.update(draw(swarm.view()), refresh=True))
    with report_if_slow("to compare, one learner trains alone"):
        compared = demo_report.compare(settings, result)
    record = summary(settings, result, compared)
    demo_report.write(settings.directory, result, compared, record)
    print(json_text(record) if as_json else summary_text(record), flush=True)
    return 0 if record["ok"] else 1


def _folder(chosen: Path | None, command: str) -> Path:
    """The folder that was chosen for logs, if it is empty or absent, or a new one.

    A swarm of an earlier trial, or somebody's ``run.toml``, would be in the way of this one.
    """
    folder = (chosen or Path(tempfile.mkdtemp(prefix=f"shoal-{command}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (other := next(folder.iterdir(), None)) is not None:
        raise typer.BadParameter(
            f"--directory: {folder} is not empty, {other.name!r} is in it; pass a new folder"
        )
    return folder


def _course(*, as_json: bool) -> Callable[[str], None]:
    """Prints the course of a trial: with ``--json`` on stderr, as stdout has JSON alone."""
    return partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)


def _tell(*words: str) -> None:
    print(*words, file=sys.stderr)


benches = typer.Typer(help="Measurements on this machine.", no_args_is_help=True)


@benches.command("averaging")
def bench_averaging(
    values: Annotated[str, Option(help="Number of values to average, such as 30e6.")] = "30e6",
    peers: Annotated[str, Option(help="Group sizes to measure, separated by commas.")] = "2",
    codec: Annotated[
        str,
        Option(
            help="Codecs of shoal to measure; int2/int4: one up to reducers, one for the way down."
        ),
    ] = "f32,f16,int8,int4,int2/int4",
    vs: Annotated[
        str,
        Option(
            help="Systems to compare with: hivemind, gloo, daemon (shoal without direct "
            "connections) and numpy (shoal without compiled codecs); may be empty."
        ),
    ] = "hivemind,gloo",
    rounds: Annotated[int, Option(help="Measured rounds of each system.", min=1)] = 7,
    as_json: Json = False,
) -> None:
    """Compare the time of an averaging round with that of other systems.

    Every peer is a process on this machine, with a libp2p daemon of its own where the system uses
    one. Rounds of all systems alternate. "seconds" is the time from the closed group to the new
    state; "forming" adds the time to form the group.

    Example: shoal bench averaging --values 30e6 --peers 2,4 --codec int4
    """
    from peer.lab.bench.comparison import AveragingBench, run_averaging_bench, table

    with usage_errors():
        bench = AveragingBench(
            values=count(values),
            peers=tuple(int(count) for count in peers.split(",")),
            codecs=tuple(codec.split(",")),
            against=tuple(name for name in vs.split(",") if name),
            rounds=rounds,
        )
    found = run_averaging_bench(bench, tell=_tell)
    print(json_text(found) if as_json else table(found["rows"]))


@benches.command("training")
def bench_training(
    file: Annotated[
        Path | None,
        Argument(
            metavar="RUN.toml",
            help="Run whose model, batch and optimizer are measured; unset: 124 M parameters on a "
            "GPU, a small model on a CPU.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        Option(
            help="A named size instead of a run, with batches of 32 sequences: 124m, 350m or 1b."
        ),
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, mps, ... or auto.")] = "auto",
    threads: Annotated[
        int | None,
        Option(help="Torch threads on a CPU. [default: all cores but one]", min=1),
    ] = None,
    time: Annotated[str, Option(help="Measured time of each turn of a loop.")] = "20s",
    turns: Annotated[int, Option(help="Turns of each loop.", min=1)] = 5,
    loops: Annotated[
        str,
        Option(
            help="Loops to measure, separated by commas: alone, by_hand, and shoal, which needs "
            "memory for a second model."
        ),
    ] = "alone,by_hand,shoal",
    check: Check = False,
    as_json: Json = False,
) -> int:
    """Compare the training loop of `shoal join` with the same loop alone and one written by hand.

    The loops take turns, each in a process of its own. With shoal, a second peer on this machine
    merges with it and computes nothing. Ratios are medians over turns that followed each other.

    Example: shoal bench training --time 20s --turns 5
    """
    import psutil

    from peer.joining.link import find_run
    from peer.lab.bench.training import (
        TrainingBench,
        run_of_size,
        run_training_bench,
        small_run,
        table,
    )
    from peer.trainer.computing.device_facts import choose_device

    with usage_errors():
        is_cpu = choose_device(device).type == "cpu"
        spare = max(1, (psutil.cpu_count(logical=False) or 2) - 1)
        if file is None and size is None and not is_cpu:
            size = "124m"
        if file is not None:
            if size is not None:
                raise ValueError("pass a run or --size, not both")
            run = find_run(str(file), ask_peers=no_peers).run
        else:
            run = small_run() if size is None else run_of_size(size)
        bench = TrainingBench(
            run=run,
            size=size,
            device=device,
            threads=threads or (spare if is_cpu else None),
            seconds=seconds(time, option="--time"),
            turns=turns,
            loops=tuple(name for name in loops.split(",") if name),
        )
    with as_interrupts():
        found = run_training_bench(bench, tell=_tell)
    print(json_text(found) if as_json else table(found))
    bars = [*found["bars"], *found["device_bars"]]
    return 1 if check and not all(bar["met"] for bar in bars) else 0


@benches.command("memory")
def bench_memory(
    values: Annotated[str, Option(help="Number of parameters, such as 100e6.")] = "100e6",
    fragments: Annotated[int, Option(help="Fragments of the model.", min=1)] = 24,
    codec: Annotated[str, Option(help="Codec of both ways.")] = "int4",
    ways: Annotated[
        str, Option(help="Places of the state to measure, separated by commas.")
    ] = "memory,files",
    founder: Annotated[
        str | None,
        Option(
            help="Place of the state of each pair's founder, which is not measured: files halves "
            "what a pair takes. [default: that of the other]"
        ),
    ] = None,
    turns: Annotated[int, Option(help="Cycles of each pair of agents.", min=1)] = 3,
    step: Annotated[
        str, Option(help="Time of a step; a cycle has two for each fragment.")
    ] = "0.5s",
    directory: Annotated[
        Path, Option(help="Folder on the disk to measure; it is left as it was.")
    ] = Path(),
    check: Check = False,
    as_json: Json = False,
) -> int:
    """Compare an agent's memory and rounds with the run's state in memory and in files.

    Real agents on this machine, two for each place, with stand-ins for their trainers. In memory
    the two need 24 bytes for each parameter, in files as much of the disk and of checkpoints.

    Example: shoal bench memory --values 100e6 --turns 3
    """
    import psutil

    from peer.lab.bench.memory import MemoryBench, run_memory_bench, table

    with usage_errors():
        bench = MemoryBench(
            values=count(values),
            fragments=fragments,
            codec=codec,
            ways=tuple(ways.split(",")),
            founder=founder,
            turns=turns,
            step_s=seconds(step, option="--step"),
        )
        bench.check_fits(
            memory_bytes=psutil.virtual_memory().available,
            disk_bytes=shutil.disk_usage(directory).free,
        )
    with as_interrupts():
        found = run_memory_bench(bench, folder=directory.resolve(), tell=_tell)
    print(json_text(found) if as_json else table(found))
    return 1 if check and not all(bar["met"] for bar in found["bars"]) else 0


@benches.command("regions")
def bench_regions(
    file: Annotated[
        Path, Argument(metavar="RUN.toml", help="Run to train; its seeds are replaced.")
    ],
    regions: Annotated[int, Option(help="Number of regions, a learner in each.", min=2)] = 4,
    mbit: Annotated[
        str, Option(help="Speeds of a region's line in Mbit/s, separated by commas.")
    ] = "200",
    cycle: Annotated[
        str | None,
        Option(help="Steps per cycle, separated by commas. [default: those of the run]"),
    ] = None,
    distance: Annotated[
        float, Option(help="Milliseconds from one region to another, one way.", min=0.0)
    ] = 40.0,
    step: Annotated[str, Option(help="Time of a step; computing must take less.")] = "0.5s",
    time: Annotated[str, Option(help="Time of each trial, from the limiting of lines on.")] = "60s",
    fail: Annotated[
        str | None,
        Option(help="Afterwards kill one region for this time, and watch its return."),
    ] = None,
    extrapolate: Annotated[
        Path | None,
        Option(metavar="LARGE.toml", help="Also say what this run needs of such lines."),
    ] = None,
    directory: LogFolder = None,
    as_json: Json = False,
) -> None:
    """Train in several regions on limited lines, and compare their traffic with its prediction.

    Every region is a network namespace of this machine with a real peer in it. It needs Linux and
    root. Bytes are those of the regions' interfaces, with all headers.

    Example: shoal bench regions examples/regions/run.toml --mbit 50,200 --cycle 8,32
    """
    from peer.joining.link import find_run
    from peer.lab.network.topology import cannot_build
    from peer.lab.regions import extrapolation
    from peer.lab.regions.figures import record, table
    from peer.lab.regions.trial import Trial, conduct

    start_logging(logging.WARNING)
    where = _folder(directory, "regions")
    with usage_errors():
        run = find_run(str(file), ask_peers=no_peers).run
        large = None if extrapolate is None else find_run(str(extrapolate), ask_peers=no_peers).run
        cycles = [count(steps) for steps in cycle.split(",")] if cycle else [None]
        trials = [
            Trial(
                run=run if steps is None else _with_cycle(run, steps),
                directory=where / f"{rate:g}-mbit-cycle-{steps or run.outer.steps_per_cycle}",
                regions=regions,
                mbit=rate,
                one_way_ms=distance / 2,
                step_s=seconds(step, option="--step"),
                seconds=seconds(time, option="--time"),
                fail_s=None if fail is None else seconds(fail, option="--fail"),
            )
            for steps in cycles
            for rate in map(speed, mbit.split(","))
        ]
    if (reason := cannot_build()) is not None:
        complain(f"regions cannot be made here: {reason}")
        raise typer.Exit(1)
    rows = []
    with as_interrupts():
        for trial in trials:
            title = f"{trial.mbit:g} Mbit/s, H = {trial.run.outer.steps_per_cycle}:"
            rows.append(conduct(trial, tell=partial(_tell, title)))
    beyond = None if large is None else extrapolation.extrapolate(large, regions, rows)
    if as_json:
        found = {"rows": [record(each) for each in rows]}
        print(json_text(found if beyond is None else {**found, "extrapolation": asdict(beyond)}))
        return
    print(table(rows))
    if beyond is not None:
        print(extrapolation.text(beyond))


def _with_cycle(run: RunFile, steps: int) -> RunFile:
    """The run with cycles of so many steps. Raises ``RunFileError`` if it cannot have them."""
    from peer.run_file.reading import with_settings

    return with_settings(run, {"outer.steps_per_cycle": steps}, source="--cycle")


chaos = typer.Typer(
    help="Inject faults into a swarm on this machine, and judge it.", no_args_is_help=True
)


@chaos.command("run")
def chaos_run(
    scenarios: Annotated[
        list[str] | None,
        Argument(metavar="SCENARIO...", help="kill, leader, seeds, ...; or all."),
    ] = None,
    peers: Annotated[
        int | None,
        Option(
            help="Number of learners, without hostile ones. [default: 4; of liars: 7; of resize: "
            "12 at most]",
            min=2,
            max=32,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        Option(
            help="Length of each scenario. [default: 2; of liars: 4; of resize: 10; of "
            "strangers: 60]",
            min=0.4,
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the schedule.", min=0)] = 0,
    pace: Annotated[float, Option(help="Least seconds per step.", min=0.01)] = 0.2,
    control: Annotated[bool, Option(help="Run a swarm without faults first, to compare.")] = True,
    directory: LogFolder = None,
    as_json: Json = False,
) -> int:
    """Inject faults into a swarm of real processes on a seeded schedule, and judge its promises.

    Exit status 1 if a promise is broken. Scenarios: kill, leader, seeds, freeze, slow, partition,
    agent, disk, clock, poison, flood, strangers, liars, resize, churn (a random mixture), all.

    Example: shoal chaos run churn --peers 4 --minutes 2 --seed 7
    """
    from peer.lab.chaos import report
    from peer.lab.chaos.judging.scenarios import chosen
    from peer.lab.chaos.run import ChaosSettings, run_chaos, summary

    start_logging(logging.WARNING)
    with usage_errors():
        wanted = chosen(tuple(scenarios or ("churn",)))
    where = _folder(directory, "chaos-run")
    with usage_errors():
        settings = ChaosSettings(
            scenarios=wanted,
            directory=where,
            peers=peers,
            minutes=minutes,
            seed=seed,
            control=control,
            pace_s=pace,
        )
    outcome = run_chaos(settings, _course(as_json=as_json))
    page = report.write(settings.directory, outcome)
    record = summary(outcome)
    print(json_text(record) if as_json else report.text(record, page), flush=True)
    return 0 if record["ok"] else 1


@chaos.command("goodput")
def chaos_goodput(
    learners: Annotated[int, Option(help="Number of learners.", min=2, max=32)] = 8,
    minutes: Annotated[float, Option(help="Length for each swarm.", min=1.0)] = 10.0,
    recovery: Annotated[str, Option(help="Time from a failure to the next step.")] = "60s",
    load: Annotated[
        float, Option(help="Failures of all learners during one recovery.", min=0.1)
    ] = 2.7,
    pace: Annotated[float, Option(help="Least seconds per step.", min=0.01)] = 0.4,
    only: Annotated[str | None, Option(help="Only one swarm: shoal or synchronous.")] = None,
    seed: Annotated[int, Option(help="Seed of the failures.", min=0)] = 0,
    directory: LogFolder = None,
    as_json: Json = False,
) -> int:
    """Measure the share of work that constant failures leave, with real processes.

    Let r be the rate of failures of all learners per training time, and R the duration of a
    recovery. A synchronous run trains 1/(1 + r R) of the time, M learners that do not wait for each
    other at best 1/(1 + r R/M): 27.0% and, for 8 learners, 74.8% with r R = 2.7.

    Example: shoal chaos goodput
    """
    from peer.lab.chaos.goodput import GoodputSettings, figures_text, measure

    start_logging(logging.WARNING)
    swarms = {"shoal": False, "synchronous": True}
    if only is not None and only not in swarms:
        raise typer.BadParameter(f"--only is {only!r}; it is one of {', '.join(swarms)}")
    where = _folder(directory, "goodput")
    found = []
    for synchronous in swarms.values() if only is None else (swarms[only],):
        with usage_errors():
            settings = GoodputSettings(
                directory=where,
                learners=learners,
                minutes=minutes,
                recovery_s=seconds(recovery, option="--recovery"),
                load=load,
                pace_s=pace,
                synchronous=synchronous,
                seed=seed,
            )
        found.append(measure(settings, _course(as_json=as_json)))
        if not as_json:
            print(figures_text(found[-1]), flush=True)
    if as_json:
        print(json_text({"swarms": found, "directory": str(where)}))
    return 0

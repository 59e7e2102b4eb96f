"""``python -m tests.benchmark.regions``: the command."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from examples.paper.typed import count, seconds, speed
from peer.cli.application import Json, complain, json_text, start_logging, usage_errors
from peer.cli.finding import no_peers
from peer.extras.experiments import trial_folder
from peer.joining.link import find_run
from peer.run_file.reading import with_settings
from peer.run_file.sections import RunFile
from peer.signals import as_interrupts
from tests.benchmark.regions.figures import record, table
from tests.benchmark.regions.trial import Trial, conduct
from tests.command_line import LogFolder, run_program, tell
from tests.swarms.topology import cannot_build


def main(
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
    directory: LogFolder = None,
    as_json: Json = False,
) -> None:
    """Train in several regions on limited lines, and compare their traffic with its prediction.

    Every region is a network namespace of this machine with a real peer in it. It needs Linux and
    root. Bytes are those of the regions' interfaces, with all headers.

    Example: python -m tests.benchmark.regions examples/regions/run.toml --mbit 50,200 --cycle 8,32
    """

    start_logging(logging.WARNING)
    where = trial_folder(directory, "regions")
    with usage_errors():
        run = find_run(str(file), ask_peers=no_peers).run
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
            rows.append(conduct(trial, tell=partial(tell, title)))
    if as_json:
        print(json_text({"rows": [record(each) for each in rows]}))
        return
    print(table(rows))


def _with_cycle(run: RunFile, steps: int) -> RunFile:
    """The run with cycles of so many steps. Raises ``RunFileError`` if it cannot have them."""
    return with_settings(run, {"outer.steps_per_cycle": steps}, source="--cycle")


if __name__ == "__main__":
    run_program(main)

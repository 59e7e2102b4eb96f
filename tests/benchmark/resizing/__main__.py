"""``python -m tests.benchmark.resizing``: the command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from examples.paper.typed import seconds
from peer.cli.application import Json, json_text, progress, usage_errors
from peer.extras.experiments import print_section
from peer.simulate.settings import Swarm, parse
from tests.benchmark.resizing import resizing
from tests.command_line import run_program
from tests.swarms import sizes as schedules


def main(
    sizes: Annotated[
        str,
        Option(
            help="Number of peers over time: 2,40,2 grows and shrinks; 20,20/40,40 doubles at once."
        ),
    ],
    experiment: Annotated[
        Path | None, Argument(help="Experiment; its number of peers, events and end are not used.")
    ] = None,
    over: Annotated[str, Option(help="Duration of the schedule.")] = "10m",
    politely: Annotated[
        bool, Option("--politely", help="Peers leave in order, and do not crash.")
    ] = False,
    seed: Annotated[int, Option(help="The seed.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Merges, pauses and tokens of a swarm that changes its size.

    Example: python -m tests.benchmark.resizing FILE --sizes 2,40,2 --over 10m
    """
    with usage_errors():
        schedule = schedules.parse(sizes, over_s=seconds(over, option="--over"))
    chosen = parse(experiment.read_text(encoding="utf-8")) if experiment else Swarm()
    ending: resizing.Ending = "leave" if politely else "crash"
    with progress("simulating", quiet=as_json) as advance:
        found = resizing.follow(chosen, schedule, ending, seed, progress=advance)
    if as_json:
        windows = [asdict(window) for window in found.windows]
        record = {"name": chosen.name, "seed": seed, "rise": found.rise, "windows": windows}
        print(json_text(record))
    else:
        print_section(resizing.table(f"{chosen.name}, seed {seed}", found))


if __name__ == "__main__":
    run_program(main)

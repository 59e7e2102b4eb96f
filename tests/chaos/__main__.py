"""``python -m tests.chaos``: the command."""

from __future__ import annotations

import logging
from typing import Annotated

from typer import Argument, Option

from peer.cli.application import Json, json_text, start_logging, usage_errors
from peer.extras.experiments import course, trial_folder
from tests.chaos import report
from tests.chaos.judging.scenarios import chosen
from tests.chaos.run import ChaosSettings, run_chaos, summary
from tests.command_line import LogFolder, run_program


def main(
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

    Example: python -m tests.chaos churn --peers 4 --minutes 2 --seed 7
    """

    start_logging(logging.WARNING)
    with usage_errors():
        wanted = chosen(tuple(scenarios or ("churn",)))
    where = trial_folder(directory, "chaos-run")
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
    outcome = run_chaos(settings, course(as_json=as_json))
    report.write(settings.directory, outcome)
    record = summary(outcome)
    print(json_text(record) if as_json else report.text(record), flush=True)
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    run_program(main)

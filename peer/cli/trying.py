"""``shoal demo``: real processes on this machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from peer.cli.application import (
    MEASURE,
    Json,
    Plain,
    can_draw,
    report_if_slow,
    show,
    start_logging,
)
from peer.cli.showing import course, trial_folder
from peer.signals import as_interrupts

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

    from peer.demo import report as demo_report
    from peer.demo.demo import Demo, DemoSettings, summary, summary_text
    from peer.results import new_figure

    start_logging(logging.WARNING)
    new_figure()  # a missing matplotlib is reported now, not after three minutes
    where = trial_folder(directory, "demo")
    settings = DemoSettings(peers=peers, steps=steps, directory=where)
    with as_interrupts(), Demo(settings) as swarm:
        if plain or as_json or not can_draw(sys.stdout):
            printed, tell = 0, course(as_json=as_json)

            def print_news() -> None:
                nonlocal printed
                for line in swarm.news[printed:]:
                    tell(f"{swarm.elapsed_s:6.1f} s  {line}")
                printed = len(swarm.news)

            result = swarm.run(print_news)
        else:
            from peer.views.screen import draw

            with Live(draw(swarm.view()), auto_refresh=False) as live:
                result = swarm.run(lambda: live.update(draw(swarm.view()), refresh=True))
    with report_if_slow("to compare, one learner trains alone"):
        compared = demo_report.compare(settings, result)
    record = summary(settings, result, compared)
    demo_report.write(settings.directory, result, compared, record)
    show(record, summary_text(record).splitlines(), as_json=as_json)
    return 0 if record["ok"] else 1

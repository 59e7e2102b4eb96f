"""``shoal demo`` and ``simulate``: options in, tables, plots and JSON out.

The experiments themselves are in ``peer.simulate`` and ``peer.demo``.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
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
    progress,
    report_if_slow,
    show,
    start_logging,
)
from peer.errors import ExtraMissing
from peer.signals import as_interrupts

if TYPE_CHECKING:
    from peer.simulate.outcome import SwarmResult
    from peer.simulate.report import Cell
    from peer.simulate.results import Section
    from peer.simulate.settings import Swarm


PairedSeeds = Annotated[int, Option(help="Number of paired seeds of each row.", min=1)]
FirstSeed = Annotated[int, Option(help="The first seed.", min=0)]
Workers = Annotated[int, Option(help="Number of parallel processes.", min=1, max=64)]

NEW = Path("new")
"""The word in place of a file that shows what one looks like."""


commands = typer.Typer()


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

    start_logging(logging.WARNING)
    if find_spec("matplotlib") is None:
        complain(f"there will be no plot of it: {ExtraMissing('a plot', 'matplotlib', 'plots')}")
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


@commands.command(rich_help_panel=MEASURE)
def simulate(
    experiment: Annotated[
        Path | None,
        Argument(
            metavar="FILE|new",
            help="TOML file of an experiment; by default all settings have their defaults. new: "
            "print a file with every setting, its default and its meaning.",
            show_default=False,
        ),
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
    as_json: Json = False,
) -> None:
    """Simulate a swarm of any size, with your own merge rule, network and peers.

    Rounds, grouping, codecs, merging and catching up are the live peer's code; training is real (a
    small model, or a quadratic problem for thousands of peers); network, time and membership are
    simulated. The same seed gives the same result, to the last bit.

    A merge rule, codec, outer optimizer or problem of your own is named module:name, of a
    module beside FILE or in the current folder.

    Example: shoal simulate new > my.toml; shoal simulate my.toml --set rounds.group_size=4,8,16
    """
    from peer.simulate import report
    from peer.simulate.settings import commented, sweep

    if experiment == NEW:
        print(commented(), end="")
        return
    beside = [] if experiment is None else [str(experiment.absolute().parent)]
    sys.path[:0] = [folder for folder in (*beside, str(Path.cwd())) if folder not in sys.path]
    chosen = _read(experiment)
    todo = report.cells(chosen, sweep(settings or []), range(seed, seed + seeds))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress("simulating", quiet=as_json) as advance:
        results = report.simulate(todo, workers=workers, out=out, progress=advance)
    command = " ".join(
        ["shoal simulate", *([str(experiment)] if experiment else [])]
        + [f"--set {setting}" for setting in settings or []]
        + [f"--seeds {seeds} --seed {seed}"]
    )
    if out is not None:
        _write(out, chosen, command, todo, results)
    if as_json:
        rows = report.rows(todo, results)
        print(json_text({"command": command, "rows": [asdict(row) for row in rows]}))
    else:
        print_section(report.table(todo, results))


def _read(path: Path | None) -> Swarm:
    from peer.simulate.settings import BadExperiment, Swarm, parse

    if path is None:
        return Swarm()
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadExperiment(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadExperiment(f"{path} is not UTF-8 text ({error.reason})") from error


def _write(
    out: Path, swarm: Swarm, command: str, todo: Sequence[Cell], results: Sequence[SwarmResult]
) -> None:
    """Write tables, curves, pictures and a page."""
    from peer.simulate import report
    from peer.simulate.results import write_csv, write_html

    write_csv(out / "swarm.csv", report.rows(todo, results))
    write_csv(out / "swarm-curves.csv", report.point_rows(todo, results))
    parts = report.sections(todo, results)
    for part in parts:
        if part.picture_png is not None:
            name = part.heading.lower().replace(" ", "-")
            (out / f"swarm-{name}.png").write_bytes(part.picture_png)
    title = f"Simulated swarm: {swarm.name}"
    write_html(out / "swarm.html", title=title, command=command, sections=parts)


def print_section(section: Section) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=section.heading, caption=section.text)
    for index, column in enumerate(section.columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in section.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def trial_folder(chosen: Path | None, command: str) -> Path:
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


def course(*, as_json: bool) -> Callable[[str], None]:
    """Prints the course of a trial: with ``--json`` on stderr, as stdout has JSON alone."""
    return partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)

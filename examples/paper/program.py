"""Options, output and exit codes of the programs that run experiments."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer import Option

from examples.paper.paired import RunJobs, TrainingFolder, run_jobs
from peer.cli.application import UsageError, complain, progress, reported, show, usage_errors
from peer.errors import ExitCode, ExtraMissing
from peer.extras.experiments import FirstSeed as FirstSeed
from peer.extras.experiments import PairedSeeds as PairedSeeds
from peer.extras.experiments import Workers as Workers
from peer.extras.experiments import print_section
from peer.quantities import count_text
from peer.simulate.results import Section, write_csv, write_html
from peer.simulate.settings import BadExperiment, sweep

if TYPE_CHECKING:
    from matplotlib.axis import Axis

T = TypeVar("T")

# --- the command line of a program ----------------------------------------------------------------


def run_program(main: Callable[..., int | None]) -> NoReturn:
    """Run a function as the command line of a program, with the errors of ``shoal``, and exit."""
    sys.exit(exit_code_of(main, sys.argv[1:]))


def exit_code_of(main: Callable[..., int | None], arguments: Sequence[str]) -> int:
    command = command_of(main)
    try:
        return reported(lambda: command(args=list(arguments), standalone_mode=False))
    except UsageError as error:
        complain(error.format_message())  # type: ignore[attr-defined]
        return ExitCode.USAGE


def command_of(main: Callable[..., int | None]) -> Any:
    """The command line of a function."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.command()(main)
    return typer.main.get_command(app)


# --- options ----------------------------------------------------------------------------------

OutKept = Annotated[
    Path | None,
    Option(help="Folder for CSV, PNG, an HTML page and finished trainings, which are reused."),
]
Settings = Annotated[
    list[str] | None,
    Option("--set", help="A setting of every swarm, such as outer.momentum=0.7; repeatable."),
]


def short(context: typer.Context, option: str, value: T, quick: T) -> T:
    """The value of an option, which is ``quick`` with --quick unless it was given."""
    source = context.get_parameter_source(option)
    is_given = source is not None and source.name != "DEFAULT"
    return quick if context.params["quick"] and not is_given else value


def seeds_from(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def changes_of(settings: Sequence[str] | None) -> dict[str, Any]:
    combinations = list(sweep(settings or []))
    if len(combinations) > 1:
        raise BadExperiment("--set takes one value for each setting here; `shoal simulate` sweeps")
    return combinations[0]


def train_and_show(
    train: Callable[[RunJobs], tuple[Section, Sequence[Mapping[str, Any]]]],
    *,
    workers: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the trainings of an experiment that are not yet in ``out``, and present the results.

    ``train`` returns the table and the rows as records. The command that this process was started
    with is named as the way to repeat it.
    """
    kept = None if out is None else TrainingFolder(out / "trainings")
    with usage_errors(), progress("training", quiet=as_json) as advance:
        section, rows = train(partial(run_jobs, workers=workers, kept=kept, progress=advance))
    show_rows(section, rows, out=out, as_json=as_json)


def show_rows(
    section: Section, rows: Sequence[Mapping[str, Any]], *, out: Path | None, as_json: bool
) -> None:
    """Print a program's table, or its rows as JSON; with ``out`` also write files there."""
    program = Path(sys.argv[0]).absolute()
    name = program.parent.name
    command = shlex.join(["python", "-m", f"examples.paper.{name}.{program.stem}", *sys.argv[1:]])
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / f"{name}.csv", rows)
        if section.picture_png is not None:
            (out / f"{name}.png").write_bytes(section.picture_png)
        else:
            complain(str(ExtraMissing("a plot", "matplotlib", "plots")))
        write_html(out / f"{name}.html", title=section.heading, command=command, sections=[section])
    if as_json:
        show({"command": command, "rows": rows}, (), as_json=True)
    else:
        print_section(section)


def plain_ticks(axis: Axis, values: Sequence[float] | None = None) -> None:
    """Label a logarithmic axis with plain numbers; only at ``values`` when they are given."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if values is not None:
        axis.set_ticks(list(values))
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axis.set_minor_formatter(NullFormatter())

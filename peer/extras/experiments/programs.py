"""Options, output and exit codes of programs that run experiments, such as ``examples/paper``."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer import Option

from peer.cli.application import UsageError, complain, reported, show
from peer.cli.showing import progress, usage_errors
from peer.errors import ExitCode

if TYPE_CHECKING:
    from peer.simulate.paired import RunJobs
    from peer.simulate.results import Section

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
PairedSeeds = Annotated[int, Option(help="Number of paired seeds of each row.", min=1)]
FirstSeed = Annotated[int, Option(help="The first seed.", min=0)]
Workers = Annotated[int, Option(help="Number of parallel processes.", min=1, max=64)]
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
    from peer.simulate.settings import BadExperiment, sweep

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
    from peer.simulate.paired import TrainingFolder, run_jobs

    kept = None if out is None else TrainingFolder(out / "trainings")
    with usage_errors(), progress("training", quiet=as_json) as advance:
        section, rows = train(partial(run_jobs, workers=workers, kept=kept, progress=advance))
    show_rows(section, rows, out=out, as_json=as_json)


def show_rows(
    section: Section, rows: Sequence[Mapping[str, Any]], *, out: Path | None, as_json: bool
) -> None:
    """Print a program's table, or its rows as JSON; with ``out`` also write files there."""
    command = shlex.join(["python", *sys.argv])
    name = Path(sys.argv[0]).absolute().parent.name
    record = {"command": command, "rows": rows}
    present(name, command, rows, lambda: section, record=record, out=out, as_json=as_json)


def present(
    name: str,
    command: str,
    rows: Sequence[Any],
    draw: Callable[[], Section],
    *,
    record: Mapping[str, Any],
    title: str | None = None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print an experiment's section, or as JSON its ``record``. With ``out``, also write the rows
    and a page there; ``title`` defaults to the heading of the section."""
    section = draw() if out is not None or not as_json else None
    if out is not None and section is not None:
        from peer.errors import ExtraMissing
        from peer.simulate.results import write_csv, write_html

        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / f"{name}.csv", rows)
        if section.picture_png is not None:
            (out / f"{name}.png").write_bytes(section.picture_png)
        else:
            complain(str(ExtraMissing("a plot", "matplotlib", "plots")))
        title = title or section.heading
        write_html(out / f"{name}.html", title=title, command=command, sections=[section])
    if as_json:
        show(record, (), as_json=True)
    elif section is not None:
        print_section(section)


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

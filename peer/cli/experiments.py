"""Options and output of programs that train many small swarms, such as ``examples/paper``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Option

from peer.cli.showing import present, progress, usage_errors
from peer.results import Section

if TYPE_CHECKING:
    from peer.simulate.paired import RunJobs

T = TypeVar("T")

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
    show(section, rows, out=out, as_json=as_json)


def show(
    section: Section, rows: Sequence[Mapping[str, Any]], *, out: Path | None, as_json: bool
) -> None:
    """Print a program's table, or its rows as JSON; with ``out`` also write files there."""
    command = shlex.join(["python", *sys.argv])
    name = Path(sys.argv[0]).absolute().parent.name
    record = {"command": command, "rows": rows}
    present(name, command, rows, lambda: section, record=record, out=out, as_json=as_json)

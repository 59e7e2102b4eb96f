"""Presents results of experiments in a terminal, and parses quantities with units."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peer.cli.application import can_draw, complain, json_text, report_if_slow

if TYPE_CHECKING:
    from peer.results import Section


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
        from peer.results import write_csv, write_html

        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / f"{name}.csv", rows)
        if section.picture_png is not None:
            (out / f"{name}.png").write_bytes(section.picture_png)
        else:
            complain(str(ExtraMissing("a plot", "matplotlib", "plots")))
        title = title or section.heading
        write_html(out / f"{name}.html", title=title, command=command, sections=[section])
    if as_json:
        print(json_text(record))
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


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar with the remaining time; a line if stderr cannot show it and it takes long."""
    if quiet or not can_draw(sys.stderr):
        with report_if_slow(f"still {what}"):
            yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


SUMMARY_INDENT = " " * 9
"""Width of the word at the beginning of a line of a summary, such as ``Network``."""


def print_summary(lines: Sequence[str]) -> None:
    """Print lines that begin with their subject; on a terminal none is broken within a word."""
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns, 2 * len(SUMMARY_INDENT))
        lines = [folded for line in lines for folded in _folded(line, width)]
    print("\n".join(lines), flush=True)


def _folded(line: str, width: int) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=SUMMARY_INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report a ``ValueError`` of the body as a wrong argument of the command line."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def seconds(text: str, *, option: str) -> float:
    example = "a time such as 90s, 4m, 9h or 2d"
    try:
        return _quantity(text, _TIME_UNITS, example)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option} {error}") from error


def count(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a number such as 30e6") from error


def speed(text: str) -> float:
    """A number of Mbit/s."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise typer.BadParameter(f"{text!r} is not a speed in Mbit/s, such as 50 or 0.5")
    return found


def milliseconds(text: str) -> float:
    return _quantity(f"{text.strip()}s", _TIME_UNITS, "a time in milliseconds") / 1e3


def bits_per_second(text: str) -> float:
    return _quantity(text.removesuffix("/s"), _RATE_UNITS, "a rate such as 20Mbit or 1Gbit")


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = units.get(text[len(number) :].lower())
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit is None or not 0.0 < value * unit < math.inf:
        raise typer.BadParameter(f"{text!r} is not {example}")
    return value * unit


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

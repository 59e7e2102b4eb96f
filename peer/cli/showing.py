"""Output of commands beside their results: progress, a summary before a question, a wrong value."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from peer.cli.application import can_draw, report_if_slow

if TYPE_CHECKING:
    pass


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

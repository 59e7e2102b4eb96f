"""Programs under ``tests``: their errors and exit codes are those of the ``shoal`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from peer.cli.application import EXIT_USAGE, complain, reported

LogFolder = Annotated[Path | None, Option(help="Folder for logs. [default: a new folder in /tmp]")]
Check = Annotated[bool, Option("--check", help="Exit with status 1 if a bar is missed.")]

# Since 0.16 typer has its own copy of click and exports only a subclass of this class.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run_program(main: Callable[..., int | None]) -> NoReturn:
    """Run a function as the command line of a program, and exit."""
    command = command_of(main)
    try:
        code = reported(lambda: command(standalone_mode=False))
    except UsageError as error:
        complain(error.format_message())  # type: ignore[attr-defined]
        code = EXIT_USAGE
    sys.exit(code)


def command_of(main: Callable[..., int | None]) -> Any:
    """The command line of a function."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.command()(main)
    return typer.main.get_command(app)


def tell(*words: str) -> None:
    """Say what goes on, on stderr: stdout is for the result."""
    print(*words, file=sys.stderr, flush=True)

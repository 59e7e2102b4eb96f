"""The command that the families of commands are added to, its exit codes and its complaints."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from typer import Option

EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="shoal",
    help="Train one model on many machines that come and go.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def shoal(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"shoal {installed('shoal')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def start_logging(level: int = logging.INFO) -> None:
    """Log to stderr, one line per event. stdout belongs to what a command was asked for."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


def complain(text: str) -> None:
    from peer.screen import printable  # an error may quote what a stranger said

    print("shoal: " + printable(" ".join(text.split())), file=sys.stderr)

"""Programs under ``tests``: their errors and exit codes are those of the ``shoal`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from examples.paper.program import command_of, exit_code_of, run_program

__all__ = ["Check", "LogFolder", "command_of", "exit_code_of", "run_program", "tell"]

LogFolder = Annotated[Path | None, Option(help="Folder for logs. [default: a new folder in /tmp]")]
Check = Annotated[bool, Option("--check", help="Exit with status 1 if a bar is missed.")]


def tell(*words: str) -> None:
    """Say what goes on, on stderr: stdout is for the result."""
    print(*words, file=sys.stderr, flush=True)

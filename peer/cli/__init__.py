"""The ``shoal`` command: the only part of the package that reads ``sys.argv``, prints and exits.

In: a command line. Out: text or JSON on stdout, errors as one line on stderr, and an exit code
(``peer.errors.ExitCode``).

Start with ``run`` below. Every command is one small function (load, run, report) in the module of
its family: ``taking_part`` (start, join), ``keeping`` (keep), ``steering`` (status, pause, resume,
leave, limits), ``run_files`` (run new, run check) and ``reading`` (docs); those of
``peer.extras`` are there. ``application`` has the Typer application, logging, what errors become,
and the options that all commands share, ``learner_options`` those of peers, ``listening`` an
attempt to listen at their address, ``finding`` the run behind an argument, ``training`` the
training of start and join.

Modules that take time to import are imported inside the function that needs them, so that ``shoal
--help`` does not load numpy or torch. An expected error becomes one line on stderr here and nowhere
else; a bug keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from peer.cli import keeping, reading, run_files, steering, taking_part
from peer.cli.application import OWN_A_RUN, UsageError, app, complain, reported
from peer.errors import ExitCode
from peer.installed import extras

FROM_ENVIRONMENT = ("start", "join", "keep", "bootstrap")
"""Commands whose options are taken from the environment where the command line has none."""


@cache
def command() -> Any:
    """The command line of ``app``, built once: Typer evaluates the annotations of all options.

    The help lists the commands in this order.
    """
    for family in (taking_part, keeping, *extras("orders.owning")):
        app.add_typer(family.commands)
    for family in extras("orders.owning", "orders.directing"):
        run_files.runs.add_typer(family.runs)
    app.add_typer(run_files.runs, name="run", rich_help_panel=OWN_A_RUN)
    for family in extras("shards.commands"):
        app.add_typer(family.data, name="data", rich_help_panel=OWN_A_RUN)
    for family in (
        steering,
        *extras("explain", "run_lists", "credit.commands", "export.commands"),
        *extras("use.commands", "hosting.commands", "doctor.commands", "experiments"),
        reading,
    ):
        app.add_typer(family.commands)
    built: Any = typer.main.get_command(app)
    _leave_flags_bare(built)
    for name in FROM_ENVIRONMENT:
        if name in built.commands:
            _take_from_environment(built.commands[name])
    return built


def _take_from_environment(command: Any) -> None:
    """Let every option have a variable, as launchers set them: ``--state-on-disk`` has
    ``SHOAL_STATE_ON_DISK``, and the argument LINK has ``SHOAL_LINK``."""
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_option = parameter.opts[0].startswith("--")
        name = parameter.opts[0][2:] if is_option else parameter.metavar
        parameter.envvar = "SHOAL_" + re.sub(r"\W", "_", name).upper()
        parameter.show_envvar = True


def _leave_flags_bare(command: Any) -> None:
    """Show no type behind flags in the help: Typer writes ``<bool>``, as if a value followed."""
    for option in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _leave_flags_bare(child)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return reported(
            lambda: command()(args=list(arguments), prog_name="shoal", standalone_mode=False)
        )
    except UsageError as error:
        message = _message(error)
        if message:  # without a command the help was printed
            end = "" if message.endswith("?") else ";"
            complain(f"{message}{end} see `{_command(error, arguments)} --help`")
        return ExitCode.USAGE


def main() -> NoReturn:
    """Entry point of the ``shoal`` command."""
    _open_closed_streams()
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _open_closed_streams() -> None:
    """Point closed standard streams (``shoal status >&-``) to nowhere, here and in child processes.

    Else a socket would get the descriptor, and be taken for the stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


class _Terminal(io.FileIO):
    """A terminal that may be closed: later output is dropped without an error."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def _tolerant(stream: TextIO) -> TextIO:
    """Make output never fail: for lack of a character in the encoding, or of the terminal."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if not stream.isatty():
        stream.reconfigure(errors="replace")
        return stream
    raw = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="replace", line_buffering=True
    )


def _message(error: Exception) -> str:
    text: str = error.format_message()  # type: ignore[attr-defined]
    # Words of the library that say nothing: our own sentences need no title.
    text = text.strip().removeprefix("Invalid value: ").rstrip(".")
    text = text.replace(": Value error, ", ": ")
    for name in re.findall(r" \(env var: '(\w+)'\)", text):
        if name not in os.environ:  # the value is of the command line
            text = text.replace(f" (env var: '{name}')", "")
    return text.replace(": Input should be ", f": {_refused_value(error)} should be ")


def _refused_value(error: Exception) -> str:
    """The value of which Typer says what it should be, but not what it is."""
    # Newer versions of Typer have pydantic judge the values.
    refused: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    return repr(refused[0]["input"]) if refused else "it"


def _command(error: Exception, arguments: Sequence[str]) -> str:
    """The command whose help says more. An error in the form of an option names none."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return str(context.command_path)
    words, children = ["shoal"], getattr(command(), "commands", {})
    for word in arguments:
        if word not in children:
            break
        words.append(word)
        children = getattr(children[word], "commands", {})
    return " ".join(words)

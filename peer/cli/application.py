"""The Typer application, logging, error output, progress, and a summary before a question."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer import Option
from typer.core import TyperGroup

from dht.errors import AddressError, DhtError, KeyFileError
from peer.errors import ExitCode, PeerError, explained

Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, Option("--json", help="Print one JSON object per line.")]


def _relay_rate(text: str | None) -> str | None:
    from peer.rules.limits import parse_relay_rate

    parse_relay_rate(text)  # raises ``BadLimit``
    return text


RelayBulk = Annotated[
    str | None,
    Option(
        callback=_relay_rate,
        help="Pass bulk data on between peers whose routers let no direct connection through, up "
        "to this many bytes per second, such as 2M; 'off': do not. They need it where nobody else "
        "can be dialled.",
        metavar="RATE",
    ),
]


def _run_page(text: str | None) -> str | None:
    from peer.views.page_address import parse_page

    if text in (None, "off"):
        return None
    parse_page(text, "--run-page")
    return text


RunPageAt = Annotated[
    str | None,
    Option(
        "--run-page",
        callback=_run_page,
        help="HOST:PORT of a public page of the run, for anybody to read; without addresses of "
        "peers, and safe behind a proxy.",
        metavar="HOST:PORT",
    ),
]
Plain = Annotated[bool, Option("--plain", help="Print one line per event instead of a screen.")]

# Headings of `shoal --help`, in this order.
TAKE_PART = "Take part"
OWN_A_RUN = "Own a run"
SEE = "See what happens"
YOUR_PEERS = "Your peers on this machine"
USE_THE_MODEL = "Use the model"
HOST = "Host a run or a bootstrap peer"
MEASURE = "Try and measure"

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
LOG_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
LOG_MAX_BYTES = 1 << 20


class Interrupted(PeerError):
    """Ctrl-C or SIGTERM has ended a command."""

    exit_code = ExitCode.INTERRUPTED
    message = "interrupted"


class Commands(TyperGroup):
    """The commands. Typer would make an exit code of ``KeyboardInterrupt``, and say nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


app = typer.Typer(
    name="shoal",
    cls=Commands,
    help="Train one model on many machines that join and leave at any time.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # otherwise the line breaks of docstrings stay in the help
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


class _Printable(logging.Formatter):
    """Keeps an event on one line of printable characters: it may quote what a stranger said."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        from peer.events.names import printable

        # A traceback is added to it later, and keeps its lines.
        return printable(super().formatMessage(record))


def start_logging(level: int = logging.INFO) -> None:
    """Log to stderr, one line per event. stdout is for the output of the command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(LOG_FORMAT, LOG_DATE_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def log_to(path: Path) -> None:
    """Log warnings into a file from now on: the terminal gets sentences."""
    handler = RotatingFileHandler(path, maxBytes=LOG_MAX_BYTES, backupCount=1, delay=True)
    handler.setFormatter(_Printable(LOG_FORMAT, LOG_DATE_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


@contextmanager
def report_if_slow(doing: str, *, after_s: float = 5.0) -> Iterator[None]:
    """Print ``doing`` on stderr if the block takes longer than ``after_s``."""
    timer = threading.Timer(after_s, complain, (f"{doing} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value in JSON, which has no number that is not finite: such a one is ``null``."""
    from peer.views.event_log import plain

    return json.dumps(plain(value), indent=indent)


def show(record: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: one JSON object, or its lines, in which no text of a peer moves the cursor.

    ``lines`` are made only where they are printed.
    """
    from peer.events.names import printable

    for line in [json_text(record)] if as_json else map(printable, lines):
        print(line, flush=True)


def can_draw(stream: TextIO) -> bool:
    """Say whether a screen or a bar can be drawn there: on a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def say(text: str) -> None:
    """Print a line of a peer that goes on, at once.

    Where the reader of a pipe has ended, that is a closed terminal: the peer is asked to leave,
    unless ``nohup`` has told it not to mind, and what it prints then is dropped.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        if os.path.samestat(os.fstat(out), os.fstat(err)):
            os.dup2(nowhere, err)
        os.dup2(nowhere, out)
        signal.raise_signal(signal.SIGHUP)


def complain(text: str) -> None:
    from peer.events.names import printable  # an error may quote what a stranger said

    print("shoal: " + printable(" ".join(text.split())), file=sys.stderr)


_NOT_ALLOWED = "choose a path that this user may read and write"
_NO_ROOM = "free some space or choose another path"
_NO_SUCH_PATH = "check the path"
_DISK = {
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.ENOENT: _NO_SUCH_PATH,
    errno.ENOTDIR: _NO_SUCH_PATH,
    errno.EISDIR: _NO_SUCH_PATH,
    errno.EEXIST: "choose another path",
    errno.ELOOP: _NO_SUCH_PATH,
    errno.ENAMETOOLONG: _NO_SUCH_PATH,
    errno.EIO: "check the disk (`dmesg`), or choose another path",
    errno.EMFILE: "allow more open files (`ulimit -n`)",
    errno.ENFILE: "end programs that have many files open",
}
"""Errors of the file system that any command may meet, and what to do about them."""


def reported(work: Callable[[], object]) -> int:
    """The exit code of a command's work. An expected error becomes one line on stderr."""
    try:
        code = work()
    except (PeerError, DhtError, OSError) as error:
        return report(error)
    except (KeyboardInterrupt, typer.Abort):
        complain(str(Interrupted()))
        return ExitCode.INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # a bug, or a broken installation
        complain("this command needs torch, which a host of runs goes without: pip install shoal")
        return ExitCode.USAGE
    except (ImportError, MemoryError) as error:
        # A library of torch that cannot be mapped under `ulimit -v`, for one.
        complain(
            f"{error or 'out of memory'}; this process may use too little memory (`ulimit -v`)"
        )
        return 1
    return code if isinstance(code, int) else 0


def report(error: PeerError | DhtError | OSError) -> int:
    """Print an expected error, and return its exit code. Raises any other ``OSError``."""
    match error:
        case PeerError():
            complain(_with_section(error))
            return error.exit_code
        case DhtError():
            complain(_with_section(error))
            is_usage = isinstance(error, KeyFileError | AddressError)
            return ExitCode.USAGE if is_usage else ExitCode.UNREACHABLE
        case OSError() if error.errno in _DISK:
            name = error.filename or "a file or the output"
            complain(f"{name}: {error.strerror}; {_DISK[error.errno]}")
            return ExitCode.USAGE
    raise error


def _with_section(error: Exception) -> str:
    """The text of an error, and the command that prints what the documents say about it."""
    from peer.installed import section_of

    section = section_of(error)
    return explained(str(error), section) if section else str(error)


GIVEN = ("COMMANDLINE", "ENVIRONMENT")
"""Sources of a value that somebody has given."""


def given_words(context: typer.Context, *without: str) -> list[str]:
    """The command line, also of what came from variables, without these parameters.

    Names of files and folders are absolute, as a service begins elsewhere.
    """
    words = [str(context.command.name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in without or source is None or source.name not in GIVEN:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words += parameter.opts[:1] if value else []
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            is_argument = parameter.param_type_name == "argument"
            is_file = isinstance(each, Path) or (is_argument and Path(each).is_file())
            word = str(Path(each).absolute()) if is_file else str(each)
            words += [word] if is_argument else [parameter.opts[0], word]
    return words


InstallService = Annotated[
    bool, Option("--install-service", help="Print a unit of a service for this command and exit.")
]

# Since 0.16 typer has its own copy of click and exports only a subclass of this class.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


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

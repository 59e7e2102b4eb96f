"""Lists of runs, to choose one from: ``shoal runs``, and ``shoal join`` without a link.

A list, ``runs.json``, is what somebody says of runs that others may join. Anybody can serve one as
a static file, and the page of a run serves one. It is a stranger's word: bounded data, of which
nothing is believed before the peers of a run have been asked. A list is fetched only where a user
has named it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from msgspec import Meta, Struct
from typer import Argument

from dht import addresses
from dht.decoding import decoded
from dht.errors import DhtError
from peer.cli.application import SEE, Json, report_if_slow, show, start_logging
from peer.errors import PeerError, RunNotFound
from peer.joining.link import Link, download, parse_link, read_file
from peer.quantities import count_text, listed, plural

RUNS_MAX = 50
LIST_MAX_BYTES = 1 << 20

Short: TypeAlias = Annotated[str, Meta(max_length=100)]
Text: TypeAlias = Annotated[str, Meta(max_length=500)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]


class NoRunList(RunNotFound):
    """There is no list of runs at an address or path."""

    message = "no list of runs at {where}: {reason}"


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run of a list. Fields that are not known here are ignored: each server may add some."""

    link: Annotated[str, Meta(max_length=2000)] = ""
    """The link to join by; empty where the server knows none that leads to it from elsewhere."""
    name: Short = ""
    description: Annotated[str, Meta(max_length=4000)] = ""
    model: Text = ""
    data: Text = ""
    needs: Text = ""
    """The needs of a machine that trains in it, in words."""
    licence: Short = ""
    learners: Count | None = None
    """Peers that train, as the server counts them."""
    tokens: Count | None = None
    tokens_goal: Count | None = None


class RunList(Struct, frozen=True, kw_only=True):
    """The content of ``runs.json``."""

    runs: Annotated[tuple[ListedRun, ...], Meta(max_length=RUNS_MAX)] = ()


def decode(data: bytes) -> RunList:
    """Raises ``ValueError``."""

    def read(content: bytes) -> RunList:
        return msgspec.json.decode(content, type=RunList)

    return decoded(data, read, "a list of runs", max_bytes=LIST_MAX_BYTES)


def read_list(where: str) -> RunList:
    """The list at an ``https`` address or in a file. Raises ``NoRunList``."""
    where = where.strip()
    try:
        if "://" in where:
            data = download(where, timeout_s=30.0, tls=None, bytes_max=LIST_MAX_BYTES)
        else:
            data = read_file(Path(where), bytes_max=LIST_MAX_BYTES)
        return decode(data)
    except RunNotFound as error:
        raise NoRunList(error.where, error.reason) from error
    except ValueError as error:
        raise NoRunList(where, str(error)) from error


def link_of(entry: ListedRun, where: str) -> Link:
    """The link of a run of the list at ``where``. Raises ``LinkError`` or ``ValueError``.

    A list from elsewhere leads to public addresses only: it must not make this machine dial others
    in its own network.
    """
    if not entry.link:
        raise ValueError("the list has no link to it")
    link = parse_link(entry.link)
    if "://" not in where.strip():
        return link
    scopes = {seed: addresses.scope_of(seed) for seed in link.seeds}
    public = tuple(seed for seed, scope in scopes.items() if scope is addresses.Scope.INTERNET)
    if not public:
        raise ValueError("its link has no public address")
    return replace(link, seeds=public)


commands = typer.Typer()

VARIABLE = "SHOAL_RUNS"
ASK_WITHIN_S = 10.0
ASKED_AT_ONCE = 4
"""Runs whose peers are asked at the same time: each takes a libp2p daemon."""

NAMES_MAX = 8
DESCRIPTION_MAX = 300
"""Characters of a description that are printed."""

Row = dict[str, Any]


@commands.command("runs", rich_help_panel=SEE)
def show_runs(
    where: Annotated[
        str,
        Argument(envvar=VARIABLE, help="https address or file of a list of runs.", metavar="LIST"),
    ],
    as_json: Json = False,
) -> None:
    """Show the runs of a list: what they train, who trains now, and what a machine needs.

    Peers of each run are asked who trains; nothing is joined. There is no list by default. The page
    of a run serves one (runs.json), and so can any web server.

    Example: shoal runs https://run.example.org/runs.json
    """
    start_logging(logging.ERROR)
    rows = _rows(where)
    lines = (line for number, row in enumerate(rows, 1) for line in _lines(number, row))
    show({"runs": rows}, lines if rows else ["the list has no runs"], as_json=as_json)


def chosen_link() -> str:
    """The link of a run that the user chooses from the list of ``SHOAL_RUNS``."""
    where = os.environ.get(VARIABLE)
    if not where:
        raise typer.BadParameter(
            "name the run to join by its link; or set SHOAL_RUNS to a list of runs to choose from, "
            "see `shoal runs --help`"
        )
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            "which run to join is asked, and here is no terminal to ask at: name it by its link"
        )
    rows = [row for row in _rows(where) if row["reason"] is None or row["link"]]
    if not rows:
        raise typer.BadParameter(f"no run of the list at {where} can be joined")
    for number, row in enumerate(rows, 1):
        print("\n".join(_lines(number, row)), flush=True)
    while True:
        number = typer.prompt(f"Which one, 1 to {len(rows)}", type=int)
        if 1 <= number <= len(rows):
            return str(rows[number - 1]["link"])


def _rows(where: str) -> list[Row]:
    """The runs of a list, and who trains in them now. Raises ``NoRunList``."""
    from peer.signals import run_unless_stopped

    with report_if_slow("still asking the peers of the listed runs (Ctrl-C to stop)"):
        return run_unless_stopped(_asked(read_list(where).runs, where))


async def _asked(runs: Sequence[ListedRun], where: str) -> list[Row]:
    turns = asyncio.Semaphore(ASKED_AT_ONCE)

    async def in_turn(run: ListedRun) -> Row:
        async with turns:
            return await _row(run, where)

    return list(await asyncio.gather(*map(in_turn, runs)))


async def _row(run: ListedRun, where: str) -> Row:
    """A run of the list: ``training`` are the names of its learners, or ``reason`` says why they
    are not known."""
    row = msgspec.structs.asdict(run) | {"training": None, "held_out": None, "reason": None}
    try:
        link = link_of(run, where)
        row["link"] = str(link)
    except (PeerError, ValueError) as error:
        return row | {"link": "", "reason": str(error)}
    try:
        return row | await _who_trains(link)
    except (PeerError, DhtError) as error:
        return row | {"reason": str(error)}


async def _who_trains(link: Link) -> Row:
    from peer.joining.visit import LEARNER, visit

    async with visit(link) as visitor:
        status = await visitor.look(timeout_s=ASK_WITHIN_S)
    records = status.members.values()
    names = sorted(record.name for record in records if record.role == LEARNER and record.trains)
    held_out = None if status.held_out is None else status.held_out.loss
    return {"training": names, "held_out": held_out}


def _lines(number: int, row: Row) -> Iterator[str]:
    """The lines that are printed of a run; all of its texts are those of strangers."""
    from peer.events.names import printable

    about = [row["model"], row["data"], row["licence"]]
    yield printable(f"{number:>2}  {'   '.join(filter(None, [row['name'] or 'unnamed', *about]))}")
    if row["description"]:
        yield printable(f"    {' '.join(row['description'].split())[:DESCRIPTION_MAX]}")
    yield printable(f"    trains now: {_training(row)}{_progress(row)}")
    if row["needs"]:
        yield printable(f"    needs: {row['needs']}")
    if row["link"]:
        yield f"    shoal join '{row['link']}'"


def _training(row: Row) -> str:
    if row["training"] is None:
        said = "" if row["learners"] is None else f"; {row['learners']} by the list"
        return f"not known, {row['reason']}{said}"
    names = row["training"]
    if not names:
        return "nobody"
    loss = "" if row["held_out"] is None else f", held-out loss {row['held_out']:.3f}"
    return f"{plural(len(names), 'peer')} ({listed(names, most=NAMES_MAX)}){loss}"


def _progress(row: Row) -> str:
    if row["tokens"] is None:
        return ""
    goal = "" if row["tokens_goal"] is None else f" of {count_text(row['tokens_goal'])}"
    return f"; {count_text(row['tokens'])}{goal} tokens merged, by the list"

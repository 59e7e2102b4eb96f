"""``shoal runs``, and the question of ``shoal join`` without a link: which run of a list?"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from dht.errors import DhtError
from peer.cli.application import SEE, Json, report_if_slow, show, start_logging
from peer.errors import PeerError
from peer.quantities import count_text, listed, plural

if TYPE_CHECKING:
    from peer.extras.run_lists.listed import ListedRun
    from peer.joining.link import Link

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
    from peer.extras.run_lists.listed import read_list
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
    import msgspec

    from peer.extras.run_lists.listed import link_of

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

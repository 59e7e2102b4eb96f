"""``shoal explain``: what happened, told from event logs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from peer.cli.application import SEE, Json, show
from peer.extras.explain import stories
from peer.extras.explain.logs import aligned, read_logs
from peer.views.event_log import read_events

commands = typer.Typer()


@commands.command(rich_help_panel=SEE)
def explain(
    logs: Annotated[
        list[Path],
        Argument(metavar="LOG...", help="Event logs (events.jsonl), or folders of peers."),
    ],
    round_: Annotated[
        str | None,
        Option(
            "--round",
            help="FRAGMENT/VERSION, or the first 6 or more characters of a round id.",
            metavar="ROUND",
        ),
    ] = None,
    peer: Annotated[
        str | None, Option(help="Name of a peer, or the beginning or end of its id.")
    ] = None,
    timeline: Annotated[bool, Option("--timeline", help="Print every event of all logs.")] = False,
    as_json: Json = False,
) -> None:
    """Explain event logs: what happened in a round, to a peer, or overall.

    Logs of several peers become one timeline, corrected for differences between clocks.

    Example: shoal explain anna/events.jsonl boris/events.jsonl --round 2/7
    """
    read = []
    for path in logs:
        file = path / "events.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise typer.BadParameter(f"there is no event log at {file}")
        logs_in_file = read_logs(read_events(file), place=file.parent.name or str(file))
        if not logs_in_file:
            raise typer.BadParameter(f"there is no event in {file}; an event log is events.jsonl")
        read += logs_in_file
    known = aligned(read)
    if round_ is not None:
        story = stories.round_story(known, round_)
    elif peer is not None:
        story = stories.peer_story(known, peer)
    else:
        story = stories.everything(known) if timeline else stories.overview(known)
    width = max((len(line.who) for line in story), default=0)
    lines = (
        f"{datetime.fromtimestamp(line.at).isoformat(' ', 'milliseconds')}  "
        f"{line.who:{width}}  {line.text}"
        for line in story
    )
    show({"story": [asdict(line) for line in story]}, lines, as_json=as_json)

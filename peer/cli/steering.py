"""``shoal status``, ``explain``, ``pause``, ``resume``, ``leave``, ``limits``: look and steer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from peer.cli.application import patience, start_logging
from peer.cli.options import Json, JsonLines
from peer.storage.home import data_home

commands = typer.Typer()


WATCH_EVERY_S = 5.0


@commands.command("status")
def show_status(
    link: Annotated[str, Argument(help="shoal:// link of the run.")],
    watch: Annotated[bool, Option("--watch", help="Look again every few seconds.")] = False,
    timeout: Annotated[float, Option(help="Seconds to look for peers.", min=1.0)] = 15.0,
    as_json: JsonLines = False,
) -> int:
    """Ask a run's peers how they are doing, without taking part.

    Example: shoal status 'shoal://RUN_ID?seed=...' --watch
    """
    from peer.event_loop import run_until_stopped, unless_stopped
    from peer.joining.link import parse_link
    from peer.joining.visit import status_lines, visit

    start_logging(logging.ERROR)
    wanted = parse_link(link)

    async def look() -> None:
        async with visit(wanted) as visitor:
            while True:
                with patience("still looking for the run's peers (Ctrl-C ends it)"):
                    seen = await visitor.look(timeout_s=timeout)
                text = json.dumps(seen.plain()) if as_json else "\n".join(status_lines(seen))
                print(text, flush=True)
                if not watch:
                    return
                await asyncio.sleep(WATCH_EVERY_S)

    run_until_stopped(lambda stop: unless_stopped(stop, look()))
    return 0


Folder = Annotated[
    Path | None,
    Option(
        "--directory",
        help="The folder of one peer; by default those of all your runs.",
        show_default=False,
    ),
]


@commands.command()
def pause(directory: Folder = None, as_json: Json = False) -> None:
    """Let this machine's peers rest: they offer what they have, then train no more; nobody waits.

    Example: shoal pause; later: shoal resume
    """
    _change_limits(directory, as_json=as_json, paused=True)


@commands.command()
def resume(directory: Folder = None, as_json: Json = False) -> None:
    """Let this machine's peers train again, after `shoal pause`.

    Example: shoal resume
    """
    _change_limits(directory, as_json=as_json, paused=False)


@commands.command()
def leave(directory: Folder = None, as_json: Json = False) -> None:
    """Let this machine's peers finish what is under way, save, say goodbye and end.

    Example: shoal leave --directory ~/.local/share/shoal/runs/0123456789abcdef
    """
    import time

    _change_limits(directory, as_json=as_json, leave_at=time.time())


@commands.command()
def limits(
    directory: Folder = None,
    up: Annotated[str | None, Option(help="Bytes to send per second, such as 500K or 2M.")] = None,
    down: Annotated[str | None, Option(help="Bytes to receive per second.")] = None,
    quota: Annotated[str | None, Option(help="Bytes a month, both ways, such as 200G.")] = None,
    hours: Annotated[str | None, Option(help="When to train, such as 22-7 or 21:30-6:15.")] = None,
    cpu: Annotated[str | None, Option(help="Share of the time to train, such as 50%.")] = None,
    gpu: Annotated[str | None, Option(help="The same for an accelerator's time.")] = None,
    threads: Annotated[str | None, Option(help="CPU threads for training, such as 4.")] = None,
    idle_only: Annotated[
        str | None,
        Option(help="Train only while others use less of the processors, such as 25%."),
    ] = None,
    disk: Annotated[
        str | None, Option(help="Bytes in a peer's folder: checkpoints and logs, such as 20G.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show or change what this machine's peers may use; running ones obey within a second.

    'off' takes a limit away. Rates and volume count rounds and states, not the few kB/s of
    heartbeats. Each counts for one peer; in detail: ARCHITECTURE.md, 'Limits are a file'.
    Example: shoal limits --up 2M --quota 200G --hours 22-7 --cpu 50% --idle-only 25% --disk 20G
    """
    from peer.rules import limits as rules

    changes: dict[str, Any] = {}
    if up is not None:
        changes["up_bytes_s"] = None if up == "off" else rules.parse_rate("--up", up)
    if down is not None:
        changes["down_bytes_s"] = None if down == "off" else rules.parse_rate("--down", down)
    if quota is not None:
        changes["month_bytes"] = None if quota == "off" else rules.parse_size("--quota", quota)
    if hours is not None:
        changes["hours"] = None if hours == "off" else rules.parse_hours(hours)
    if cpu is not None:
        changes["cpu_share"] = 1.0 if cpu == "off" else rules.parse_share("--cpu", cpu)
    if gpu is not None:
        changes["gpu_share"] = 1.0 if gpu == "off" else rules.parse_share("--gpu", gpu)
    if threads is not None:
        changes["threads"] = None if threads == "off" else rules.parse_threads(threads)
    if idle_only is not None:
        share = None
        if idle_only != "off":
            share = rules.parse_share("--idle-only", idle_only, most=99)
        changes["idle_below"] = share
    if disk is not None:
        changes["disk_bytes"] = None if disk == "off" else rules.parse_disk(disk)
    _change_limits(directory, as_json=as_json, **changes)


def _change_limits(directory: Path | None, *, as_json: bool, **changes: Any) -> None:
    """Of one peer or of all, and say what holds now."""
    import msgspec

    from peer.guest.enforcement import folder_bytes, read_limits, used_this_month, write_limits
    from peer.storage.home import is_in_use

    home = data_home(os.environ)
    of_all = [*sorted(home.glob("runs/*/")), *sorted(home.glob("keepers/*/"))]
    folders = of_all if directory is None else [directory]
    if not folders or not all(folder.is_dir() for folder in folders):
        raise typer.BadParameter(
            f"there is no peer's folder at {directory or home / 'runs'}; "
            "name one with --directory, as it was given to `shoal join`"
        )
    told: dict[str, Any] = {}
    for folder in folders:
        allowed = msgspec.structs.replace(read_limits(folder), **changes)
        if changes:
            write_limits(folder, allowed)
        used = {
            "month_used_bytes": used_this_month(folder),
            "disk_used_bytes": folder_bytes(folder),
        }
        told[str(folder)] = {**msgspec.structs.asdict(allowed), **used}
        if not as_json:
            words = allowed.words(**used)
            if "leave_at" in changes:
                words.append("is asked to leave" if is_in_use(folder) else "nobody is there now")
            print(f"{folder}: {', '.join(words) or 'no limits'}")
    if as_json:
        print(json.dumps(told))


@commands.command()
def explain(
    logs: Annotated[
        list[Path], Argument(metavar="LOG...", help="Event logs (events.jsonl), or peers' folders.")
    ],
    round_: Annotated[
        str | None,
        Option("--round", help="FRAGMENT/VERSION, or how its id begins.", metavar="ROUND"),
    ] = None,
    peer: Annotated[str | None, Option(help="A name, or how an id begins or ends.")] = None,
    timeline: Annotated[bool, Option("--timeline", help="Every event of all logs.")] = False,
    as_json: Json = False,
) -> None:
    """Tell from event logs, in sentences, what became of a round or of a peer; or sum them up.

    Logs of several peers become one timeline, corrected for clocks that differ.
    Example: shoal explain anna/events.jsonl boris/events.jsonl --round 2/7
    """
    from datetime import datetime

    from peer.events import explain as stories
    from peer.events import logs as event_logs
    from peer.events.printable import printable
    from peer.views.event_log import read_events

    read = []
    for path in logs:
        file = path / "events.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise typer.BadParameter(f"there is no event log at {file}")
        log = event_logs.read_log(read_events(file), place=file.parent.name or str(file))
        if not log.events:
            raise typer.BadParameter(f"there is no event in {file}; an event log is events.jsonl")
        read.append(log)
    known = event_logs.aligned(read)
    if round_ is not None:
        story = stories.round_story(known, round_)
    elif peer is not None:
        story = stories.peer_story(known, peer)
    else:
        story = stories.everything(known) if timeline else stories.overview(known)
    if as_json:
        print(json.dumps({"story": [asdict(line) for line in story]}))
        return
    width = max((len(line.who) for line in story), default=0)
    for line in story:
        at = datetime.fromtimestamp(line.at).isoformat(" ", "milliseconds")
        print(printable(f"{at}  {line.who:{width}}  {line.text}"))

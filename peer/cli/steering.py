"""``shoal status``, ``explain``, ``pause``, ``resume``, ``leave`` and ``limits``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from dht.errors import KeyFileError
from dht.identity import Identity, RunId
from peer.cli.application import (
    SEE,
    YOUR_PEERS,
    Json,
    JsonLines,
    complain,
    json_text,
    report,
    report_if_slow,
    show,
    start_logging,
)
from peer.cli.finding import link_of
from peer.errors import NobodyMet, PeerError, RunOver
from peer.quantities import count_text, duration_text, loss_at, peers_text, plural
from peer.storage.home import (
    IN_USE,
    KEY,
    Occupant,
    check_no_other_files,
    folder_bytes,
    is_in_use,
    occupant_of,
    running_peers,
)

if TYPE_CHECKING:
    from peer.rules.limits import Limits

commands = typer.Typer()


WATCH_EVERY_S = 5.0
SEARCH_S = 15.0
NONE_HERE = "none of your peers is running on this machine"


@commands.command("status", rich_help_panel=SEE)
def show_status(
    link: Annotated[
        str | None,
        Argument(
            help="shoal:// link, https address or file of the run, or folder of one peer; by "
            "default your running peers on this machine.",
            metavar="LINK or RUN_DIR",
        ),
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Repeat every few seconds.")] = False,
    ids: Annotated[bool, Option("--ids", help="Print the id of each peer, too.")] = False,
    as_json: JsonLines = False,
) -> int:
    """Print the status of a run as its peers report it, without taking part.

    Without a link: your peers on this machine, whatever their runs, with process, folder, state,
    and the link by which others join.

    Example: shoal status 'shoal://RUN_ID?seed=...' --watch
    """
    from peer.joining.visit import RunStatus, status_lines, visit
    from peer.signals import run_unless_stopped
    from peer.storage.credentials import owners_invite
    from peer.storage.earlier import date_text, recall

    start_logging(logging.ERROR)
    if link is None or Path(link).is_dir():
        folder = None if link is None else Path(link)
        return _show_own_peers(folder, watch=watch, ids=ids, as_json=as_json)
    wanted = link_of(link)

    async def show_status() -> None:
        async with visit(wanted, own_invite=owners_invite) as visitor:
            met = False
            while True:
                try:
                    with report_if_slow("still searching for peers of the run (Ctrl-C to stop)"):
                        seen = await visitor.look(timeout_s=SEARCH_S)
                    met = True
                except NobodyMet as error:
                    if not met:
                        raise
                    seen = RunStatus(wanted.run_id, (), {})
                    complain(f"{error}; looking again")
                if seen.ended_at is not None and not as_json:
                    print(RunOver("", date_text(seen.ended_at), seen.global_tokens, f"'{link}'"))
                if as_json:
                    print(json_text(seen.plain()), flush=True)
                seen.check_admitted()
                if not as_json:
                    print("\n".join(status_lines(seen, ids=ids)), flush=True)
                if not watch:
                    seen.check_answered()
                    return
                await asyncio.sleep(WATCH_EVERY_S)

    try:
        run_unless_stopped(show_status())
    except NobodyMet as error:
        known = recall(wanted.run_id)
        if known is None:
            raise
        if known.ended_at is None:
            raise NobodyMet(error.where, f"{known.sentence}; {error.reason}") from error
        over = RunOver("", date_text(known.ended_at), known.tokens, f"'{link}'")
        record = {"run_id": wanted.run_id, "ended_at": known.ended_at, "peers": []}
        print(json_text(record) if as_json else over)
    return 0


def _show_own_peers(folder: Path | None, *, watch: bool, ids: bool, as_json: bool) -> int:
    """Print what peers of this machine do, from the files that they keep. No network."""
    while True:
        if folder is None:
            occupants = running_peers()
        elif (occupant := occupant_of(folder)) is not None:
            occupants = {folder: occupant}
        else:
            raise typer.BadParameter(
                f"there is no peer in the folder {folder}; `shoal status` lists those of running "
                "peers, and a peer that has just started needs a moment"
            )
        rows = [_own_peer(*occupant) for occupant in occupants.items()]
        lines = (line for row in rows for line in _own_lines(row, ids=ids))
        show({"peers": rows}, lines if rows else [NONE_HERE], as_json=as_json)
        if not watch:
            return 0
        time.sleep(WATCH_EVERY_S)


def _own_lines(row: Mapping[str, Any], *, ids: bool) -> Iterator[str]:
    """The record of a peer of this machine: what it does, and its figures."""
    from peer.joining.link import only_from
    from peer.storage.earlier import date_text

    in_run = ""
    if row["figures"] is None and (merged := row["merged_tokens"]):  # as last noted, now and then
        in_run = f", at least {count_text(merged)} merged in the run"
    if row["pid"] is None:
        yield f"{row['run']}, {row['role']}: it does not run now; others find it when it does"
    else:
        yield (
            f"{row['run']}, {row['role']} for {duration_text(row['running_s'])} as process "
            f"{row['pid']}: {row['state'] or 'starting'}"
        )
    if row["ended_at"] is not None:
        yield f"  the run has ended on {date_text(row['ended_at'])}"
    if row["figures"] is not None:
        yield f"  {figures_line(row['figures'])} ({duration_text(row['figures_age_s'])} ago)"
    yield f"  {count_text(row['tokens'])} tokens of this peer{in_run}; {row['directory']}"
    if ids:
        yield f"  id {row['peer'] or 'not made yet'}"
    if (link := row["link"]) is not None:
        yield f"  {link}"
        if row["pid"] is not None and (limit := only_from(link)) is not None:
            yield f"  {limit}"


def figures_line(figures: Mapping[str, Any]) -> str:
    """The figures of a peer that people look for first, as far as they are known."""
    from peer.status import FIGURES

    trains = [f"step {figures['steps']}"] if figures["steps"] else []
    known = [] if figures["loss"] is None else [f"loss {figures['loss']:.3f}"]
    if (held_out := figures["held_out_loss"]) is not None:
        known.append(f"held-out loss {loss_at(held_out, figures['held_out_tokens'])}")
    run = [peers_text(figures["peers"]), plural(figures["rounds"], "round")]
    last = ("global_tokens", "tokens_per_s", "time_left_s")
    words = [FIGURES[name].told(figures[name]) for name in last if figures[name] is not None]
    return ", ".join([*trains, *known, *run, *words])


def _own_peer(folder: Path, occupant: Occupant) -> dict[str, Any]:
    """A peer of this user on this machine."""
    from peer.storage.address import kept_link
    from peer.storage.earlier import load_last_seen, load_state
    from peer.storage.progress import read_progress

    runs = is_in_use(folder)
    progress, state = read_progress(folder / "progress"), load_state(folder)
    seen = load_last_seen(folder, RunId(occupant.run_id))
    if state is not None and (state.at < occupant.since or not runs):
        state = None  # that of an earlier process says nothing of this one
    figures, figures_at = (state.figures, state.figures_at) if state else (None, 0.0)
    merged = [(seen and seen.tokens) or 0, figures["global_tokens"] if figures else 0]
    return {
        "pid": occupant.pid if runs else None,
        "peer": _peer_of(folder),
        "run": occupant.run_name,
        "run_id": occupant.run_id,
        "role": occupant.role,
        "running_s": round(max(0.0, time.time() - occupant.since), 1) if runs else 0.0,
        "state": state.text if state else None,
        "steps": progress.step if progress else 0,
        "tokens": progress.total_tokens if progress else 0,
        "merged_tokens": max(merged),
        "ended_at": seen.ended_at if seen else None,
        "directory": str(folder),
        "link": kept_link(folder),
        "figures": figures,
        "figures_age_s": round(max(0.0, time.time() - figures_at), 1) if figures else None,
    }


def _peer_of(folder: Path) -> str | None:
    """The id of the peer; ``None`` if its key is not there yet, or cannot be read."""
    try:
        return Identity.load(folder / KEY).peer_id
    except KeyFileError:
        return None


Folder = Annotated[
    Path | None,
    Option(
        "--directory",
        help="Folder of one peer; by default all your running peers, see `shoal status`.",
    ),
]


@commands.command(rich_help_panel=YOUR_PEERS)
def pause(directory: Folder = None, as_json: Json = False) -> int:
    """Pause peers of this machine: they offer their last work, then stop without delaying others.

    Example: shoal pause; later: shoal resume
    """
    return _change_limits(directory, as_json=as_json, paused=True)


@commands.command(rich_help_panel=YOUR_PEERS)
def resume(directory: Folder = None, as_json: Json = False) -> int:
    """Resume training after `shoal pause`.

    Example: shoal resume
    """
    return _change_limits(directory, as_json=as_json, paused=False)


@commands.command(rich_help_panel=YOUR_PEERS)
def leave(directory: Folder = None, as_json: Json = False) -> int:
    """Stop peers of this machine: they hand over their pending work, save a checkpoint and leave.

    This usually takes less than half a minute, and up to 5.5 minutes where a slow line has to carry
    the work. Ctrl-C twice at a learner leaves the rest of its work behind and stops it at once.

    Example: shoal leave --directory ~/.local/share/shoal/runs/0123456789abcdef
    """
    return _change_limits(directory, as_json=as_json, leave_at=time.time())


@commands.command(rich_help_panel=YOUR_PEERS)
def limits(
    directory: Folder = None,
    up: Annotated[
        str | None, Option(help="Maximum bytes sent per second, such as 500K or 2M.")
    ] = None,
    down: Annotated[str | None, Option(help="Maximum bytes received per second.")] = None,
    quota: Annotated[
        str | None, Option(help="Maximum bytes per month, in both directions, such as 200G.")
    ] = None,
    hours: Annotated[
        str | None, Option(help="Hours of training, such as 22-7 or 21:30-6:15.")
    ] = None,
    cpu: Annotated[
        str | None, Option(help="Share of the time spent on training on the CPU, such as 50%.")
    ] = None,
    gpu: Annotated[
        str | None, Option(help="Share of the time spent on training on an accelerator.")
    ] = None,
    free_gpu: Annotated[
        str | None,
        Option(
            help="Give the accelerator's memory back while training rests: on or off.",
            metavar="on|off",
        ),
    ] = None,
    threads: Annotated[str | None, Option(help="CPU threads for training, such as 4.")] = None,
    idle_only: Annotated[
        str | None,
        Option(help="Train only while other programs use less of CPU and GPU, such as 25%."),
    ] = None,
    not_while: Annotated[
        str | None,
        Option(
            help="Do not train while one of these programs runs, such as blender,steam, or any "
            "that fills the screen (full-screen)."
        ),
    ] = None,
    battery: Annotated[
        str | None,
        Option(help="On battery train only while it holds more than this, such as 60%."),
    ] = None,
    celsius: Annotated[
        str | None,
        Option(help="Train only while processors and accelerators are below this, such as 80."),
    ] = None,
    disk: Annotated[
        str | None,
        Option(help="Maximum size of a peer's folder with checkpoints and logs, such as 20G."),
    ] = None,
    relay_bulk: Annotated[
        str | None,
        Option(help="Bytes per second to pass on between peers behind routers, such as 2M."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show or change what peers of this machine may use; running peers follow within a second.

    'off' removes a limit. Rates and volume count rounds and states, not the few kB/s of
    heartbeats. Each limit holds for one peer. Details: shoal docs limits.

    Example: shoal limits --up 2M --quota 200G --hours 22-7 --cpu 50% --idle-only 25% --disk 20G
    """
    from peer.rules import limits as rules

    least = rules.VOLUME_MIN_BYTES
    wishes: dict[str, tuple[str | None, Callable[[str], object], object]] = {
        "up_bytes_s": (up, partial(rules.parse_rate, "--up"), None),
        "down_bytes_s": (down, partial(rules.parse_rate, "--down"), None),
        "month_bytes": (quota, partial(rules.parse_size, "--quota", least=least), None),
        "hours": (hours, rules.parse_hours, None),
        "cpu_share": (cpu, partial(rules.parse_share, "--cpu"), 1.0),
        "gpu_share": (gpu, partial(rules.parse_share, "--gpu"), 1.0),
        "free_gpu": (free_gpu, partial(rules.parse_switch, "--free-gpu"), False),
        "threads": (threads, rules.parse_threads, None),
        "idle_below": (idle_only, partial(rules.parse_share, "--idle-only", most=99), None),
        "not_while": (not_while, rules.parse_programs, ()),
        "battery_above": (battery, partial(rules.parse_share, "--battery"), None),
        "celsius_below": (celsius, rules.parse_celsius, None),
        "disk_bytes": (disk, partial(rules.parse_size, "--disk", least=least), None),
        "relay_bytes_s": (relay_bulk, rules.parse_relay_rate, None),
    }
    changes = {
        name: unlimited if text == "off" else parse(text)
        for name, (text, parse, unlimited) in wishes.items()
        if text is not None
    }
    return _change_limits(directory, as_json=as_json, **changes)


def _change_limits(directory: Path | None, *, as_json: bool, **changes: Any) -> int:
    """Change the limits of one peer or of all that run, and print the limits that now hold.

    A limit may be set before the peer of a folder starts; a wish such as ``paused`` is for one that
    is there. A folder that cannot be changed keeps no other peer from being told. Returns the exit
    code.
    """
    from peer.events.names import printable

    folders = list(running_peers()) if directory is None else [directory]
    if directory is not None:
        is_peers = (directory / IN_USE).exists()
        if not directory.is_dir() or (changes.keys() & {"paused", "leave_at"} and not is_peers):
            raise typer.BadParameter(
                f"there is no peer in the folder {directory}: pass with --directory the folder "
                "that was given to `shoal join`; `shoal status` lists those of running peers"
            )
        check_no_other_files(directory)
    if not folders:
        raise typer.BadParameter(
            "none of your peers is running on this machine; for one that starts later, or a peer "
            "of another user or data home, pass its folder with --directory"
        )
    shown: dict[str, Any] = {}
    code = 0
    for folder in folders:
        try:
            allowed, used = _changed(folder, changes)
        except (PeerError, OSError) as error:
            code = report(error)
            continue
        shown[str(folder)] = {**msgspec.structs.asdict(allowed), **used}
        if not as_json:
            words = allowed.words(**used)
            if changes.get("paused") is False:
                words.append("not paused")
            if "leave_at" in changes:
                words.append("asked to leave" if is_in_use(folder) else "no peer is running there")
            who = occupant_of(folder)
            name = "" if who is None else f"{who.run_name}, {who.role}, "
            print(printable(f"{name}{folder}: {', '.join(words) or 'no limits'}"))
    if as_json:
        print(json_text(shown))
    return code


def _changed(folder: Path, changes: Mapping[str, Any]) -> tuple[Limits, dict[str, int]]:
    """The limits of a peer, changed, and what is used of them. Raises what files raise."""
    from peer.guest.enforcement import read_limits, used_this_month, write_limits

    allowed = msgspec.structs.replace(read_limits(folder), **changes)
    if changes:
        write_limits(folder, allowed)
    used = {
        "month_used_bytes": used_this_month(folder),
        "disk_used_bytes": folder_bytes(folder),
    }
    return allowed, used

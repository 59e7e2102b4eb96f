"""The run behind a link, an address or a file on the command line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peer.cli.application import complain
from peer.errors import NobodyToAsk, RunFileError, RunNotFound, SeedsElsewhere
from peer.joining.link import (
    SCHEME,
    FoundRun,
    Link,
    find_run,
    parse_link,
    read_text,
    run_at,
)
from peer.storage.address import with_own_peers
from peer.storage.home import has_been_there

if TYPE_CHECKING:
    from peer.joining.visit import RunStatus

ASK_AGAIN_S = (5, 10, 20, 40, 80, 160, 300)
"""Pauses between two searches for somebody who has the run file; the last one repeats."""


def link_in(where: str) -> Link | None:
    """The link that an argument is; ``None``: it is a file or an address. Raises ``LinkError``."""
    return parse_link(where) if where.strip().lower().startswith(SCHEME) else None


def find(where: str) -> FoundRun:
    """The run behind an argument. Raises what ``find_run`` raises."""

    def tell(reason: str) -> None:
        complain(f"no run file yet (Ctrl-C to stop): {reason}")

    return find_run(where, tell)


def find_known_run(where: str, directory: Path | None = None) -> FoundRun:
    """The run behind a link, a file or an address.

    The run file of an earlier participation is used at once. Raises what ``find_run`` raises.
    """
    from peer.storage.earlier import recall

    if (link := link_in(where)) is not None:
        known = recall(link.run_id, [directory])
        run = None if known is None else known.run_file
        if run is not None:
            return FoundRun(run, link.seeds, invite=link.invite, by_link=True)
    return find(where)


def link_of(where: str) -> Link:
    """The link of a run; from its file or address, with the seeds that stand in it and those of
    this user's peers."""
    if (link := link_in(where)) is not None:
        return link
    found_run = find_known_run(where)
    return Link(found_run.run.run_id, with_own_peers(found_run.run.run_id, found_run.seeds))


def find_patiently(where: str, directory: Path | None) -> FoundRun:
    """``find_known_run``; of a link that nobody answers, ask again until somebody does."""
    from peer.storage.earlier import remembered

    if (link := link_in(where)) is None:
        return find_known_run(where, directory)
    for pause_s in itertools.chain(ASK_AGAIN_S, itertools.repeat(ASK_AGAIN_S[-1])):
        try:
            return find_known_run(where, directory)
        except RunNotFound as error:
            if isinstance(error, SeedsElsewhere) or not link.seeds:
                raise
            seen, reason = remembered(link.run_id, directory), error.reason
        complain(
            f"nobody of run {link.run_id[:16]}... is on line ({seen}): "
            f"{reason}; looking again in {pause_s} s, until somebody comes (Ctrl-C to stop)"
        )
        time.sleep(pause_s)
    raise AssertionError("the pauses have no end")


def check_somebody_to_ask(found: FoundRun, where: str, seeds: Sequence[str], folder: Path) -> None:
    """Refuse to wait for ever: raise ``NobodyToAsk`` where no address of a peer is known."""
    from peer.storage.earlier import remembered

    if not seeds and not has_been_there(folder):
        raise NobodyToAsk(found.run.name, where, remembered(found.run.run_id, folder))


def seen_by_peers(link: Link, *, timeout_s: float) -> RunStatus:
    """A run as its peers report it. Raises ``NobodyMet`` or ``DhtError``.

    The holder of the owner's key needs no invite from anybody.
    """
    from peer.joining.visit import visit
    from peer.signals import run_unless_stopped
    from peer.storage.credentials import owners_invite

    async def visit_run() -> RunStatus:
        async with visit(link, own_invite=owners_invite) as visitor:
            return await visitor.look(timeout_s=timeout_s)

    return run_unless_stopped(visit_run())


def run_to_start(where: str) -> FoundRun:
    """The run of a file or an address, which has yet to begin. Raises what ``run_at`` raises."""
    if link_in(where) is not None:
        raise typer.BadParameter(
            "a run is started from a file; to join an existing run: shoal join LINK"
        )
    return run_at(where)


def check_new(found: FoundRun, source: str) -> None:
    """Check a run that is still to begin. Raises ``RunFileError``."""
    from peer.run_file.reading import faults_of_new

    text = None if found.folder is None else read_text(Path(source))
    if faults := faults_of_new(found.run, now=datetime.now(UTC), text=text):
        raise RunFileError(source, faults)

"""The public side of a keeper, as the options of ``shoal keep`` ask for it: exports and a page.

Exports are made beside the keeper, again and again, in processes of their own (``exporting``).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from averaging.live.averager import Averager
from peer.agent.services import Begin, Service
from peer.extras.site.exporting import Publishing, address_of, check_repository
from peer.extras.site.shelf import Shelf
from peer.processes import child_environment
from peer.run_file.sections import RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER, data_cache
from peer.views.page_address import PageAddress, parse_page

if TYPE_CHECKING:
    from peer.agent.peer import Peer


WITHIN_S = 3600.0
"""An export that takes longer is ended."""

LOOK_EVERY_S = 1.0
AGAIN_S = 60.0
"""Time to the next attempt after a failure, if that is sooner than the next export."""

LINE_MAX_BYTES = 1 << 20
EVERY_MIN_S = 10.0


class Publisher(Service):
    """Makes exports of the checkpoints of one peer."""

    name = "publish"

    def __init__(self, peer: Peer, what: Publishing) -> None:
        self._peer = peer
        self._what = what
        self._failed = ""
        """The last failure, which is told once."""

    def __repr__(self) -> str:
        return f"Publisher({self._what.folder})"

    async def run(self, averager: Averager) -> None:
        """Publish for ever: at once, from time to time, and when the run ends."""
        loop = asyncio.get_running_loop()
        while True:
            ended = self._peer.ending.ended_at
            done = await self.publish()
            at = loop.time() + (self._what.every_s if done else min(AGAIN_S, self._what.every_s))
            while loop.time() < at:
                await asyncio.sleep(LOOK_EVERY_S)
                if self._peer.ending.ended_at != ended:
                    break

    async def publish(self) -> bool:
        """Publish what is new in the peer's newest checkpoint. ``False``: try again soon."""
        folder = self._peer.directory
        if not CheckpointFolder(folder / OUTER, reads_only=True).numbers():
            return False
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "peer.extras.site.exporting", str(folder)),
            msgspec.json.encode(self._what, enc_hook=str).decode(),
            env=child_environment(os.environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_MAX_BYTES,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                assert process.stdout is not None
                while line := await process.stdout.readline():
                    self._report(json.loads(line))
                code = await process.wait()
        except TimeoutError:
            self._report({"event": "publish_failed", "text": f"not done in {WITHIN_S:g} s"})
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code not in (0, 1):
            text = f"the process that exports ended with code {code}"
            self._report({"event": "publish_failed", "text": text})
        return code == 0

    def _report(self, fields: dict[str, Any]) -> None:
        failed = fields["text"] if fields["event"] == "publish_failed" else ""
        if not failed or failed != self._failed:
            self._peer.event(fields.pop("event"), **fields)
        self._failed = failed


@dataclass(frozen=True, slots=True)
class PublicSide:
    """The exports that a keeper publishes."""

    publishing: Publishing | None
    """Exports of the model."""
    page: PageAddress | None
    """The address of the run's page; ``None``: it is at bootstrap peers only, which ask for it."""

    def check(self, run: RunFile) -> None:
        """Raise ``NotAShelf`` or ``Unusable`` if this cannot be published."""
        if (what := self.publishing) is not None:
            from peer.extras.export.folder import check_exportable  # torch, which keepers lack

            check_exportable(run)
            Shelf(what.folder, run, what.keep).check()

    def services(self) -> tuple[Begin, ...]:
        """The work of it, for a peer on line."""
        from peer.extras.site.keepers_page import ShownRun

        what = self.publishing
        if what is None:
            return (partial(ShownRun, address=self.page),)
        hub = "" if what.repository is None else address_of(what.repository)
        shown = partial(ShownRun, address=self.page, exports=what.folder, hub=hub)
        return shown, partial(Publisher, what=what)


def asked_for(
    *,
    publish: Path | None,
    every: str | None,
    keep_exports: int | None,
    push: str | None,
    run_page: str | None,
) -> PublicSide:
    """The public side by its options. Raises ``BadParameter`` or ``PeerError``."""
    page = None if run_page is None else parse_page(run_page, "--run-page")
    if publish is None:
        given = {
            "--every": every,
            "--keep-exports": keep_exports,
            "--push": push,
        }
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter(
                    f"{option} is for what --publish writes; name a folder with --publish"
                )
        return PublicSide(None, page)
    every_s = 3600.0 if every is None else _seconds(every)
    if not every_s >= EVERY_MIN_S:
        raise typer.BadParameter(f"--every is {every!r}; the shortest time is {EVERY_MIN_S:g}s")
    if push is not None:
        check_repository(push)
    publishing = Publishing(
        folder=publish,
        every_s=every_s,
        keep=3 if keep_exports is None else keep_exports,
        repository=push,
        cache=data_cache(),
    )
    return PublicSide(publishing, page)


_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _seconds(every: str) -> float:
    try:
        found = float(every[:-1]) * _TIME_UNITS[every[-1:].lower()]
    except (ValueError, KeyError):
        found = 0.0
    if not 0.0 < found < math.inf:
        raise typer.BadParameter(f"--every {every!r} is not a time such as 90s, 4m, 9h or 2d")
    return found

"""Publishes a run's model beside a keeper, again and again, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from peer.bridge.agent_process import agent_environment
from peer.extras.site.publishing.exporting import Job
from peer.extras.site.publishing.shelf import Shelf
from peer.run_file.sections import RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER

WITHIN_S = 3600.0
"""An export that takes longer is ended."""

LOOK_EVERY_S = 1.0
AGAIN_S = 60.0
"""Time to the next attempt after a failure, if that is sooner than the next export."""

LINE_MAX_BYTES = 1 << 20
EVERY_MIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Publishing:
    """Settings of publishing: the files and how often."""

    folder: Path
    every_s: float
    keep: int
    repository: str | None
    cache: Path

    def job(self, peer: Path) -> bytes:
        return msgspec.json.encode(
            Job(
                peer=str(peer.absolute()),
                shelf=str(self.folder.absolute()),
                cache=str(self.cache),
                keep=self.keep,
                repository=self.repository,
            )
        )


def check_publishing(what: Publishing, run: RunFile) -> None:
    """Raise ``NotAShelf`` or ``Unusable`` if this cannot be published."""
    from peer.extras.export.folder import check_exportable  # torch, which keepers do not need

    check_exportable(run)
    Shelf(what.folder, run, what.keep).check()


class Publisher:
    """Makes exports of the checkpoints of one peer."""

    def __init__(
        self, what: Publishing, peer: Path, on_news: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        """``on_news(name, fields)`` hears of what was published, and why not."""
        self._what = what
        self._peer = peer
        self._on_news = on_news
        self._failed = ""
        """The last failure, which is told once."""

    def __repr__(self) -> str:
        return f"Publisher({self._what.folder})"

    async def run(self, has_ended: Callable[[], bool]) -> None:
        """Publish for ever: at once, from time to time, and when the run ends."""
        loop = asyncio.get_running_loop()
        while True:
            ended = has_ended()
            done = await self.publish()
            at = loop.time() + (self._what.every_s if done else min(AGAIN_S, self._what.every_s))
            while loop.time() < at:
                await asyncio.sleep(LOOK_EVERY_S)
                if has_ended() != ended:
                    break

    async def publish(self) -> bool:
        """Publish what is new in the peer's newest checkpoint. ``False``: try again soon."""
        if not CheckpointFolder(self._peer / OUTER, reads_only=True).numbers():
            return False
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "peer.extras.site.publishing"),
            self._what.job(self._peer).decode(),
            env=agent_environment(os.environ),
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
        name = fields.pop("event")
        if name != "publish_failed":
            self._failed = ""
        elif fields["text"] == self._failed:
            return
        else:
            self._failed = fields["text"]
        self._on_news(name, fields)

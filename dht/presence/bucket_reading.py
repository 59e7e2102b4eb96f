"""Reads the records of the run's members from the directory, at each heartbeat.

Only one holder of a bucket is asked at a heartbeat, in turns. Reading each bucket from all of its
holders made membership the largest traffic of an idle swarm (14.9 kB/s per peer at 100 peers, 5.4
since). All holders are asked when that single reading would let a member expire.
"""

from __future__ import annotations

import asyncio
import math

from dht.errors import DhtError
from dht.identity import RunId
from dht.membership.table import bucket_key
from dht.presence.intake import Intake
from dht.presence.run_files import RunFiles
from dht.presence.settings import DIRECTORY_TIMEOUT_S
from dht.presence.this_peer import ThisPeer

LOOK_UPS_AT_ONCE = 8


class BucketReading:
    """Looks up the buckets that the table asks for."""

    def __init__(self, this: ThisPeer, intake: Intake, run_files: RunFiles) -> None:
        self._this = this
        self._intake = intake
        self._run_files = run_files
        self._unsettled_until = math.inf
        """Every bucket is read from all holders until then: a peer that was met lately may have
        brought other peers, or another part of the directory, within reach."""

    def unsettle(self) -> None:
        """Read every bucket from all of its holders for the next while."""
        self._unsettled_until = self._this.now() + self._this.settings.membership.expiry_s

    async def read(self, run: RunId) -> None:
        """Read the buckets that are due."""
        this = self._this
        at_once = asyncio.Semaphore(LOOK_UPS_AT_ONCE)
        table, now = this.table, this.now()
        settled = now >= self._unsettled_until and bool(table.live(now))

        async def read(bucket: str) -> None:
            quick = settled and table.is_quiet(bucket)
            async with at_once:
                try:
                    newcomers = await self._look_up(bucket_key(run, bucket), quick=quick)
                    if quick and table.misses_a_peer(bucket, this.now()):
                        newcomers += await self._look_up(bucket_key(run, bucket), quick=False)
                except DhtError:
                    return
            read_at = this.now()
            quiet = not newcomers and not table.misses_a_peer(bucket, read_at)
            table.was_read(bucket, read_at, quiet=quiet)

        async with asyncio.TaskGroup() as group:
            for bucket in table.buckets_due(now) if settled else table.buckets_to_read(now):
                group.create_task(read(bucket))

    async def _look_up(self, key: str, *, quick: bool) -> int:
        """Take the records under a key. Returns the number of peers that were not known before."""
        this = self._this
        this.stats.look_ups += 1
        found = await this.host.directory.look_up(key, timeout_s=DIRECTORY_TIMEOUT_S, quick=quick)
        newcomers = sum(peer != this.id and this.table.get(peer) is None for peer in found)
        news = [self._intake.take(found[peer], peer=peer, key=key) for peer in sorted(found)]
        if any(news):
            self._run_files.wake()
        return newcomers

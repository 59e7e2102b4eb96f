"""File of the peers met, which the next session dials: written at once for the first few peers,
then from time to time.

A file that cannot be read or written is reported and otherwise ignored. Its format is that of
``dht.membership.peer_cache``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from dht.addresses import with_peer
from dht.identity import PeerId, RunId
from dht.membership.peer_cache import (
    CACHE_MAX_BYTES,
    PeerCache,
    cache_of,
    decode_cache,
    encode_cache,
)
from dht.membership.table import Member, PeerTable
from dht.presence.this_peer import Events
from dht.whole_files import write_whole

FEW = 8
"""Number of peers that suffice to find the others: kept even if the process dies early."""


class KeptPeers:
    """The file of one peer and run; without a path nothing is read or written."""

    def __init__(
        self, path: Path | None, run: RunId | None, *, every_s: float, events: Events
    ) -> None:
        self._path = path
        self._run = run
        self._every_s = every_s
        self._events = events
        self._due_at = 0.0
        self._kept: frozenset[PeerId] = frozenset()

    async def load(self) -> PeerCache | None:
        """Read the file of an earlier session of the same run. Call this before ``save_if_due``."""
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + self._every_s
        if self._path is None:
            return None
        try:
            cache = await loop.run_in_executor(None, load_cache, self._path)
        except (OSError, ValueError) as error:
            text = f"the peers kept in {self._path} cannot be read and are not used: {error}"
            self._events.tell("cache_unreadable", text, path=str(self._path))
            return None
        return cache if cache is not None and cache.run == (self._run or "") else None

    async def save_if_due(self, table: PeerTable, sequence: int) -> None:
        """Save if the last time is long ago, or if few peers are kept and a new one was met."""
        met = _met(table)
        missing = len(self._kept) < FEW and any(each.peer not in self._kept for each in met)
        if missing or asyncio.get_running_loop().time() >= self._due_at:
            await self._save(met, sequence)

    async def save(self, table: PeerTable, sequence: int) -> None:
        """Keep the peers that answered this one, the latest first."""
        await self._save(_met(table), sequence)

    async def _save(self, met: list[Member], sequence: int) -> None:
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + self._every_s
        self._kept = frozenset(member.peer for member in met)
        if self._path is None:
            return
        if not met:
            return  # those kept by an earlier session may yet come back
        met.sort(key=lambda member: (-(member.heard_at or 0.0), member.peer))
        peers = [
            (member.peer, [with_peer(address, member.peer) for address in member.addresses])
            for member in met
        ]
        cache = cache_of(self._run, sequence, peers)
        try:
            await loop.run_in_executor(None, save_cache, self._path, cache)
        except OSError as error:
            text = f"the peers met cannot be kept in {self._path}: {error.strerror or error}"
            self._events.tell("cache_unwritable", text, path=str(self._path))


def _met(table: PeerTable) -> list[Member]:
    """The members that have answered this peer and can be dialled."""
    return [
        member
        for member in table
        if member.heard_at is not None and member.reachable is not False and member.addresses
    ]


def load_cache(path: Path) -> PeerCache | None:
    """Read the file at ``path``; ``None`` without a file. Raises ``ValueError`` or ``OSError``."""
    try:
        with path.open("rb") as file:
            return decode_cache(file.read(CACHE_MAX_BYTES + 1))
    except FileNotFoundError:
        return None


def save_cache(path: Path, cache: PeerCache) -> None:
    """Replace the file as a whole or not at all. Raises ``OSError``."""
    write_whole(path, encode_cache(cache))

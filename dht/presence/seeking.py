"""Dials seeds and the peers met in earlier sessions, whenever too few other peers are connected.

``dht.membership.seeds`` decides which address to dial and when. The peers met are kept in a file,
which the next session dials: written at once for the first few peers, then from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from multiaddr import Multiaddr

from dht.addresses import TEXT_MAX, parse_seed, with_peer
from dht.decoding import decoded
from dht.errors import AddressError, HostClosed, PeerUnreachable
from dht.identity import PeerId, RunId
from dht.membership.contacts import is_lonely
from dht.membership.seeds import (
    CACHED_MAX,
    CONNECT_TIMEOUT_S,
    Seed,
    SeedPlanner,
    Source,
)
from dht.membership.table import PeerTable
from dht.presence.dial_back import ReachabilityChecks
from dht.presence.dialler import Dialler
from dht.presence.greeting import Greeting
from dht.presence.this_peer import Events, KeptFile, ThisPeer, pause
from dht.records import SEQUENCE_MAX

CACHE_MAX_BYTES = 256 * 1024
SAVE_EVERY_S = 60.0
FEW = 8
"""Number of peers that suffice to find the others: kept even if the process dies early."""


class Seeking:
    """Makes the attempts that the planner asks for, and tells it how they ended."""

    def __init__(
        self,
        this: ThisPeer,
        dialler: Dialler,
        greeting: Greeting,
        checks: ReachabilityChecks,
        *,
        on_connected: Callable[[], None],
    ) -> None:
        """``on_connected`` is called after the first hello over a new connection."""
        self._this = this
        self._dialler = dialler
        self._greeting = greeting
        self._checks = checks
        self._on_connected = on_connected
        self._planner = SeedPlanner(this.id, this.rng)
        self._wanted = asyncio.Event()
        self._told_connected = False

    @property
    def given(self) -> list[tuple[Seed, bool]]:
        """The seeds, and whether the peer of each is connected."""
        return self._planner.given()

    def add(self, addresses: Sequence[Multiaddr], source: Source) -> None:
        """Add addresses to dial. Raises ``AddressError`` for one without a peer id."""
        self._planner.add(addresses, source, now=self._this.now())

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Look for peers for ever. Attempts run in the owner's task group."""
        this, planner = self._this, self._planner
        look_every_s = this.settings.membership.heartbeat_s / 2
        while True:
            with contextlib.suppress(HostClosed):  # its daemon is being restarted
                await self._checks.look()
            now, connected = this.now(), self._dialler.connected
            planner.met(
                connected,
                lonely=is_lonely(this.table, connected, now=now),
                now=now,
            )
            for seed in planner.due(now):
                group.create_task(self._attempt(seed))
            await pause(self._wanted, min(look_every_s, max(0.05, planner.next_at() - this.now())))

    async def _attempt(self, seed: Seed) -> None:
        this, planner = self._this, self._planner
        timeout_s = CONNECT_TIMEOUT_S
        try:
            await self._dialler.dial(seed.peer, [seed.address], timeout_s=timeout_s)
        except (PeerUnreachable, HostClosed) as error:
            planner.failed(seed, error.reason, now=this.now())
            report = planner.report()
            if report is not None:
                self._told_connected = False
                addresses = len(report.tried)
                this.events.tell("nobody_answered", str(report), addresses=addresses)
            return
        planner.succeeded(seed, now=this.now())
        self._dialler.connected.setdefault(seed.peer)
        if not self._told_connected:
            self._told_connected = True
            this.events.tell("connected", f"connected to {seed.address}", peer=seed.peer)
        await self._greeting.say_hello(seed.peer)
        self._wanted.set()
        self._on_connected()


# --- the file of the peers met ------------------------------------------------------------------


class PeerCache(msgspec.Struct, frozen=True):
    """Content of the file: addresses of peers of one run, and the own sequence number."""

    run: str = ""
    sequence: Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)] = 0
    """The last sequence number this peer used, so that the next session's records are newer."""

    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]],
        msgspec.Meta(max_length=CACHED_MAX),
    ] = []
    """Addresses of peers that have answered, the latest first, each with its peer's id."""

    def usable(self) -> tuple[Multiaddr, ...]:
        """The addresses that can be read. The file may have been written by hand."""
        good: list[Multiaddr] = []
        for text in self.addresses:
            with contextlib.suppress(AddressError):
                good.append(parse_seed(text))
        return tuple(good)


_decoder = msgspec.json.Decoder(PeerCache)


class KeptPeers:
    """The file of one peer and run; without a path nothing is read or written."""

    def __init__(self, path: Path | None, run: RunId | None, *, events: Events) -> None:
        self._file = KeptFile(path, "the peers met", events, max_bytes=CACHE_MAX_BYTES)
        self._run = run
        self._due_at = 0.0
        self._kept: frozenset[PeerId] = frozenset()

    async def load(self) -> PeerCache | None:
        """Read the file of an earlier session of the same run. Call this before ``save``."""
        self._due_at = asyncio.get_running_loop().time() + SAVE_EVERY_S
        cache = await self._file.read(decode_cache)
        return cache if cache is not None and cache.run == (self._run or "") else None

    async def save(self, table: PeerTable, sequence: int, *, if_due: bool = False) -> None:
        """Keep the peers that answered this one, the latest first.

        ``if_due``: only if the last time is long ago, or few are kept and a new one was met.
        """
        now = asyncio.get_running_loop().time()
        met = [
            member
            for member in table
            if member.heard_at is not None and member.reachable is not False and member.addresses
        ]
        missing = len(self._kept) < FEW and any(each.peer not in self._kept for each in met)
        if if_due and not missing and now < self._due_at:
            return
        self._due_at = now + SAVE_EVERY_S
        self._kept = frozenset(member.peer for member in met)
        if not met:
            return  # those kept by an earlier session may yet come back
        met.sort(key=lambda member: (-(member.heard_at or 0.0), member.peer))
        addresses = [with_peer(at, member.peer) for member in met for at in member.addresses]
        cache = PeerCache(self._run or "", sequence, list(map(str, addresses[:CACHED_MAX])))
        await self._file.write(msgspec.json.format(msgspec.json.encode(cache), indent=1) + b"\n")


def decode_cache(data: bytes) -> PeerCache:
    """Decode a file's content. Raises ``ValueError``."""
    return decoded(data, _decoder.decode, "a list of known peers", max_bytes=CACHE_MAX_BYTES)

"""Dials seeds and the peers met in earlier sessions, whenever too few other peers are connected.

``dht.membership.seeds`` decides which address to dial and when.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from multiaddr import Multiaddr

from dht.errors import HostClosed, PeerUnreachable
from dht.membership.contacts import is_lonely
from dht.membership.seeds import CONNECT_TIMEOUT_S, Attempt, Outcome, SeedPlanner
from dht.presence.dialler import Dialler
from dht.presence.greeting import Greeting
from dht.presence.reachability_checks import ReachabilityChecks
from dht.presence.this_peer import ThisPeer, pause


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
        self._planner = SeedPlanner(this.id, this.settings.seeds, this.rng)
        self._wanted = asyncio.Event()
        self._told_connected = False

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The result of each address so far."""
        return self._planner.outcomes()

    def add(self, seeds: Sequence[Multiaddr], cached: Sequence[Multiaddr]) -> None:
        """Add addresses to dial. Raises ``AddressError`` for a seed without a peer id."""
        now = self._this.now()
        self._planner.add_seeds(seeds, now=now)
        self._planner.add_cached(cached, now=now)

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
                swarm_peers=int(this.table.size_estimate(now)),
                lonely=is_lonely(this.table, connected, this.settings.contacts, now=now),
                now=now,
            )
            for attempt in planner.due(now):
                group.create_task(self._attempt(attempt))
            await pause(self._wanted, min(look_every_s, max(0.05, planner.next_at() - this.now())))

    async def _attempt(self, attempt: Attempt) -> None:
        this, planner = self._this, self._planner
        timeout_s = CONNECT_TIMEOUT_S
        try:
            await self._dialler.dial(attempt.peer, [attempt.address], timeout_s=timeout_s)
        except (PeerUnreachable, HostClosed) as error:
            planner.failed(attempt, error.reason, now=this.now())
            report = planner.report()
            if report is not None:
                self._told_connected = False
                addresses = len(report.outcomes)
                this.events.tell("nobody_answered", str(report), addresses=addresses)
            return
        planner.succeeded(attempt, now=this.now())
        self._dialler.connected.add(attempt.peer)
        if not self._told_connected:
            self._told_connected = True
            this.events.tell("connected", f"connected to {attempt.address}", peer=attempt.peer)
        await self._greeting.say_hello(attempt.peer)
        self._wanted.set()
        self._on_connected()

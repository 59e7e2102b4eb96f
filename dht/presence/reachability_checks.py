"""Tests whether other peers can dial this one, and reports the verdict.

``dht.membership.reachability`` decides what the results mean; this module asks for dial-backs.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from multiaddr import Multiaddr

from dht.addresses import Scope, is_relayed, scope_seen
from dht.errors import HostClosed
from dht.identity import PeerId
from dht.membership.reachability import HELPERS_PER_CHECK, NO_ADDRESS, Proximity, Reachability
from dht.presence.dial_back import DialBacks, NotReached, Reached
from dht.presence.dialler import Dialler
from dht.presence.this_peer import Announcement, ThisPeer, pause

LOOK_AGAIN_S = 5.0
"""Time after which a peer that is alone looks for one that could help. A new member wakes it."""

REPORT_AGAIN_S = 1.0
"""Pause before a verdict is reported again to an owner whose daemon was being restarted."""


@dataclass(slots=True, eq=False, repr=False)
class ReachabilityChecks:
    """Dial-backs when there is a reason for one, and the verdict that follows from all evidence."""

    this: ThisPeer
    state: Reachability
    dialler: Dialler
    dial_backs: DialBacks
    announcement: Announcement
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a check may have become due."""
    _proximity: Proximity = field(default_factory=Proximity)
    _reported: bool | None = None
    _noticed: bool | None = None

    async def run(self) -> None:
        """Check and report for ever."""
        state = self.state
        while True:
            await self._report()
            if self.this.now() >= state.due_at:
                with contextlib.suppress(HostClosed):  # its daemon is being restarted
                    await self.look()
                if self.dialler.connected:
                    await self.check()
            alone_s = 0.5 if self.dialler.connected else LOOK_AGAIN_S
            pause_s = min(60.0, max(alone_s, state.due_at - self.this.now()))
            if self._reported is None and state.reachable is not None:
                pause_s = min(pause_s, REPORT_AGAIN_S)
            await pause(self.wanted, pause_s)

    async def check(self) -> None:
        """Ask a few peers for a dial-back, one after the other, until the matter is settled."""
        state, now = self.state, self.this.now
        state.asked(now=now())
        scope = state.scope
        near = self._proximity
        helpers = [p for p in sorted(near.present) if near.scope_of_connected(p) is scope]
        if scope is not None and helpers and not state.usable:
            # Nobody has to dial for that. Twice, as the daemon finds out about addresses slowly.
            state.denied(helpers[0], NO_ADDRESS, others=0, now=now(), scope=scope)
        elif scope is not None and self.this.own.addresses:
            order = [helpers[int(i)] for i in self.this.rng.permutation(len(helpers))]
            for helper in order[:HELPERS_PER_CHECK]:
                if await self._have_tried(helper, scope, others=len(order) - 1):
                    break
        await self._report()

    async def look(self) -> None:
        """Take note of the present connections. Raises ``HostClosed``."""
        had_none = not self.dialler.connected
        connections = await self.dialler.look()
        if had_none and connections:
            self.wanted.set()
        self._proximity.look(connections, now=self.this.now())
        self.choose_scope()

    def announce(self, addresses: tuple[Multiaddr, ...]) -> None:
        """Take note of the own addresses, of which only direct ones can be dialled."""
        self._proximity.own = addresses
        direct = frozenset(str(address) for address in addresses if not is_relayed(address))
        if self.state.announce(direct, now=self.this.now()):
            self.wanted.set()
            self.choose_scope()

    def choose_scope(self) -> None:
        """Find out in which scope the known peers live. That of a new member counts at once."""
        this, now = self.this, self.this.now()
        scope = self._proximity.scope_that_counts(
            () if this.profile.run is None else this.table.live(now),
            now=now,
            count_connected=self.this.profile.observes,
        )
        if scope is not None and self.state.count_in(scope, now=now):
            self.wanted.set()
        if self.state.reachable != self._noticed:
            self._noticed = self.state.reachable
            self.wanted.set()

    async def _have_tried(self, helper: PeerId, scope: Scope, *, others: int) -> bool:
        """Have one helper arrange a dial-back. Says whether no other has to be asked."""
        state = self.state
        usable = [a for a in self.this.own.addresses if str(a) in state.verdicts[scope].addresses]
        answer = await self.dial_backs.ask(helper, usable)
        now = self.this.now()
        if isinstance(answer, Reached):
            seen = scope_seen(answer.remote, self._proximity.own)
            state.confirmed(answer.by, now=now, scope=seen)
            return seen >= scope
        if isinstance(answer, NotReached):
            return state.denied(helper, answer.reason, others=others, now=now, scope=scope)
        state.not_tried(answer.reason, scope=scope)
        return False

    async def _report(self) -> None:
        reachable = self.state.reachable
        if reachable == self._reported or (reachable is None and not self._reported):
            return
        self._reported = reachable
        self.announcement.outdate()
        self.announcement.hurry()
        own = self.this.own
        announced = ", ".join(str(address) for address in own.addresses) or "no address"
        state = {
            True: "reachable",
            False: "dial-out only, as behind a router or firewall",
            None: "not known any more whether others can dial it",
        }[reachable]
        self.this.events.tell(
            "reachability",
            f"{state}: {self.state.reason}; announced {announced}",
            reachable=reachable,
        )
        if (on_reachable := self.this.events.on_reachable) is not None:
            try:
                await on_reachable(reachable is True)
            except HostClosed:
                self._reported = None  # reported again as soon as the daemon is up

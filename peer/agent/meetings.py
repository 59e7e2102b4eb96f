"""Direct connections among peers that can all only dial out, so that they lead and reduce.

While a member of the run can be dialled, nothing is done here: it leads and reduces, and the others
need no connections with each other. Otherwise this peer opens direct connections with all others
(``dht.libp2p.lane.punching``), and counts as reachable if none of them fails. A peer whose router
lets no connection with some other one through does not lead: that one could not follow it. In a
large run only some peers are met by everybody, and lead (``peer.rules.reach.hubs``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from dht.errors import DhtError
from dht.identity import PeerId
from dht.libp2p.lane.lane import Lane
from dht.presence.presence import Presence
from peer.rules.reach import hubs, to_meet

logger = logging.getLogger(__name__)

MEET_EVERY_S = 3.0
CONNECT_WITHIN_S = 10.0
AT_ONCE = 4


class Meetings:
    """The peers with which direct connections could be opened, and those with which not."""

    def __init__(
        self,
        presence: Presence,
        *,
        me: PeerId,
        members: Callable[[], Mapping[PeerId, bool | None]],
    ) -> None:
        """``members``: the other live members, and whether they can be dialled."""
        self._me = me
        self._is_hub = False
        self.met: frozenset[PeerId] = frozenset()
        self.failed: frozenset[PeerId] = frozenset()
        self._presence = presence
        self._members = members

    def __repr__(self) -> str:
        return f"Meetings(met={len(self.met)}, failed={len(self.failed)})"

    @property
    def complete(self) -> bool:
        """Say whether the others reach this peer although it cannot be dialled."""
        return self._is_hub and bool(self.met) and not self.failed

    async def run(self, lane: Lane, changed: Callable[[], None]) -> None:
        """Meet the others for ever. ``changed`` is called after every change."""
        while True:
            before = self.met, self.failed, self._is_hub
            members = self._members()
            wanted = to_meet(self._presence.reachable, members, me=self._me)
            self._is_hub = self._me in hubs((self._me, *members))
            self.met, self.failed = self.met & wanted, self.failed & wanted
            turns = asyncio.Semaphore(AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for peer in sorted(wanted):
                    group.create_task(self._meet(peer, lane, turns))
            if (self.met, self.failed, self._is_hub) != before:
                changed()
            await asyncio.sleep(MEET_EVERY_S)

    async def _meet(self, peer: PeerId, lane: Lane, turns: asyncio.Semaphore) -> None:
        """Make sure of a direct connection, unless that failed lately."""
        if lane.is_doubted(peer):
            self._note(peer, met=False)
            return
        if lane.has_connection(peer):
            self._note(peer, met=True)
            return
        async with turns:
            try:
                await self._presence.connect(peer, timeout_s=CONNECT_WITHIN_S)
                reason = await lane.reach(peer)
            except DhtError as error:
                reason = str(error)
        if reason is not None:
            logger.info("not_met peer=%s reason=%s", peer, reason)
        self._note(peer, met=reason is None)

    def _note(self, peer: PeerId, *, met: bool) -> None:
        self.met = self.met | {peer} if met else self.met - {peer}
        self.failed = self.failed - {peer} if met else self.failed | {peer}

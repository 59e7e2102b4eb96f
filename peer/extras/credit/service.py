"""Credit on line: keeps this peer's tally of contributions.

Tokens are read off the peer's own states. Every few seconds it asks three live peers for names that
it lacks, so news reaches a swarm of hundreds within a minute. The tally is kept in the peer's
folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack

from averaging.live.averager import Averager
from dht.errors import BUSY, DhtError
from dht.identity import PeerId
from dht.limits import Rate
from peer.agent.peer import Peer
from peer.agent.questions import to_ask
from peer.agent.services import Service
from peer.bridge.settings import is_default
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import Tally
from peer.extras.credit.reading import load_tally, save_tally

logger = logging.getLogger(__name__)


LOOK_EVERY_S = 1.0
ANSWERS = (1.0, 20.0)
"""Answers to one peer: per second, and at once."""

ASK_EVERY_S = 10.0
ASK_WITHIN_S = 5.0
SAVE_EVERY_S = 30.0


class Crediting(Service):
    """The tally of one peer of a run, on line."""

    name = "credit"

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._network = peer.network
        name = peer.seat.name
        self._chosen_name = "" if is_default(name, peer.me) else name
        self.tally: Tally = load_tally(peer.directory, peer.run_id)
        self._counted: tuple[bytes, ...] = ()
        """Lineages of the states that were counted last."""
        self._rate = Rate[PeerId](*ANSWERS)
        self._is_saved = True

    def __repr__(self) -> str:
        return f"Crediting({self.tally!r})"

    async def open(self, stack: AsyncExitStack) -> None:
        await wire.CALL.serve(self._network.guarded, self.tally.run, self.answer)

    async def answer(self, peer: PeerId, asked: bytes) -> bytes:
        """Answer another peer with what it lacks. Raises ``ValueError``."""
        if not self._rate.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError(f"{BUSY}; ask again in a moment")
        return wire.CALL.encode(wire.answer(self.tally, asked))

    def look(self, averager: Averager) -> None:
        """Count what this peer's own states show, and state its name."""
        states = [state for state in averager.states if state is not None]
        if averager.goes_back or len(states) < len(averager.states):
            return  # a fragment that has yet to begin again shows counts from before
        lineages = tuple(state.lineage for state in states)
        if lineages != self._counted:
            self._counted = lineages
            self.tally.count(state.merged for state in states)
            self._is_saved = False
        identity, now = self._peer.seat.identity, self._swarm_time()
        if self.tally.state(identity, self._chosen_name, now):
            self._is_saved = False

    def _swarm_time(self) -> float:
        clock = self._network.presence.clock
        return self._network.host.wall_time() + (0.0 if clock is None else clock.offset_s)

    async def ask(self, peer: PeerId) -> None:
        """Take what a peer knows and this one does not."""
        network, known = self._network, wire.digests(self.tally)
        try:
            await network.presence.connect(peer, timeout_s=ASK_WITHIN_S)
            answer = await wire.CALL.ask(
                network.host, peer, self.tally.run, known, timeout_s=ASK_WITHIN_S
            )
            if self.tally.unite(answer.statements):
                self._is_saved = False
        except (DhtError, ValueError) as error:
            logger.info("credit_not_had peer=%s reason=%s", peer, error)

    async def run(self, averager: Averager) -> None:
        """Keep the tally up to date, for ever."""
        loop = asyncio.get_running_loop()
        asked_at = saved_at = loop.time()
        turn = 0
        while True:
            self.look(averager)
            now = loop.time()
            if now - asked_at >= ASK_EVERY_S:
                asked_at = now
                chosen = to_ask(self._peer.me, self._network.followers(), turn)
                turn += 1
                await asyncio.gather(*map(self.ask, chosen))
            if now - saved_at >= SAVE_EVERY_S:
                saved_at = now
                await self.save()
            await asyncio.sleep(LOOK_EVERY_S)

    async def save(self) -> None:
        """Write the tally to the peer's folder, if it has changed."""
        if self._is_saved:
            return
        self._is_saved = True
        folder, data = self._peer.directory, wire.encode(self.tally)
        try:
            await asyncio.to_thread(save_tally, folder, data)
        except OSError as error:
            self._is_saved = False
            logger.warning("tally_not_saved folder=%s reason=%s", folder, error)


begin = Crediting


def tally_of(services: Iterable[Service]) -> Tally:
    """The tally of a peer with these services."""
    (crediting,) = (each for each in services if isinstance(each, Crediting))
    return crediting.tally

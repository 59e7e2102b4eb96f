"""Credit on line: keeps this peer's tally of contributions.

Tokens are read off the peer's own states. Every few seconds it asks three live peers for names that
it lacks, so news reaches a swarm of hundreds within a minute. The tally is kept in the peer's
folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from averaging.live.averager import Averager
from dht.errors import BUSY, DhtError
from dht.host import Messaging
from dht.identity import Identity, PeerId, RunId
from dht.limits import Rate
from peer.agent.peer import Peer
from peer.agent.questions import to_ask
from peer.agent.services import Service
from peer.bridge.settings import is_default
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.tally import Tally
from peer.extras.credit.reading import load_tally, save_tally

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Around:
    """The other peers of a run, for the tally of one."""

    host: Messaging
    """Answers them."""
    ask: Callable[[PeerId, bytes], Awaitable[wire.Packed]]
    """Asks a peer for names that digests lack. Raises ``DhtError`` or ``ValueError``."""
    live: Callable[[], Iterable[PeerId]]
    """Those to ask."""


LOOK_EVERY_S = 1.0
ANSWERS = (1.0, 20.0)
"""Answers to one peer: per second, and at once."""

ASK_EVERY_S = 10.0
ASK_WITHIN_S = 5.0
SAVE_EVERY_S = 30.0


class Crediting(Service):
    """The tally of one peer of a run, on line."""

    name = "credit"

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        folder: Path,
        *,
        name: str,
        wall_time: Callable[[], float],
        around: Around,
    ) -> None:
        """``name``: the name that the peer's owner chose; empty if nobody chose it."""
        self._identity = identity
        self._folder = folder
        self._chosen_name = name
        self._wall_time = wall_time
        self._around = around
        self.tally: Tally = load_tally(folder, run)
        self._counted: tuple[bytes, ...] = ()
        """Lineages of the states that were counted last."""
        self._rate = Rate[PeerId](*ANSWERS)
        self._is_saved = True

    def __repr__(self) -> str:
        return f"Crediting({self.tally!r})"

    async def open(self, stack: AsyncExitStack) -> None:
        await wire.CALL.serve(self._around.host, self.tally.run, self.answer)

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
        if self.tally.state(self._identity, self._chosen_name, self._wall_time()):
            self._is_saved = False

    async def ask(self, peer: PeerId) -> None:
        """Take what a peer knows and this one does not."""
        try:
            answer = await self._around.ask(peer, wire.digests(self.tally))
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
                chosen = to_ask(self._identity.peer_id, self._around.live(), turn)
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
        data = wire.encode(self.tally)
        try:
            await asyncio.to_thread(save_tally, self._folder, data)
        except OSError as error:
            self._is_saved = False
            logger.warning("tally_not_saved folder=%s reason=%s", self._folder, error)


def begin(peer: Peer) -> Crediting:
    """The tally of a peer of a run."""
    name, network, run = peer.seat.name, peer.network, peer.run_id

    async def ask(other: PeerId, known: bytes) -> wire.Packed:
        await network.presence.connect(other, timeout_s=ASK_WITHIN_S)
        return await wire.CALL.ask(network.host, other, run, known, timeout_s=ASK_WITHIN_S)

    def swarm_time() -> float:
        clock = network.presence.clock
        return network.host.wall_time() + (0.0 if clock is None else clock.offset_s)

    return Crediting(
        peer.seat.identity,
        run,
        peer.directory,
        name="" if is_default(name, peer.me) else name,
        wall_time=swarm_time,
        around=Around(network.guarded, ask, network.followers),
    )


def tally_of(services: Iterable[Service]) -> Tally:
    """The tally of a peer with these services."""
    (crediting,) = (each for each in services if isinstance(each, Crediting))
    return crediting.tally

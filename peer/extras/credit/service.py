"""Credit on line: keeps this peer's tally of contributions, and unites it with those of others.

Every few seconds it asks three live peers for what it lacks, so news reaches a swarm of hundreds
within a minute. The tally is kept in the peer's folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from averaging.history.parent_maps import ParentMap
from averaging.history.standing import Standing
from averaging.live.averager import Averager
from averaging.round.opinions.certificates import link_of
from dht.errors import BUSY, DhtError
from dht.identity import Identity, PeerId, RunId
from dht.limits import Rate
from peer.agent.network import Network
from peer.agent.peer import Peer
from peer.agent.questions import asked_at_once
from peer.agent.services import Service
from peer.bridge.settings import is_default
from peer.extras.credit.accounting import wire
from peer.extras.credit.accounting.proof import ProvenMap
from peer.extras.credit.accounting.reports import DAY_S, day_of
from peer.extras.credit.accounting.tally import Part, Tally
from peer.extras.credit.kept import load_tally, read_wishes, save_tally

logger = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[PeerId, wire.Summary], Awaitable[wire.Packed]]
"""Asks a peer for what a summary lacks. Raises ``DhtError`` or ``ValueError``."""

LOOK_EVERY_S = 1.0
ANSWERS = (1.0, 20.0)
"""Answers to one peer: per second, and at once."""

ASK_EVERY_S = 10.0
ASK_WITHIN_S = 5.0
REPORT_EVERY_S = 60.0
SAVE_EVERY_S = 30.0


class Crediting:
    """The tally of one peer of a run, on line."""

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        folder: Path,
        *,
        fragments: int,
        name: str,
        wall_time: Callable[[], float],
    ) -> None:
        """``name``: the name that the peer's owner chose; empty if nobody chose it."""
        self._identity = identity
        self._folder = folder
        self._name = name
        self._wall_time = wall_time
        self.tally: Tally = load_tally(folder, run, identity.peer_id, fragments)
        self._averager: Averager | None = None
        self._rate = Rate[PeerId](*ANSWERS)
        self._is_saved = True
        self._refused = ""
        """The reason why the owner's wishes could not be stated."""

    def __repr__(self) -> str:
        return f"Crediting({self.tally!r})"

    async def answer(self, peer: PeerId, asked: wire.Summary) -> bytes:
        """Answer another peer's summary with what it lacks. Raises ``ValueError``."""
        if not self._rate.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError(f"{BUSY}; ask again in a moment")
        return wire.encode_some(wire.missing(self.tally, asked))

    def look(self, averager: Averager) -> None:
        """Take what this peer's own states show, and what its owner wants to have said."""
        self._averager = averager
        if averager.goes_back:
            return  # a fragment that has yet to begin again shows counts from before
        self.tally.follow(averager.topic)
        maps = []
        for state in averager.states:
            known = self.tally.maps.get(state.fragment) if state is not None else None
            if state is None or not state.history or not state.merged.tokens:
                continue
            if known is None or state.merged.tokens > known.merged.tokens:
                head = averager.shown(state)
                link = link_of(Standing.of(state).head())
                content = ParentMap(state.merged, state.history)
                maps.append(ProvenMap(state.fragment, link, content, head.signatures))
        self._unite(Part(maps=tuple(maps)))
        self._state_wishes()

    def report(self) -> None:
        """Report the day so far to the others."""
        if self.tally.report(self._identity, day_of(self._wall_time())):
            self._is_saved = False

    def _state_wishes(self) -> None:
        wishes = read_wishes(self._folder)
        name = self._name if wishes is None or wishes.name is None else wishes.name
        keys = () if wishes is None else wishes.keys
        try:
            if self.tally.state(self._identity, name, keys, self._wall_time()):
                self._is_saved = False
        except ValueError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.warning("not_stated reason=%s", error)

    def _unite(self, part: Part) -> None:
        today = day_of(self._wall_time())
        if self.tally.unite(part, today=today, believes=self._believes):
            self._is_saved = False

    def _believes(self, proven: ProvenMap) -> bool:
        averager = self._averager
        return averager is not None and averager.believes(
            proven.fragment, proven.link, proven.signatures
        )

    async def ask(self, ask: Ask, peer: PeerId) -> None:
        """Take what a peer knows and this one does not."""
        try:
            told = await ask(peer, wire.summary(self.tally))
            self._unite(await asyncio.to_thread(wire.unpacked, told))
        except (DhtError, ValueError) as error:
            logger.info("credit_not_had peer=%s reason=%s", peer, error)

    async def run(self, averager: Averager, ask: Ask, live: Callable[[], Iterable[PeerId]]) -> None:
        """Keep the tally up to date, for ever."""
        loop = asyncio.get_running_loop()
        asked_at = reported_at = saved_at = loop.time()
        turn = 0
        while True:
            self.look(averager)
            now = loop.time()
            if now - reported_at >= REPORT_EVERY_S or self._day_ends():
                self.report()
                reported_at = now
            if now - asked_at >= ASK_EVERY_S:
                asked_at = now
                chosen = to_ask(self._identity.peer_id, live(), turn)
                turn += 1
                await asyncio.gather(*(self.ask(ask, peer) for peer in chosen))
            if now - saved_at >= SAVE_EVERY_S:
                saved_at = now
                await self.save()
            await asyncio.sleep(LOOK_EVERY_S)

    def _day_ends(self) -> bool:
        """True in the last moments of a day: its last report stands."""
        return DAY_S - self._wall_time() % DAY_S <= 2 * LOOK_EVERY_S

    async def save(self) -> None:
        """Write the tally to the peer's folder, if it has changed."""
        if self._is_saved:
            return
        self._is_saved = True
        data = wire.encode(self.tally.part)
        try:
            await asyncio.to_thread(save_tally, self._folder, data)
        except OSError as error:
            self._is_saved = False
            logger.warning("tally_not_saved folder=%s reason=%s", self._folder, error)


def to_ask(me: PeerId, live: Iterable[PeerId], turn: int) -> list[PeerId]:
    """The peers that a peer asks in its turn: others each time, and not those that others ask."""
    ranked = sorted(live, key=lambda peer: blake3(f"{turn} {me} {peer}".encode()).digest())
    return ranked[: asked_at_once(len(ranked))]


def begin(peer: Peer) -> Service:
    """The tally of a peer of a run."""
    name, network = peer.seat.name, peer.network
    crediting = Crediting(
        peer.seat.identity,
        peer.run_id,
        peer.directory,
        fragments=len(peer.layout.fragments),
        name="" if is_default(name, peer.me) else name,
        wall_time=network.swarm_time,
    )
    return Credited(crediting, network, peer.run_id)


class Credited(Service):
    """The tally of a peer on line, among the peers of its run."""

    name = "credit"

    def __init__(self, crediting: Crediting, network: Network, run: RunId) -> None:
        self.crediting = crediting
        self._network = network
        self._run = run

    async def open(self, stack: AsyncExitStack) -> None:
        await wire.CALL.serve(self._network.guarded, self._run, self.crediting.answer)

    async def run(self, averager: Averager) -> None:
        await self.crediting.run(averager, self._ask, self._network.followers)

    async def _ask(self, peer: PeerId, known: wire.Summary) -> wire.Packed:
        await self._network.presence.connect(peer, timeout_s=ASK_WITHIN_S)
        host = self._network.host
        return await wire.CALL.ask(host, peer, self._run, known, timeout_s=ASK_WITHIN_S)

    async def save(self) -> None:
        await self.crediting.save()


def tally_of(services: Iterable[Service]) -> Tally:
    """The tally of a peer with these services."""
    (credited,) = (each for each in services if isinstance(each, Credited))
    return credited.crediting.tally

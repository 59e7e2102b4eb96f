"""The public page of the run of a keeper: what it knows, without addresses of peers.

``Record`` is the loss, the tokens and the news of the whole run, as one peer has seen them: it is
bounded, and kept over restarts. As a run gets longer points are thinned out: beyond ``POINTS_MAX``
every second one is dropped, and the next ones come half as often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from averaging.live.averager import Averager
from dht.addresses import with_peer
from dht.errors import BUSY
from dht.identity import PeerId
from dht.limits import Rate
from dht.whole_files import write_whole
from peer.agent.peer import Peer
from peer.agent.services import Service
from peer.bridge.settings import is_default
from peer.contributors import PER_MILLE, Contributor
from peer.extras.credit.accounting.tally import contributors
from peer.extras.credit.service import tally_of
from peer.extras.site.run_page import (
    CALL,
    DAYS_MAX,
    FRESH_S,
    NEWS_MAX,
    POINTS_MAX,
    ROWS_MAX,
    Day,
    Latest,
    News,
    Point,
    Row,
    RunPage,
    Site,
    described,
    elsewhere,
    serve_run_pages,
)
from peer.extras.site.shelf import published
from peer.quantities import bytes_text, count_text, loss_at, plural
from peer.run_file.sections import CustomModel, RunFile
from peer.views.page_address import PageAddress

FIRST_EVERY_S = 10.0
MET_MAX = 4096
"""Contributors that were news. Beyond them nobody is."""
_TEXT_MAX = 300


class Record(msgspec.Struct, kw_only=True):
    """Record of the events of a run, in memory and as a file."""

    every_s: float = FIRST_EVERY_S
    tokens: int = 0
    losses: list[Point] = []
    held_out: list[Point] = []
    days: list[Day] = []
    """The tokens merged on each day that this peer has seen, the newest last."""
    news: list[News] = []
    """The newest first."""
    met: set[PeerId] = set()
    """Contributors that were news already: a name may change at any time."""

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The record of a file; an empty one if it cannot be read."""
        try:
            return msgspec.json.decode(data, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls()

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")

    def sample(self, at: float, tokens: int, losses: Sequence[float]) -> None:
        """Note the training losses that learners tell of now; their median counts."""
        if not tokens and self.tokens:
            return  # the states to which the run was taken back are still to be fetched
        if tokens < self.tokens:  # the run was taken back, and these points with it
            self.losses = [point for point in self.losses if point.tokens <= tokens]
            self.held_out = [point for point in self.held_out if point.tokens <= tokens]
        if self.tokens and tokens > self.tokens:  # what was there before this record has no day
            day = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
            before = self.days.pop().tokens if self.days and self.days[-1].date == day else 0
            self.days.append(Day(date=day, tokens=before + tokens - self.tokens))
            del self.days[:-DAYS_MAX]
        self.tokens = tokens
        known = sorted(loss for loss in losses if -1e9 < loss < 1e9)
        # A clock that was ahead once must not end the curve.
        if not known or (self.losses and 0 <= at - self.losses[-1].at < self.every_s):
            return
        self.losses.append(Point(at=at, tokens=tokens, loss=known[len(known) // 2]))
        if len(self.losses) > POINTS_MAX:
            del self.losses[-2::-2]  # the newest stays
            self.every_s *= 2

    def note(self, event: Mapping[str, Any]) -> None:
        """Take note of an event of this peer that is of interest to everybody."""
        at = float(event["at"])
        match event:
            case {"event": "measured", "loss": float(loss), "tokens": int(n)} if -1e9 < loss < 1e9:
                self.held_out.append(Point(at=at, tokens=n, loss=loss))
                if len(self.held_out) > POINTS_MAX:
                    del self.held_out[-2::-2]
                self._add_news(at, f"held-out loss {loss_at(loss, n)}")
            case {"event": "published", "tokens": int(exported)}:
                self._add_news(at, f"a new export, of {count_text(exported)} tokens")
            case {"event": "ended_here"}:
                self._add_news(at, "the run has ended")

    def meet(self, at: float, contributors: Sequence[tuple[str, PeerId]]) -> None:
        """Welcome new contributors, by name and id. Those of before this record are no news."""
        is_new = not self.met
        for name, peer in contributors:
            if peer in self.met:
                continue
            if len(self.met) >= MET_MAX:
                return
            if not is_new:
                self._add_news(at, f"{name} contributes")
            self.met.add(peer)

    def _add_news(self, at: float, text: str) -> None:
        self.news.insert(0, News(at=at, text=text[:_TEXT_MAX]))
        del self.news[NEWS_MAX:]


logger = logging.getLogger(__name__)

FILE = "run_page.json"
ANSWERS = (0.5, 5.0)
"""Answers to one peer: per second, and at once. Strangers may ask."""

SAMPLE_EVERY_S = 10.0
SAVE_EVERY_S = 60.0
COUNT_EVERY_S = 30.0
"""Time between two counts of contributors."""

AGE_MAX_S = 120.0
"""Losses that were told longer ago do not count."""


class ShownRun(Service):
    """The public page of one run, as one keeper knows it."""

    name = "show"

    def __init__(
        self,
        peer: Peer,
        *,
        address: PageAddress | None = None,
        exports: Path | None = None,
        hub: str = "",
    ) -> None:
        """``hub`` is the address of the run's repository there.

        Without an address the page is shown by bootstrap peers only, which ask for it.
        """
        self._peer = peer
        self._address, self._exports, self._hub = address, exports, hub
        self._file = peer.directory / FILE
        try:
            self._record = Record.decode(self._file.read_bytes())
        except OSError:
            self._record = Record()
        self._rate = Rate[PeerId](*ANSWERS)
        self._told = b""
        """The answer to those who ask, which is made once for all of them."""
        self._told_until = float("-inf")
        self._rows: list[Contributor] = []
        self._needs = ""

    def __repr__(self) -> str:
        return f"ShownRun({self._peer.run_id[:8]})"

    async def open(self, stack: AsyncExitStack) -> None:
        """Serve the page, and answer those who ask for it. Raises ``PageError``."""
        self._needs = await asyncio.to_thread(needs_words, self._peer.owner.run_now)
        # Not through the guard: the page is for everybody.
        await CALL.serve(self._peer.network.host, self._peer.run_id, self._answer)
        if self._address is None:
            return
        name = self._peer.seat.name
        keeper = "a keeper" if is_default(name, self._peer.me) else f"{name}, a keeper"
        site = Site(
            who=f"Served by {keeper} of the run",
            pages=lambda: {self._peer.run_id: self.page()},
            exports=self._exports,
        )
        url = await stack.enter_async_context(serve_run_pages(self._address, site))
        self._peer.tell("run_page", {"url": url})

    async def _answer(self, peer: PeerId, detail: str) -> bytes:
        now = asyncio.get_running_loop().time()
        if not self._rate.spend(peer, now):
            raise ValueError(f"{BUSY}; ask again in a moment")
        if now >= self._told_until:
            self._told_until = now + FRESH_S
            self._told = CALL.encode(elsewhere(self.page()))
        return self._told

    def note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Keep an event of this peer that is of interest to everybody."""
        self._record.note({**fields, "event": name, "at": self._peer.network.host.wall_time()})

    async def run(self, averager: Averager) -> None:
        """Keep the record up to date, for ever."""
        loop = asyncio.get_running_loop()
        saved_at, counted_at = loop.time(), float("-inf")
        while True:
            network, now = self._peer.network, loop.time()
            recent = [
                told.loss
                for told in network.told.values()
                if told.loss is not None and now - told.at <= AGE_MAX_S
            ]
            self._record.sample(network.host.wall_time(), self._peer.merged_tokens(), recent)
            if now - counted_at >= COUNT_EVERY_S:
                counted_at = now
                await self._count()
            if now - saved_at >= SAVE_EVERY_S:
                saved_at = now
                await self.save()
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def save(self) -> None:
        """Write the record to the peer's folder."""
        try:
            await asyncio.to_thread(write_whole, self._file, self._record.encode())
        except OSError as error:
            logger.warning("run_page_not_saved file=%s reason=%s", self._file, error)

    def page(self) -> RunPage:
        """The page as it is now."""
        here, network = self._peer, self._peer.network
        live = [member.record for member in network.live_members()]
        learners = sum(each.role == "learner" and each.trains for each in live)
        keepers = sum(each.role == "keeper" for each in live) + 1
        record = self._record
        return RunPage(
            run=here.run_id,
            at=network.host.wall_time(),
            **described(here.owner.run_now, parameters=count_text(here.layout.size)),
            needs=self._needs,
            link=public_link(here),
            tokens=here.merged_tokens(),
            ended_at=here.ending.ended_at,
            learners=learners,
            keepers=keepers,
            others=len(live) + 1 - learners - keepers,
            # A keeper that has just come has yet to hear of them.
            contributors_total=len(self._rows) or None,
            losses=tuple(record.losses),
            held_out=tuple(record.held_out),
            days=tuple(record.days),
            contributors=tuple(_shown(self._rows)),
            latest=self._latest(),
            news=tuple(record.news),
        )

    async def _count(self) -> None:
        """Count the contributors, which takes seconds if there are thousands."""
        tally = tally_of(self._peer.services).copied()
        self._rows = await asyncio.to_thread(contributors, tally)
        named = [(row.name, row.peer) for row in self._rows if row.name]
        self._record.meet(self._peer.network.host.wall_time(), named[:ROWS_MAX])

    def _latest(self) -> Latest | None:
        """The newest export that is there."""
        newest = published(self._exports)[-1:] if self._exports is not None else []
        for entry in newest:
            fields = Latest.__struct_fields__
            alike = {name: getattr(entry, name) for name in fields if hasattr(entry, name)}
            return Latest(**alike, path=f"exports/{entry.name}/{entry.weights}", url=self._hub)
        return None


def public_link(here: Peer) -> str:
    """The link with addresses of hosts alone: bootstrap peers, this peer, and keepers.

    Those of learners are nobody's to publish, unless the run file does. Empty until this peer
    knows an own address.
    """
    keepers = [m for m in here.network.live_members() if m.record.role == "keeper"]
    known = [with_peer(address, each.peer) for each in keepers for address in each.addresses[:1]]
    return here.network.link_by([*here.run_file.seed_addresses, *known])


def needs_words(run: RunFile) -> str:
    """The needs of a machine that trains in a run; empty where only a program has the model."""
    from peer.trainer.needs import needs_of  # with torch

    if isinstance(run.model, CustomModel):
        return ""
    needs = needs_of(run)
    return (
        f"{bytes_text(needs.device_bytes)} of memory on the device and the activations of one "
        f"sequence or more, {bytes_text(needs.agent_bytes)} of memory beside that, "
        f"{bytes_text(needs.disk_bytes)} of disk; at most {bytes_text(needs.cycle_bytes)} up and "
        f"as much down in {run.outer.steps_per_cycle} steps"
    )


def _shown(rows: list[Contributor]) -> list[Row]:
    """The largest contributors, and all others in one row."""
    made = [
        Row(name=row.shown, tokens=row.tokens, share=row.per_mille / PER_MILLE)
        for row in rows[:ROWS_MAX]
    ]
    if more := rows[ROWS_MAX:]:
        tokens, share = sum(row.tokens for row in more), sum(row.per_mille for row in more)
        made.append(Row(name=plural(len(more), "other"), tokens=tokens, share=share / PER_MILLE))
    return made

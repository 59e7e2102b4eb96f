"""Public pages of the runs that meet at a bootstrap peer: what keepers have published of them.

A bootstrap peer takes part in no run. It knows the records of a run's peers, the run file, which
peers hand out, and the page that a keeper answers with if its owner publishes one. The page says
what it does not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from blake3 import blake3
from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.errors import DhtError
from dht.host import Host
from dht.identity import PeerId, RunId
from dht.membership.hello import RUN_FILE_PROTOCOL
from dht.membership.table import Member
from dht.presence.presence import Presence
from peer.errors import RunFileError
from peer.extras.site.run_page import RunPage, Site, ask, described, elsewhere, serve_run_pages
from peer.joining.link import short_link
from peer.run_file.reading import from_canonical
from peer.views.page_address import PageAddress

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0
ASK_WITHIN_S = 5.0
RUNS_MAX = 50
"""Runs that have a page: those with the most live peers. Anybody may found a run."""

ASKED_MAX = 3
FORGET_AFTER_S = 7 * 86_400.0
"""A page without live peers is shown this long after its last news."""

FIXED = frozenset(("name", "description", "licence", "homepage", "contact", "discussion", "data"))
"""Settings that the owner of a run cannot amend: a page shows them as its run file has them."""

NO_KEEPER = (
    "No keeper that is on line publishes a page of this run, so its loss, its contributors and its "
    "exports are not known here."
)
OWN_WORDS = "The number of tokens is what its peers say of themselves."
NO_FILE = "None of its peers has handed out its run file: its name and description are not known."
NOBODY = "No peer of this run is on line here now; this is the last known state."


class RunPages:
    """The pages of runs, as one bootstrap peer knows them."""

    def __init__(self, host: Host, presence: Presence, own: Sequence[Multiaddr]) -> None:
        """``own``: addresses of this peer, for links."""
        self._host = host
        self._presence = presence
        self._own = own
        self._pages: dict[RunId, RunPage] = {}
        self._files: dict[RunId, Mapping[str, object]] = {}
        """Settings from run files, by run."""
        self._keepers_since: dict[RunId, Mapping[PeerId, float]] = {}
        """When each keeper was first seen here. A table counts anew after each time of silence."""

    def __repr__(self) -> str:
        return f"RunPages({len(self._pages)} runs)"

    def pages(self) -> Mapping[str, RunPage]:
        """All pages, those of runs with the most learners first."""
        ranked = sorted(self._pages.items(), key=lambda each: (-each[1].learners, each[0]))
        return dict(ranked)

    async def run(self) -> None:
        """Keep the pages up to date, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask the keepers of all runs once."""
        now = asyncio.get_running_loop().time()
        live = self._presence.table.live_by_run(now)
        there = sorted(live, key=lambda run: -len(live[run]))
        found = await asyncio.gather(*(self._look_at(run, live[run]) for run in there[:RUNS_MAX]))
        fresh = dict(zip(there, found, strict=False))
        wall_time = self._host.wall_time()
        for run, page in list(self._pages.items()):
            if run in fresh:
                continue
            if wall_time - page.at > FORGET_AFTER_S or len(self._pages) > 2 * RUNS_MAX:
                del self._pages[run]
                self._files.pop(run, None)
                self._keepers_since.pop(run, None)
            else:
                self._pages[run] = msgspec.structs.replace(
                    page, learners=0, keepers=0, others=0, link="", unknown=(NOBODY,)
                )
        self._pages.update(fresh)

    async def _look_at(self, run: RunId, live: Sequence[Member]) -> RunPage:
        """The page that a keeper of a run publishes; else what the records say.

        Anybody may call itself a keeper. So those are asked that have been here longest; of three
        one counts that is between the others, and what the run file says it says here.
        """
        said = await self._file(run, live)
        since = self._keepers(run)
        keepers = sorted((m.peer for m in live if m.peer in since), key=lambda peer: since[peer])
        asked = keepers[:ASKED_MAX]
        pages = await asyncio.gather(*(self._ask(run, peer) for peer in asked))
        ranked = sorted((page for page in pages if page), key=lambda page: page.tokens or 0)
        if not ranked:
            return self._from_records(run, live, said)
        page = elsewhere(ranked[len(ranked) // 2])
        fixed = {name: text for name, text in said.items() if name in FIXED}
        return msgspec.structs.replace(page, **fixed, link=self._link(run, live))

    def _keepers(self, run: RunId) -> Mapping[PeerId, float]:
        """The keepers of a run that are or were here, with the time of the first look at each."""
        now, known = asyncio.get_running_loop().time(), self._keepers_since.get(run, {})
        there = [
            member.peer
            for member in self._presence.table
            if member.run == run and member.record.role == "keeper"
        ]
        self._keepers_since[run] = {peer: known.get(peer, now) for peer in there}
        return self._keepers_since[run]

    async def _ask(self, run: RunId, peer: PeerId) -> RunPage | None:
        try:
            return await ask(self._host, peer, run, timeout_s=ASK_WITHIN_S)
        except (DhtError, ValueError) as error:
            logger.info("run_page_not_had peer=%s reason=%s", peer, error)
            return None

    async def _file(self, run: RunId, live: Sequence[Member]) -> Mapping[str, object]:
        """Settings from the run file; none if no peer hands it out."""
        if run not in self._files:
            await self._fetch_file(run, [member.peer for member in live[:ASKED_MAX]])
        return self._files.get(run, {})

    def _from_records(
        self, run: RunId, live: Sequence[Member], said: Mapping[str, object]
    ) -> RunPage:
        learners = sum(m.record.role == "learner" and m.record.trains for m in live)
        keepers = sum(m.record.role == "keeper" for m in live)
        tokens = sum(m.record.counters.tokens for m in live)
        return msgspec.structs.replace(
            RunPage(run=run, at=self._host.wall_time()),
            **said,
            link=self._link(run, live),
            tokens=min(tokens, 2**62 - 1),
            learners=learners,
            keepers=keepers,
            others=len(live) - learners - keepers,
            unknown=(NO_KEEPER, OWN_WORDS, *(() if said else (NO_FILE,))),
        )

    async def _fetch_file(self, run: RunId, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            try:
                content = await self._host.call(
                    peer, RUN_FILE_PROTOCOL, run.encode(), timeout_s=ASK_WITHIN_S
                )
                if blake3(content).hexdigest() == run:
                    self._files[run] = described(from_canonical(content, run))
                    return
            except (DhtError, RunFileError) as error:
                logger.info("run_file_not_had peer=%s reason=%s", peer, error)

    def _link(self, run: RunId, live: Sequence[Member]) -> str:
        """The link by this peer first, then by keepers: nobody publishes a learner's address."""
        keepers = [m for m in live if m.record.role == "keeper"]
        known = [address_rules.with_peer(a, m.peer) for m in keepers for a in m.addresses[:1]]
        return str(short_link(run, seeds=[*self._own, *known], own=()))


@asynccontextmanager
async def served_run_pages(address: PageAddress, pages: RunPages) -> AsyncIterator[str]:
    """Serve the pages of runs while the block runs; yields the URL. Raises ``PageError``."""
    site = Site(who="Served by a bootstrap peer, where peers of runs meet", pages=pages.pages)
    async with serve_run_pages(address, site) as url, asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(pages.run(), name="look at runs")
        try:
            yield url
        finally:
            looking.cancel()

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
from dataclasses import dataclass

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
"""Live runs that have a page, and runs without live peers that still have one. Anybody may found a
run, and call hundreds of keys its peers: half of the pages are those of runs that have been here
for longest, the others those of runs with the most live peers."""

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


@dataclass(slots=True)
class _Run:
    """The page of one run, and what it is made of."""

    page: RunPage
    file: Mapping[str, object]
    """Settings from its run file; none while no peer has handed it out."""
    keepers: Mapping[PeerId, float]
    """When each keeper was first seen here. A table counts anew after each time of silence."""
    looks: int
    """Number of looks at which it had live peers."""


class RunPages:
    """The pages of runs, as one bootstrap peer knows them."""

    def __init__(self, host: Host, presence: Presence, own: Sequence[Multiaddr]) -> None:
        """``own``: addresses of this peer, for links."""
        self._host = host
        self._presence = presence
        self._own = own
        self._runs: dict[RunId, _Run] = {}

    def __repr__(self) -> str:
        return f"RunPages({len(self._runs)} runs)"

    def pages(self) -> Mapping[str, RunPage]:
        """All pages, those of runs with the most learners first."""
        pages = {run: known.page for run, known in self._runs.items()}
        return dict(sorted(pages.items(), key=lambda each: (-each[1].learners, each[0])))

    async def run(self) -> None:
        """Keep the pages up to date, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask the keepers of all runs once."""
        now, table = asyncio.get_running_loop().time(), self._presence.table
        live, keepers = table.live_by_run(now), dict[RunId, list[PeerId]]()
        for member in table:
            if member.record.role == "keeper":
                keepers.setdefault(member.run, []).append(member.peer)
        chosen = self._chosen(live)
        fresh = await asyncio.gather(
            *(self._look_at(run, live[run], keepers.get(run, ()), now) for run in chosen)
        )
        wall_time, rest = self._host.wall_time(), list[RunId]()
        for run, known in self._runs.items():
            if run not in live and wall_time - known.page.at <= FORGET_AFTER_S:
                known.page = msgspec.structs.replace(
                    known.page, learners=0, keepers=0, others=0, link="", unknown=(NOBODY,)
                )
                rest.append(run)
        rest = sorted(rest, key=self._looks, reverse=True)[:RUNS_MAX]
        self._runs = dict(zip(chosen, fresh, strict=True)) | {run: self._runs[run] for run in rest}

    def _chosen(self, live: Mapping[RunId, Sequence[Member]]) -> list[RunId]:
        """The live runs that have a page."""
        longest = sorted(live.keys() & self._runs.keys(), key=self._looks, reverse=True)
        longest = longest[: RUNS_MAX // 2]
        others = sorted(live.keys() - set(longest), key=lambda run: (-len(live[run]), run))
        return [*longest, *others[: RUNS_MAX - len(longest)]]

    def _looks(self, run: RunId) -> tuple[int, str]:
        return self._runs[run].looks, run

    async def _look_at(
        self, run: RunId, live: Sequence[Member], keepers: Sequence[PeerId], now: float
    ) -> _Run:
        """The page that a keeper of a run publishes; else what the records say.

        Anybody may call itself a keeper. So those are asked that have been here longest; of three
        one counts that is between the others, and what the run file says it says here.
        """
        known = self._runs.get(run)
        said = known.file if known and known.file else await self._file(run, live)
        since = {peer: known.keepers.get(peer, now) if known else now for peer in keepers}
        there = sorted((m.peer for m in live if m.peer in since), key=lambda peer: since[peer])
        pages = await asyncio.gather(*(self._ask(run, peer) for peer in there[:ASKED_MAX]))
        ranked = sorted((page for page in pages if page), key=lambda page: page.tokens or 0)
        if ranked:
            fixed = {name: text for name, text in said.items() if name in FIXED}
            page = msgspec.structs.replace(
                elsewhere(ranked[len(ranked) // 2]), **fixed, link=self._link(run, live)
            )
        else:
            page = self._from_records(run, live, said)
        return _Run(page, said, since, 1 + (known.looks if known else 0))

    async def _ask(self, run: RunId, peer: PeerId) -> RunPage | None:
        try:
            return await ask(self._host, peer, run, timeout_s=ASK_WITHIN_S)
        except (DhtError, ValueError) as error:
            logger.info("run_page_not_had peer=%s reason=%s", peer, error)
            return None

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

    async def _file(self, run: RunId, live: Sequence[Member]) -> Mapping[str, object]:
        """Settings from the run file; none if no peer hands it out."""
        for peer in [member.peer for member in live[:ASKED_MAX]]:
            try:
                content = await self._host.call(
                    peer, RUN_FILE_PROTOCOL, run.encode(), timeout_s=ASK_WITHIN_S
                )
                if blake3(content).hexdigest() == run:
                    return described(from_canonical(content, run))
            except (DhtError, RunFileError) as error:
                logger.info("run_file_not_had peer=%s reason=%s", peer, error)
        return {}

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

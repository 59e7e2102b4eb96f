"""The local page of a peer, and the figures that it keeps in its folder for ``shoal status``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from averaging.live.averager import Averager
from peer.agent.services import Seat, Service
from peer.events.board import Board
from peer.status import PeerRow, PeerStatus
from peer.views import agent_page
from peer.views.page_address import PageError, parse_page
from peer.views.pages import Content, serve_pages

SAMPLE_EVERY_S = 1.0
FIGURES_KEPT_EVERY = 10
"""Samples between two times that the figures are written into the folder of the peer."""


@dataclass(slots=True, kw_only=True, eq=False)
class LocalPage(Service):
    """The page of one peer, at this machine."""

    seat: Seat
    board: Board
    status: Callable[[], PeerStatus]
    rows: Callable[[PeerStatus], Sequence[PeerRow]]
    keep_figures: Callable[[Mapping[str, Any]], Awaitable[None]]
    served: Callable[[str], None]
    """Hears the address."""
    not_served: Callable[[str], None]
    """Hears why there is none."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Serve the page. Raises ``PageError`` where this very address was asked for."""
        assert self.seat.settings.page is not None
        address = parse_page(self.seat.settings.page)
        pages = serve_pages(
            address,
            checks=lambda: agent_page.checks(self.status()),
            metrics=lambda: agent_page.metrics(self.status()),
            content=Content(
                state=self.state,
                events=self.board.search,
                token_file=self.seat.directory / "page.token",
            ),
        )
        try:
            url = await stack.enter_async_context(pages)
        except PageError as error:
            if address.tries == 1:
                raise
            self.not_served(str(error))
        else:
            self.served(url)

    def state(self) -> Mapping[str, Any]:
        """The content of ``/state.json``."""
        status, run = self.status(), self.seat.run
        return agent_page.content(
            status,
            self.board,
            self.rows(status),
            run_id=run.run_id,
            run_name=run.name,
            wall_time=time.time(),
        )

    async def run(self, averager: Averager) -> None:
        """Add points to the page's curve, and keep the figures in the folder, for ever."""
        turn = 0
        while True:
            status = self.status()
            self.board.sample(tokens=status.global_tokens, loss=status.loss)
            if turn % FIGURES_KEPT_EVERY == 0:
                await self.keep_figures(status.figures())
            turn += 1
            await asyncio.sleep(SAMPLE_EVERY_S)

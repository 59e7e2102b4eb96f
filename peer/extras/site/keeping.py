"""The public side of a keeper, as the options of ``shoal keep`` ask for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from averaging.live.averager import Averager
from peer.agent.services import Begin, Service
from peer.extras.site.publishing.hub import address_of, check_repository
from peer.extras.site.publishing.publisher import (
    EVERY_MIN_S,
    Publisher,
    Publishing,
    check_publishing,
)
from peer.rules.ending import Ending
from peer.run_file.sections import RunFile
from peer.storage.home import data_cache
from peer.views.page_address import PageAddress, parse_run_page

if TYPE_CHECKING:
    from peer.agent.peer import Peer


@dataclass(frozen=True, slots=True)
class PublicSide:
    """The exports that a keeper publishes."""

    publishing: Publishing | None
    """Exports of the model."""
    page: PageAddress | None
    """The address of the run's page; ``None``: it is at bootstrap peers only, which ask for it."""

    def check(self, run: RunFile) -> None:
        """Raise ``NotAShelf`` or ``Unusable`` if this cannot be published."""
        if self.publishing is not None:
            check_publishing(self.publishing, run)

    def services(self) -> tuple[Begin, ...]:
        """The work of it, for a peer on line."""
        from peer.extras.site.keepers_page import Showing, ShownRun

        what = self.publishing
        hub = "" if what is None or what.repository is None else address_of(what.repository)
        page = Showing(self.page, None if what is None else what.folder, hub)
        shown = partial(ShownRun, showing=page)
        return (shown,) if what is None else (shown, partial(_published, what=what))


def asked_for(
    *,
    publish: Path | None,
    every: str | None,
    keep_exports: int | None,
    push: str | None,
    run_page: str | None,
) -> PublicSide:
    """The public side by its options. Raises ``BadParameter`` or ``PeerError``."""
    page = None if run_page is None else parse_run_page(run_page)
    if publish is None:
        given = {
            "--every": every,
            "--keep-exports": keep_exports,
            "--push": push,
        }
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter(
                    f"{option} is for what --publish writes; name a folder with --publish"
                )
        return PublicSide(None, page)
    every_s = 3600.0 if every is None else _seconds(every)
    if not every_s >= EVERY_MIN_S:
        raise typer.BadParameter(f"--every is {every!r}; the shortest time is {EVERY_MIN_S:g}s")
    if push is not None:
        check_repository(push)
    publishing = Publishing(
        folder=publish,
        every_s=every_s,
        keep=3 if keep_exports is None else keep_exports,
        repository=push,
        cache=data_cache(),
    )
    return PublicSide(publishing, page)


_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _seconds(every: str) -> float:
    try:
        found = float(every[:-1]) * _TIME_UNITS[every[-1:].lower()]
    except (ValueError, KeyError):
        found = 0.0
    if not 0.0 < found < math.inf:
        raise typer.BadParameter(f"--every {every!r} is not a time such as 90s, 4m, 9h or 2d")
    return found


class Published(Service):
    """Exports of the checkpoints of a peer on line."""

    name = "publish"

    def __init__(self, publisher: Publisher, ending: Ending) -> None:
        self._publisher = publisher
        self._ending = ending

    async def run(self, averager: Averager) -> None:
        await self._publisher.run(lambda: self._ending.ended_at is not None)


def _published(peer: Peer, *, what: Publishing) -> Published:
    def tell(name: str, fields: Mapping[str, Any]) -> None:
        """A process that publishes the model reports an event."""
        peer.event(name, **fields)

    return Published(Publisher(what, peer.directory, tell), peer.ending)

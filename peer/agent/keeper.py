"""A keeper: a peer without a trainer that follows a run and keeps its state.

With one keeper a run survives when no learner is on line: a peer that returns, or joins, gets the
state from it. It fetches missing states, saves them as an agent does, answers peers that catch up,
and serves as leader and reducer to groups without a reachable peer. It needs no accelerator
and no data, and about as much memory as an agent.

While the machine's owner wants it to rest (``peer.rules.limits``), a keeper is off line and uses
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import msgspec
import numpy as np

from averaging.history.state import FragmentState
from averaging.numbers.arrays import check_subnormals
from averaging.numbers.layout import Layout
from dht.identity import PeerId
from dht.records import unpack_versions
from peer.agent.active_peer import ActivePeer, make_averager
from peer.agent.leaving import send_standing
from peer.agent.local_peer import (
    OBEY_EVERY_S,
    Delegate,
    Fields,
    LocalPeer,
    NotAveraging,
    PhaseName,
    Seat,
)
from peer.agent.online_peer import OnlinePeer, go_online
from peer.agent.services import Service
from peer.errors import ExitCode
from peer.guest.enforcement import Guest
from peer.joining.link import event_of, is_news
from peer.rules.foundings import first_asked, heaviest
from peer.rules.leaving import Departure
from peer.rules.limits import Go, Rest
from peer.status import PeerStatus
from peer.storage.home import peer_folder
from peer.storage.outer_state import OuterState
from peer.storage.progress import begin_without_trainer

DRAIN_S = 10.0
MEET_WITHIN_S = 10.0


async def keep(
    seat: Seat,
    layout: Layout,
    stop: asyncio.Event,
    on_event: Callable[[str, Fields], None] = lambda name, fields: None,
    *,
    until: datetime | None = None,
) -> Departure:
    """Keep a run's state until ``stop`` is set or the machine's owner asks to leave.

    It ends with the run unless ``seat.stays``, and at ``until`` in any case.
    ``on_event(name, fields)`` hears of events for people. Raises ``PeerError`` or ``DhtError``.
    """
    guest = Guest(seat.directory, trains=False)
    try:
        while True:
            await _rest(guest, stop, on_event)
            if until is not None and datetime.now(UTC) >= until:
                return Departure(_kept_until(until), 0, finished=False, timeout_s=0.0)
            if stop.is_set() or guest.must_leave:
                code = ExitCode.INTERRUPTED if stop.is_set() else 0
                return Departure("asked to end", code, finished=False, timeout_s=0.0)
            keeper = Keeper(
                seat,
                layout,
                guest,
                on_event,
                until=until,
            )
            left = await keeper.run(stop)
            if not left.rests:
                return left
    finally:
        guest.save()


def _kept_until(date: datetime) -> str:
    return f"it was to keep the run until {date:%Y-%m-%d %H:%M} UTC"


async def _rest(guest: Guest, stop: asyncio.Event, on_event: Callable[[str, Fields], None]) -> None:
    """Stay off line while the machine's owner wants it."""
    told: str | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(guest.watch_machine(), name="watch machine")
        while isinstance(verdict := guest.look(), Rest) and not (stop.is_set() or guest.must_leave):
            if verdict.reason != told:
                told = verdict.reason
                on_event("paused", {"reason": f"off line: {told}"})
            await asyncio.sleep(OBEY_EVERY_S)
        watching.cancel()
    if told is not None and isinstance(verdict, Go):
        on_event("resumed", {"text": "on line again"})


def behind(own: Sequence[int], told: Iterable[Sequence[int]]) -> int:
    """The largest number of versions by which a fragment is behind what other peers say."""
    gaps = [other - mine for each in told for mine, other in zip(own, each, strict=False)]
    return max([0, *gaps])


def ahead(version: int, told: Iterable[tuple[PeerId, int]], *, turn: int) -> PeerId | None:
    """One of the peers that say they have a newer version, in turn; ``None``: nobody does.

    Not the one that says the most: a single record that overstates its version would be asked for
    ever, and no other peer again.
    """
    newer = sorted(peer for peer, theirs in told if theirs > version)
    return newer[turn % len(newer)] if newer else None


class Keeper(Delegate):
    """One session of a keeper on line in one run."""

    def __init__(
        self,
        seat: Seat,
        layout: Layout,
        guest: Guest,
        on_event: Callable[[str, Fields], None] = lambda name, fields: None,
        *,
        until: datetime | None = None,
    ) -> None:
        with peer_folder(seat.directory):
            self.incarnation = begin_without_trainer(
                seat.directory / "progress", wall_time_s=time.time()
            )
        self.local = LocalPeer(seat, layout, self, guest)
        self._services: Sequence[Service] = ()
        self._on_event = on_event
        self._until = until
        self._link: str | None = None
        self._behind = 0
        self._turn = 0
        """Number of times that others were asked for newer versions."""

    def __repr__(self) -> str:
        return f"Keeper({self.local!r})"

    async def run(self, stop: asyncio.Event) -> Departure:
        """Follow until the run is over or ``stop`` is set. Raises ``PeerError`` or ``DhtError``."""
        local = self.local
        async with AsyncExitStack() as stack:
            stack.callback(local.log.close)
            check_subnormals()
            online = await stack.enter_async_context(go_online(local))
            self._services = online.services
            local.enter_phase("fetching", "looking for the run's state", 0.0)
            local.tell_place_of_state()
            outer = await asyncio.to_thread(local.load_checkpoint)
            if outer is not None:
                online.presence.door.take(outer.directives)
            averager = make_averager(
                online,
                None,
                incarnation=self.incarnation,
                states=() if outer is None else await self._after_rollbacks(outer),
            )
            async with local.watched(
                self._stop_when(stop), local.leave_when_asked(DRAIN_S), self._rest_when_told()
            ) as tasks:
                await local.end.unless_leaving(self._meet(online))
                own = {"follow": self._follow(online)}
                return await ActivePeer(online, averager).run(tasks, own)

    async def _meet(self, online: OnlinePeer) -> None:
        """Wait a little for a peer to fetch from: without one, fetching would fail."""
        deadline = asyncio.get_running_loop().time() + MEET_WITHIN_S
        while asyncio.get_running_loop().time() < deadline:
            online.refresh_view()
            if self.local.view:
                # Of a run that was founded twice, all of one founding's states.
                asked = first_asked(online.followers(), np.random.default_rng())
                self.local.follow(heaviest(await online.statuses(asked)))
                return
            await asyncio.sleep(0.1)

    async def _after_rollbacks(self, outer: OuterState) -> Sequence[FragmentState]:
        """The saved states, or those that the run's owner has taken the run back to."""
        if not self.local.was_taken_back(outer):
            return outer.states
        roots = await asyncio.to_thread(self.local.roots)
        return [root for root in roots if root is not None]

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leave("asked to end", ExitCode.INTERRUPTED)

    def _leave(self, reason: str, exit_code: int = 0, *, rests: bool = False) -> None:
        self.local.end.hear(
            Departure(reason, exit_code, finished=False, timeout_s=DRAIN_S, rests=rests)
        )

    async def _rest_when_told(self) -> None:
        """Go off line when the machine's owner wants it, or when the time of the keeper is up."""
        local = self.local
        while local.ending.departure is None:
            verdict = local.guest.look()
            if self._until is not None and datetime.now(UTC) >= self._until:
                self._leave(_kept_until(self._until))
            elif isinstance(verdict, Rest):
                local.log.write("paused", {"reason": verdict.reason})
                self._leave(verdict.reason, rests=True)
            await asyncio.sleep(OBEY_EVERY_S)

    async def _follow(self, online: OnlinePeer) -> None:
        """Update the view of the other peers and this peer's own record once a second."""
        local = self.local
        while True:
            online.refresh_view()
            if local.phase == "fetching" and local.versions():
                local.enter_phase("ready", "keeping the run's state", 1.0)
            online.update_record(trains=False, step_time_s=None, merged=0.0)
            self._ask_those_ahead(online)
            link = online.link()
            if link and is_news(link, self._link):
                self._link = link
                told = event_of(link, local.run_file)
                self._on_event("link", told)
                if told["limit"] is not None:
                    self._on_event("link_limited", {"text": told["limit"]})
            await asyncio.sleep(1.0)

    def _ask_those_ahead(self, online: OnlinePeer) -> None:
        """Compare each fragment with a peer that says it is ahead: it answers with what it has.

        A keeper is in no group, and hears of a new version by the records of others alone.
        """
        local = self.local
        if isinstance(local.averaging, NotAveraging):
            return
        told = {m.peer: unpack_versions(m.record.versions) for m in online.live_members()}
        known = {p: each for p, each in told.items() if local.averaging.is_established(p)} or told
        self._turn += 1
        for state in local.states:
            if state is None:
                continue
            index = state.fragment
            versions = ((p, each[index]) for p, each in known.items() if index < len(each))
            if (peer := ahead(state.version, versions, turn=self._turn)) is not None:
                send_standing(local.averaging, peer, state)
        self._behind = behind(local.versions(), known.values())

    # --- the delegate's part --------------------------------------------------------------------

    def with_training(self, status: PeerStatus) -> PeerStatus:
        return msgspec.structs.replace(status, staleness=self._behind)

    def on_event(self, name: str, fields: Fields) -> None:
        for service in self._services:
            service.note(name, fields)
        self._on_event(name, fields)

    def on_phase(self, name: PhaseName, text: str, done: float) -> None:
        self._on_event("phase", {"name": name, "text": text, "done": done})

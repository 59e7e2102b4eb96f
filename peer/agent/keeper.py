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
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import numpy as np

from averaging.live.averager import Averager
from averaging.numbers.layout import Layout
from dht.identity import PeerId
from dht.records import unpack_versions
from peer.agent.leaving import send_standing
from peer.agent.life import live
from peer.agent.peer import OBEY_EVERY_S, Peer
from peer.agent.services import Fields, FirstStates, Role, Seat
from peer.errors import ExitCode
from peer.guest.enforcement import Guest
from peer.rules.leaving import Departure
from peer.rules.others import agree, first_asked, heaviest
from peer.status import PeerStatus
from peer.storage.home import peer_folder
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
    reason_told: str | None = None
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(guest.watch_machine(), name="watch machine")
        while (reason := guest.look()) is not None and not (stop.is_set() or guest.must_leave):
            if reason != reason_told:
                reason_told = reason
                on_event("paused", {"reason": f"off line: {reason_told}"})
            await asyncio.sleep(OBEY_EVERY_S)
        watching.cancel()
    if reason_told is not None and reason is None:
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


class Keeper(Role):
    """The role of a peer that keeps one run, for one session on line."""

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
        self.peer = Peer(seat, layout, guest, self)
        self._on_event = on_event
        self._until = until
        self._behind = 0
        self._turn = 0
        """Number of times that others were asked for newer versions."""

    def __repr__(self) -> str:
        return f"Keeper({self.peer!r})"

    async def run(self, stop: asyncio.Event) -> Departure:
        """Follow until the run is over or ``stop`` is set. Raises ``PeerError`` or ``DhtError``."""
        return await live(
            self.peer,
            self._stop_when(stop),
            self.peer.leave_when_asked(DRAIN_S),
            self._rest_when_told(),
        )

    async def first_states(self) -> FirstStates:
        """The saved states, or those that the run's owner has taken the run back to.

        It waits a little for a peer to fetch from: without one, fetching would fail.
        """
        peer = self.peer
        peer.enter_phase("fetching", "looking for the run's state", 0.0)
        outer = await asyncio.to_thread(peer.load_checkpoint)
        if outer is not None:
            peer.network.presence.door.take(outer.directives)
        await self._meet()
        if outer is None:
            return FirstStates()
        if not peer.owner.takes_back_checkpoint(outer):
            return FirstStates(outer.states)
        roots = await asyncio.to_thread(peer.owner.roots)
        return FirstStates(tuple(root for root in roots if root is not None))

    async def _meet(self) -> None:
        peer, loop = self.peer, asyncio.get_running_loop()
        deadline = loop.time() + MEET_WITHIN_S
        while loop.time() < deadline:
            peer.refresh_view()
            if peer.view:
                # Of a run that was founded twice, all of one founding's states.
                asked = first_asked(peer.network.followers(), np.random.default_rng())
                enough = partial(agree, asked=len(asked))
                peer.network.follow(heaviest(await peer.network.statuses(asked, enough=enough)))
                return
            await asyncio.sleep(0.1)

    def work(
        self, averager: Averager, first: FirstStates
    ) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"follow": self._follow(averager)}

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leave("asked to end", ExitCode.INTERRUPTED)

    def _leave(self, reason: str, exit_code: int = 0, *, rests: bool = False) -> None:
        self.peer.end.hear(
            Departure(reason, exit_code, finished=False, timeout_s=DRAIN_S, rests=rests)
        )

    async def _rest_when_told(self) -> None:
        """Go off line when the machine's owner wants it, or when the time of the keeper is up."""
        peer = self.peer
        while peer.ending.departure is None:
            reason = peer.guest.look()
            if self._until is not None and datetime.now(UTC) >= self._until:
                self._leave(_kept_until(self._until))
            elif reason is not None:
                peer.log.write("paused", {"reason": reason})
                self._leave(reason, rests=True)
            await asyncio.sleep(OBEY_EVERY_S)

    async def _follow(self, averager: Averager) -> None:
        """Update the view of the other peers and this peer's own record once a second."""
        peer = self.peer
        while True:
            peer.refresh_view()
            if peer.phase == "fetching" and peer.versions():
                peer.enter_phase("ready", "keeping the run's state", 1.0)
            peer.update_record(trains=False, step_time_s=None, merged=0.0)
            self._ask_those_ahead(averager)
            peer.tell_link()
            await asyncio.sleep(1.0)

    def _ask_those_ahead(self, averager: Averager) -> None:
        """Compare each fragment with a peer that says it is ahead: it answers with what it has.

        A keeper is in no group, and hears of a new version by the records of others alone.
        """
        live = self.peer.network.live_members()
        versions_of = {member.peer: unpack_versions(member.record.versions) for member in live}
        known = {
            p: each for p, each in versions_of.items() if averager.is_established(p)
        } or versions_of
        self._turn += 1
        for state in averager.states:
            if state is None:
                continue
            index = state.fragment
            versions = ((p, each[index]) for p, each in known.items() if index < len(each))
            if (peer := ahead(state.version, versions, turn=self._turn)) is not None:
                send_standing(averager, peer, state)
        self._behind = behind(self.peer.versions(), known.values())

    def with_training(self, status: PeerStatus) -> PeerStatus:
        return msgspec.structs.replace(status, staleness=self._behind)

    def note(self, name: str, fields: Fields) -> None:
        self._on_event(name, fields)

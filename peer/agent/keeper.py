"""A keeper: a peer without a trainer that follows a run and keeps its state.

With one keeper a run survives when no learner is on line: whoever comes back, or comes new, gets
the state from it. It fetches what it misses, saves it as an agent does, answers those who catch up,
and lends itself as leader and reducer to groups in which nobody can be dialled. It needs no
accelerator and no data, and about as much memory as an agent.

While its machine's owner wants it to rest (``peer.rules.limits``), a keeper is off line and uses
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.settings import Participant, RunTerms, Surroundings
from averaging.numbers.arrays import check_subnormals
from averaging.numbers.layout import Layout
from dht.throttled_host import ThrottledHost
from peer.agent.policies import averager_settings, round_policy
from peer.agent.station import (
    OBEY_EVERY_S,
    Fields,
    Owner,
    PhaseName,
    Station,
    StationSettings,
)
from peer.errors import INTERRUPTED
from peer.guest.enforcement import Guest
from peer.rules.ending import Ending
from peer.rules.limits import Go, Rest
from peer.storage.outer_state import load_outer

DRAIN_S = 10.0
MEET_WITHIN_S = 10.0


async def keep(
    settings: StationSettings,
    layout: Layout,
    stop: asyncio.Event,
    on_event: Callable[[str, Fields], None] = lambda name, fields: None,
) -> Ending:
    """Keep a run's state until it is over, ``stop`` is set, or the machine's owner wants no more.

    ``on_event(name, fields)`` hears what a person may want to. Raises ``PeerError`` or
    ``DhtError``.
    """
    guest = Guest(settings.directory, trains=False)
    try:
        while True:
            await _rest(guest, stop, on_event)
            if stop.is_set() or guest.must_leave:
                code = INTERRUPTED if stop.is_set() else 0
                return Ending("asked to end", code, finished=False, timeout_s=0.0)
            keeper = Keeper(settings, layout, guest, on_event)
            ending = await keeper.run(stop)
            if not keeper.rests:
                return ending
    finally:
        guest.save()


async def _rest(guest: Guest, stop: asyncio.Event, on_event: Callable[[str, Fields], None]) -> None:
    """Stay off line while the owner wants it."""
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


class Keeper(Owner):
    """One life of a keeper on line in one run."""

    def __init__(
        self,
        settings: StationSettings,
        layout: Layout,
        guest: Guest,
        on_event: Callable[[str, Fields], None] = lambda name, fields: None,
    ) -> None:
        self.station = Station(settings, layout, self, guest)
        self.rests = False
        """It went off line because it is to rest, and comes back."""
        self._on_event = on_event
        self._link = ""

    def __repr__(self) -> str:
        return f"Keeper({self.station!r})"

    async def run(self, stop: asyncio.Event) -> Ending:
        """Until the run is over or ``stop`` is set. Raises ``PeerError`` or ``DhtError``."""
        station = self.station
        async with AsyncExitStack() as stack:
            stack.callback(station.log.close)
            check_subnormals()
            await station.open(stack)
            station.tell_phase("fetching", "looking for the run's state", 0.0)
            averager = self._averager_with(await asyncio.to_thread(self._saved_states))
            async with asyncio.TaskGroup() as tasks:
                wishes = [
                    tasks.create_task(self._stop_when(stop), name="stop"),
                    tasks.create_task(station.leave_when_asked(DRAIN_S), name="leave"),
                    tasks.create_task(self._rest_when_told(), name="rest"),
                ]
                try:
                    await station.unless_ending(self._meet())
                    own = {
                        "follow": self._follow(),
                        "watch machine": station.guest.watch_machine(),
                    }
                    return await station.take_part(averager, tasks, own)
                finally:
                    for wish in wishes:
                        wish.cancel()

    async def _meet(self) -> None:
        """Wait a little for somebody to ask; asking nobody would only be told as a failure."""
        deadline = asyncio.get_running_loop().time() + MEET_WITHIN_S
        while asyncio.get_running_loop().time() < deadline:
            self.station.refresh_view()
            if self.station.view:
                return
            await asyncio.sleep(0.1)

    def _saved_states(self) -> tuple[FragmentState, ...]:
        station = self.station
        outer = load_outer(station.folder, run_id=station.run_id, layout_hash=station.layout.hash)
        return () if outer is None else outer.states

    def _averager_with(self, states: tuple[FragmentState, ...]) -> Averager:
        station = self.station
        return Averager(
            ThrottledHost(station.host, up=station.guest.up, down=station.guest.down),
            None,
            me=Participant(
                identity=station.settings.identity,
                incarnation=time.time_ns(),
                reachable=station.presence.reachable is True,
            ),
            terms=RunTerms(
                station.run_id,
                station.layout,
                round_policy(station.run_file, fragments=len(station.layout.fragments)),
            ),
            around=Surroundings(
                view=station.view,
                addresses=station.addresses_of,
                line_max=station.guest.line_max,
                on_event=station.averager_event,
            ),
            states=states,
            settings=averager_settings(station.run_file, station.layout),
        )

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.station.end("asked to end", INTERRUPTED, finished=False, timeout_s=DRAIN_S)

    async def _rest_when_told(self) -> None:
        """Go off line once the owner of this machine wants it."""
        station = self.station
        while not station.ending.done():
            verdict = station.guest.look()
            if isinstance(verdict, Rest):
                self.rests = True
                station.log.write("paused", {"reason": verdict.reason})
                station.end(verdict.reason, 0, finished=False, timeout_s=DRAIN_S)
            await asyncio.sleep(OBEY_EVERY_S)

    async def _follow(self) -> None:
        """Once a second: see who is there, and say how far this keeper is."""
        station = self.station
        while True:
            station.refresh_view()
            if station.phase == "fetching" and station.versions():
                station.tell_phase("ready", "keeping the run's state", 1.0)
            station.update_record(trains=False, step_time_s=None, merged=0.0)
            link = str(station.link())
            # Before it has an address of its own, it is no help in the link to it.
            if station.presence.addresses and link != self._link:
                self._link = link
                self._on_event("link", {"link": link})
            await asyncio.sleep(1.0)

    # --- what the station tells -----------------------------------------------------------------

    def told(self, name: str, fields: Fields) -> None:
        self._on_event(name, fields)

    def told_phase(self, name: PhaseName, text: str, done: float) -> None:
        self._on_event("phase", {"name": name, "text": text, "done": done})

"""Membership of a simulated swarm: views of the live peers that are late, and that differ.

A table per peer would need memory quadratic in the number of peers. Instead there are a few
observers, whose heartbeats come at different moments, and every peer uses the table of one of them.
Each side of a partition has observers of its own, which start from the tables before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from averaging.round.opinions.neighbourhood import median
from averaging.rules.grouping import Names
from averaging.rules.peer_view import SILENCE_MAX_S, PeerView
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap

HEARTBEAT_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The facts about a peer that its heartbeat announces."""

    name: PeerId
    step_time_s: float
    site: str | None = None
    bytes_per_s: float | None = None

    def view(self, *, first_seen: float, heard_at: float) -> PeerView:
        return PeerView(
            first_seen=first_seen,
            heard_at=heard_at,
            step_time_s=self.step_time_s,
            site=self.site,
            bytes_per_s=self.bytes_per_s,
        )


class Table(dict[PeerId, PeerView]):
    """One observer's table. As a ``Crowd`` it computes totals once per change, for all readers."""

    def __init__(self, views: Mapping[PeerId, PeerView] | None = None) -> None:
        super().__init__(views or {})
        self._until = -math.inf
        self._trainers = Names(())
        self._sites: dict[PeerId, str] = {}
        self._median_s = 0.0

    def changed(self) -> None:
        self._until = -math.inf

    def trainers(self, now: float) -> Names:
        self._look(now)
        return self._trainers

    def median_step_s(self, now: float) -> float:
        self._look(now)
        return self._median_s

    def sites(self, now: float) -> Mapping[PeerId, str]:
        self._look(now)
        return self._sites

    def _look(self, now: float) -> None:
        """Recompute the totals, unless they still hold: until the first live peer would expire."""
        if now <= self._until:
            return
        live = {peer: seen for peer, seen in self.items() if seen.trains and seen.is_live(now)}
        self._trainers = _one_for_all(Names(live))
        self._sites = {peer: seen.site for peer, seen in live.items() if seen.site is not None}
        self._median_s = median([seen.step_time_s for seen in live.values() if seen.step_time_s])
        heard_at = min((seen.heard_at for seen in live.values()), default=math.inf)
        self._until = heard_at + SILENCE_MAX_S


@lru_cache(maxsize=64)
def _one_for_all(names: Names) -> Names:
    """One shared object for equal names, so that tables compare quickly."""
    return names


class Membership:
    """The observers' tables. ``present(side)`` returns the peers that can be heard on a side."""

    def __init__(
        self,
        heap: EventHeap,
        observers: int,
        present: Callable[[int], Iterable[Seen]],
    ) -> None:
        self._heap = heap
        self._observers = observers
        self._present = present
        self._tables: dict[int, list[Table]] = {0: [Table() for _ in range(observers)]}
        for observer in range(observers):
            heap.call_in(HEARTBEAT_S * observer / observers, self._heartbeat, observer)

    def view(self, number: int, side: int = 0) -> Table:
        """The table of peer ``number``'s observer, which is kept up to date."""
        return self._tables[side][number % self._observers]

    def founded(self, peers: Iterable[Seen]) -> None:
        """Enter the founders, as members of long standing."""
        for table in self._tables[0]:
            for seen in peers:
                table[seen.name] = seen.view(first_seen=-1e6, heard_at=self._heap.now)
            table.changed()

    def part(self) -> None:
        """Give side 1 of a partition tables of its own. Side 0 has all remaining peers."""
        if 1 not in self._tables:
            self._tables[1] = [Table(table) for table in self._tables[0]]

    def heal(self) -> None:
        """Put all peers on side 0 again; the others reappear with their next heartbeat."""
        self._tables = {0: self._tables[0]}

    def left(self, peer: PeerId) -> None:
        """Drop a peer that said goodbye."""
        for tables in self._tables.values():
            for table in tables:
                if table.pop(peer, None) is not None:
                    table.changed()

    def _heartbeat(self, observer: int) -> None:
        now = self._heap.now
        for side, tables in self._tables.items():
            table = tables[observer]
            heard: dict[tuple[PeerView, float | None], PeerView] = {}
            """New views by former view and line: many peers have equal views and share one."""
            for seen in self._present(side):
                known = table.get(seen.name)
                if known is None:
                    table[seen.name] = seen.view(first_seen=now, heard_at=now)
                else:
                    key = known, seen.bytes_per_s
                    if key not in heard:
                        heard[key] = msgspec.structs.replace(
                            known, heard_at=now, bytes_per_s=seen.bytes_per_s
                        )
                    table[seen.name] = heard[key]
            gone = [name for name, view in table.items() if now - view.heard_at > 2 * SILENCE_MAX_S]
            for name in gone:
                del table[name]
            table.changed()
        self._heap.call_in(HEARTBEAT_S, self._heartbeat, observer)

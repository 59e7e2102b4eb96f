"""Who sees whom in a simulated swarm, as membership would have it: late, and not all alike.

A table for each peer would cost the square of the peers. Instead there are a few observers, each
with a heartbeat of its own phase, and every peer sees what its observer saw; the two sides of a
partition have observers of their own, who start from what was known before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from averaging.round.neighbourhood import median
from averaging.rules.grouping import SILENCE_MAX_S, Names, PeerView
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap

HEARTBEAT_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a peer tells of itself with its heartbeat."""

    name: PeerId
    step_time_s: float
    reachable: bool = True
    site: str | None = None


class Table(dict[PeerId, PeerView]):
    """One observer's. A ``Crowd``: it is looked at as a whole when it changes, not by everybody."""

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
        """Until the first of those who are live now would not be."""
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
    """Tables that see the same peers have one object for them, told apart at a glance."""
    return names


class Membership:
    """The observers' tables. ``present(side)`` are the peers that can be heard there now."""

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
        """The table that peer ``number`` sees, kept up to date."""
        return self._tables[side][number % self._observers]

    def founded(self, peers: Iterable[Seen]) -> None:
        """These have known each other for long."""
        for table in self._tables[0]:
            for seen in peers:
                table[seen.name] = PeerView(
                    first_seen=-1e6,
                    heard_at=self._heap.now,
                    step_time_s=seen.step_time_s,
                    site=seen.site,
                )
            table.changed()

    def part(self, sides: Iterable[int]) -> None:
        """A partition into sides, of which 0 is the rest."""
        for side in sides:
            if side not in self._tables:
                self._tables[side] = [Table(table) for table in self._tables[0]]

    def heal(self) -> None:
        """Everybody is on side 0 again; the others are heard with their next heartbeat."""
        self._tables = {0: self._tables[0]}

    def _heartbeat(self, observer: int) -> None:
        now = self._heap.now
        for side, tables in self._tables.items():
            table = tables[observer]
            heard: dict[PeerView, PeerView] = {}
            """By what was known before, of many the same: they have one object."""
            for seen in self._present(side):
                known = table.get(seen.name)
                if known is None:
                    table[seen.name] = PeerView(
                        first_seen=now,
                        heard_at=now,
                        reachable=seen.reachable,
                        step_time_s=seen.step_time_s,
                        site=seen.site,
                    )
                else:
                    if known not in heard:
                        heard[known] = replace(known, heard_at=now)
                    table[seen.name] = heard[known]
            gone = [name for name, view in table.items() if now - view.heard_at > 2 * SILENCE_MAX_S]
            for name in gone:
                del table[name]
            table.changed()
        self._heap.call_in(HEARTBEAT_S, self._heartbeat, observer)

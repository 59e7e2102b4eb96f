"""Fair shares of what one peer has for others: bytes of memory, and places to be served.

Limits are for all peers together first, then for each. When all places are taken, a new peer takes
that of a slow one, so a few strangers that hold places without using them keep nobody out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dht.identity import PeerId


class ByteBudget:
    """Memory for bytes that other peers send: a limit for all, of which one peer has half."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes}; it is 0 or more")
        self.limit_bytes = limit_bytes
        self._held: Counter[PeerId] = Counter()

    def __repr__(self) -> str:
        return f"ByteBudget({self.held_bytes} of {self.limit_bytes} bytes)"

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def take(self, peer: PeerId, size: int) -> bool:
        """Charge a peer with bytes, if there is room."""
        if (
            self.held_bytes + size > self.limit_bytes
            or self._held[peer] + size > self.limit_bytes // 2
        ):
            return False
        self._held[peer] += size
        return True

    def give_back(self, peer: PeerId, size: int) -> None:
        self._held[peer] -= size
        assert self._held[peer] >= 0, "more is given back than was taken"
        if not self._held[peer]:
            del self._held[peer]


@dataclass(eq=False, slots=True)
class Place:
    """One peer being served."""

    peer: PeerId
    since: float
    end: Callable[[], None]
    """Called when another peer takes the place."""

    served_bytes: int = 0

    def bytes_per_s(self, now: float) -> float:
        return self.served_bytes / max(now - self.since, 1e-9)


@dataclass(slots=True)
class Places:
    """The peers being served at once: limited in all and for each."""

    places_max: int
    per_peer_max: int
    grace_s: float
    """A peer that has been served for less than this keeps its place."""

    slow_bytes_s: float
    """A peer that is served faster than this keeps its place."""

    prefers: Callable[[PeerId], bool] = lambda peer: False
    """Peers that take the place of any other, and whose places no others take."""

    _taken: list[Place] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer: PeerId, *, now: float, end: Callable[[], None]) -> Place | None:
        """Take a place, if need be that of a slower peer; ``None``: there is none."""
        if sum(place.peer == peer for place in self._taken) >= self.per_peer_max:
            return None
        if len(self._taken) >= self.places_max:
            loser = self._slowest(now, preferred=self.prefers(peer))
            if loser is None:
                return None
            self.leave(loser)
            loser.end()
        place = Place(peer, now, end)
        self._taken.append(place)
        return place

    def leave(self, place: Place) -> None:
        """Give a place up; one that was lost already is ignored."""
        if place in self._taken:
            self._taken.remove(place)

    def _slowest(self, now: float, *, preferred: bool) -> Place | None:
        able = [
            place
            for place in self._taken
            if not self.prefers(place.peer)
            and (
                preferred
                or (
                    now - place.since >= self.grace_s and place.bytes_per_s(now) < self.slow_bytes_s
                )
            )
        ]
        return min(able, key=lambda place: place.bytes_per_s(now), default=None)

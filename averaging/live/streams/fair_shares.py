"""Fair shares of what one peer has for others: bytes of memory, and places to be served.

Limits are for all peers together first, then for each. When all places are taken, a new peer takes
one of the peer that has the most, so nobody keeps others out by holding several; that of a slow
one or one that asks nothing, so neither do a few that hold places without using them; or that of
one that had its share, so neither do strangers that use them without end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dht.identity import PeerId
from dht.limits import Place, Places, Rate

SERVED_LATELY_S = 5.0
"""Time since a peer was sent something in which others still give way to it."""


class ByteBudget:
    """Memory for bytes that other peers send: a limit for all, of which one peer has half."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: Counter[PeerId] = Counter()

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
class ServedPlace(Place[PeerId]):
    """One peer being served."""

    since: float = 0.0
    served_bytes: int = 0
    served_at: float = -math.inf
    idle_since: float = math.inf
    """Time since which the peer has asked nothing; infinite while it is being answered."""

    def bytes_per_s(self, now: float) -> float:
        return self.served_bytes / max(now - self.since, 1e-9)


class ServedPlaces(Places[ServedPlace]):
    """The peers being served at once, of which slow ones and those that had much make room."""

    def __init__(
        self,
        in_all: int,
        of_each: int,
        *,
        grace_s: float,
        slow_bytes_s: float,
        shares: Rate[PeerId] | None = None,
        preferred: Callable[[PeerId], bool] = lambda peer: False,
        idle_max_s: float = math.inf,
        on_idle: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        """A peer that has been served for less than ``grace_s``, or faster than ``slow_bytes_s``,
        keeps its place. ``shares``: bytes that each is sent before others go first, if they are
        limited. ``preferred`` peers take the place of any other, and no others take theirs. One
        that asks nothing for longer than ``idle_max_s`` loses its place to one that comes;
        ``on_idle`` hears of it if it has several.
        """
        super().__init__(in_all, of_each)
        self.preferred = preferred
        self._grace_s = grace_s
        self._slow_bytes_s = slow_bytes_s
        self._shares = shares
        self._idle_max_s = idle_max_s
        self._on_idle = on_idle

    def admit(self, peer: PeerId, *, now: float, end: Callable[[], None]) -> ServedPlace | None:
        """A place, if need be that of a slower peer; ``None``: there is none."""
        place = ServedPlace(peer, end, now)
        return place if self.take(place) else None

    def served(self, place: ServedPlace, size: int, now: float) -> None:
        """Note that a peer was sent bytes."""
        place.served_bytes += size
        place.served_at = now
        if self._shares is not None:
            self._shares.spend(place.author, now, size)

    def had_its_share(self, peer: PeerId, now: float) -> bool:
        return self._shares is not None and self._shares.left(peer, now) < 0.0

    def goes_before(self, peer: PeerId, other: PeerId, now: float) -> bool:
        """Say whether a peer is served before another one that had its share."""
        return (
            self.had_its_share(other, now)
            and not self.had_its_share(peer, now)
            and (self.preferred(peer) or not self.preferred(other))
        )

    def gives_way(self, place: ServedPlace, now: float) -> bool:
        """Say whether another peer that goes before this one is being served just now."""
        return any(
            now - max(other.since, other.served_at) < SERVED_LATELY_S
            and self.goes_before(other.author, place.author, now)
            for other in self
            if other.author != place.author
        )

    def loser(self, new: ServedPlace) -> ServedPlace | None:
        """The place that makes room: the one idle for longest, one of the peer that has the most,
        that of the slowest one, or of one that had its share."""
        now = new.since
        longest_idle = min(self, key=lambda place: place.idle_since)
        if now - longest_idle.idle_since > self._idle_max_s:
            if self.held(longest_idle.author) > 1:
                self._on_idle(longest_idle.author)
            return longest_idle
        if (of_most := super().loser(new)) is not None:
            return of_most
        able = [place for place in self if self._loses_to(place, new.author, now)]
        return min(able, key=lambda place: place.bytes_per_s(now), default=None)

    def _loses_to(self, place: ServedPlace, peer: PeerId, now: float) -> bool:
        if self.goes_before(peer, place.author, now):
            return True
        if self.preferred(place.author) or self.goes_before(place.author, peer, now):
            return False
        return self.preferred(peer) or self._is_slow(place, now)

    def _is_slow(self, place: ServedPlace, now: float) -> bool:
        held_s = now - place.since
        return held_s >= self._grace_s and place.bytes_per_s(now) < self._slow_bytes_s

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
from dataclasses import dataclass, field

from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

SHARES_MAX = 4096
"""Peers whose use is remembered; the one that has used the least is forgotten first."""

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


@dataclass(slots=True)
class Shares:
    """Bytes that each peer was sent: those over its share give way to others for a while."""

    share_bytes: float = math.inf
    """Bytes that a peer is sent before others go first."""

    regained_s: float = 600.0
    """Time in which a peer regains its whole share."""

    _used: BoundedMapping[PeerId, tuple[float, float]] = field(init=False)
    """Bytes used, and the time at which they were counted."""

    def __post_init__(self) -> None:
        self._used = BoundedMapping(
            "shares of bytes",
            SHARES_MAX,
            # The time at which the peer has its whole share again.
            worth=lambda _, used: used[1] + used[0] / self.share_bytes * self.regained_s,
        )

    def use(self, peer: PeerId, size: int, now: float) -> None:
        used = self._left_of(peer, now) + size
        # At most a second share of debt: a peer is served first again after twice the time.
        self._used[peer] = min(used, 2 * self.share_bytes), now

    def is_used_up(self, peer: PeerId, now: float) -> bool:
        return self._left_of(peer, now) > self.share_bytes

    def _left_of(self, peer: PeerId, now: float) -> float:
        """Bytes that a peer has used and not regained."""
        used, counted_at = self._used.get(peer, (0.0, now))
        if math.isinf(self.share_bytes):
            return 0.0
        return max(0.0, used - (now - counted_at) * self.share_bytes / self.regained_s)


@dataclass(eq=False, slots=True)
class Place:
    """One peer being served."""

    peer: PeerId
    since: float
    end: Callable[[], None]
    """Called when another peer takes the place."""

    served_bytes: int = 0
    served_at: float = -math.inf
    idle_since: float = math.inf
    """Time since which the peer has asked nothing; infinite while it is being answered."""

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

    shares: Shares = field(default_factory=Shares)
    idle_max_s: float = math.inf
    """A peer that asks nothing for longer loses its place to one that comes."""

    on_idle: Callable[[PeerId], None] = lambda peer: None
    """Called with a peer that has lost one of several places for that."""
    _taken: list[Place] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer: PeerId, *, now: float, end: Callable[[], None]) -> Place | None:
        """Take a place, if need be that of a slower peer; ``None``: there is none."""
        if sum(place.peer == peer for place in self._taken) >= self.per_peer_max:
            return None
        if len(self._taken) >= self.places_max:
            loser = self._loser(peer, now)
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

    def served(self, place: Place, size: int, now: float) -> None:
        """Note that a peer was sent bytes."""
        place.served_bytes += size
        place.served_at = now
        self.shares.use(place.peer, size, now)

    def goes_before(self, peer: PeerId, other: PeerId, now: float) -> bool:
        """Say whether a peer is served before another one that had its share."""
        return (
            self.shares.is_used_up(other, now)
            and not self.shares.is_used_up(peer, now)
            and (self.prefers(peer) or not self.prefers(other))
        )

    def gives_way(self, place: Place, now: float) -> bool:
        """Say whether another peer that goes before this one is being served just now."""
        return any(
            now - max(other.since, other.served_at) < SERVED_LATELY_S
            and self.goes_before(other.peer, place.peer, now)
            for other in self._taken
            if other.peer != place.peer
        )

    def _loser(self, peer: PeerId, now: float) -> Place | None:
        """The place that this peer may take: the one idle for longest, one of the peer that has the
        most, that of the slowest one, or of one that had its share."""
        held = Counter(place.peer for place in self._taken)
        longest_idle = min(self._taken, key=lambda place: place.idle_since)
        if now - longest_idle.idle_since > self.idle_max_s:
            if held[longest_idle.peer] > 1:
                self.on_idle(longest_idle.peer)
            return longest_idle
        holder, most = held.most_common(1)[0]
        if most > held[peer] + 1:
            return next(place for place in self._taken if place.peer == holder)
        able = [place for place in self._taken if self._loses_to(place, peer, now)]
        return min(able, key=lambda place: place.bytes_per_s(now), default=None)

    def _loses_to(self, place: Place, peer: PeerId, now: float) -> bool:
        if self.goes_before(peer, place.peer, now):
            return True
        if self.prefers(place.peer) or self.goes_before(place.peer, peer, now):
            return False
        return self.prefers(peer) or self._is_slow(place, now)

    def _is_slow(self, place: Place, now: float) -> bool:
        held_s = now - place.since
        return held_s >= self.grace_s and place.bytes_per_s(now) < self.slow_bytes_s

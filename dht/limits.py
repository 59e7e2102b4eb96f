"""Limits of what others may have of this peer: how often, and how much at once. Pure.

``Rate`` limits each author over time, ``Places`` limit each and all of them at any moment. What may
wait waits in a ``FairQueue``. So whoever uses much, under however many keys, gets in the way of
himself first. All are bounded in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from dht.bounded_mapping import BoundedMapping

Author = TypeVar("Author", bound=Hashable)
T = TypeVar("T")

AUTHORS_MAX = 4096


class Rate(Generic[Author]):
    """Tokens of each author, which come back with time: calls, or bytes."""

    def __init__(
        self, per_s: float, burst: float, *, debt: float = 0.0, authors_max: int = AUTHORS_MAX
    ) -> None:
        """``burst``: tokens of an author that has used none for a while. ``debt``: how many it may
        owe; without it, what is refused costs nothing."""
        self._per_s = per_s
        self._burst = burst
        self._debt = debt
        self._left = BoundedMapping[Author, tuple[float, float]](
            "rates",
            authors_max,
            # The time at which the author has all of its tokens again.
            worth=lambda _, counted: counted[1] + (burst - counted[0]) / per_s,
        )
        """Tokens, and the time at which they were counted."""

    @classmethod
    def in_a_minute(cls, count: int) -> Rate[Author]:
        """A rate of ``count`` at once, which come back within a minute."""
        return cls(count / 60.0, count)

    def left(self, author: Author, now: float) -> float:
        """Tokens that an author has; negative: it owes them."""
        left, counted_at = self._left.get(author, (self._burst, now))
        return min(self._burst, left + (now - counted_at) * self._per_s)

    def spend(self, author: Author, now: float, tokens: float = 1.0) -> bool:
        """Take tokens of an author. Says whether it had any."""
        left = self.left(author, now)
        may = left >= 1.0
        if may or self._debt:
            self._left[author] = max(left - tokens, -self._debt), now
        return may

    def wait_s(self, author: Author, now: float) -> float:
        """Time until an author owes nothing: less than a token is below a clock's resolution."""
        owed = -self.left(author, now)
        return owed / self._per_s if owed >= 1.0 else 0.0


@dataclass(slots=True, eq=False)
class Place(Generic[Author]):
    """One thing that an author has here."""

    author: Author
    end: Callable[[], object] | None = None
    """Ends it, when another author takes the place; ``None``: nobody can, for now."""


P = TypeVar("P", bound=Place[Any])


class Places(Generic[P]):
    """Places that are had at once: so many in all, and so many by each author.

    When all places are taken, the author with the most makes room, with what it has not used for
    longest. So nobody keeps others out by holding several.
    """

    def __init__(
        self,
        in_all: int,
        of_each: float,
        *,
        prefers: Callable[[Any], object] = lambda author: False,
        newest_first: bool = False,
    ) -> None:
        """``prefers``: authors that make room for one another only, and after all others.
        ``newest_first``: an author with the most makes room for itself as well."""
        self.in_all = in_all
        self.of_each = of_each
        self.prefers = prefers
        self._newest_first = newest_first
        self._taken: dict[P, None] = {}
        """The places that are taken, in the order of their last use."""

        self._held: Counter[Any] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[P]:
        return iter(self._taken)

    def held(self, author: object) -> int:
        """Number of places of one author."""
        return self._held[author]

    def take(self, place: P) -> bool:
        """Take a place, if need be that of another author. Says whether there is one."""
        if self._held[place.author] >= self.of_each:
            return False
        if len(self._taken) >= self.in_all:
            if (loser := self.loser(place)) is None:
                return False
            self.leave(loser)
            assert loser.end is not None
            loser.end()
        self._taken[place] = None
        self._held[place.author] += 1
        return True

    def used(self, place: P) -> None:
        """Note that a place was used just now."""
        if place in self._taken:
            del self._taken[place]
            self._taken[place] = None

    def leave(self, place: P) -> None:
        """Give a place up; one that was lost already is ignored."""
        if place in self._taken:
            del self._taken[place]
            self._held[place.author] -= 1
            if not self._held[place.author]:
                del self._held[place.author]

    def loser(self, new: P) -> P | None:
        """The place that makes room for a new one."""

        def rank(author: Any, more: int = 0) -> tuple[bool, int]:
            return not self.prefers(author), self._held[author] + more

        able = [place for place in self._taken if place.end is not None]
        most = max((place.author for place in able), key=rank, default=None)
        if most is None or (not self._newest_first and rank(most) <= rank(new.author, more=1)):
            return None
        return next(place for place in able if place.author == most)


class FairQueue(Generic[Author, T]):
    """A queue that gives each author as much: calls, or bytes.

    Start-time fair queueing: the author that was served least goes first, and one that comes back
    is treated as if it had been served as much as the one served last.
    """

    def __init__(self) -> None:
        self._waiting: dict[Author, deque[tuple[int, T]]] = {}
        self._order: list[tuple[int, int, Author]] = []
        """How much each author that waits was served, and since when it waits for more."""

        self._level = 0
        """How much the author that was served last had been served before that."""

        self._last: tuple[Author, int] | None = None
        """The author that was served last, and how much it was served since."""

        self._pushed = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, author: Author, item: T, size: int = 1) -> None:
        if author not in self._waiting:
            self._waiting[author] = deque()
            served = 0 if self._last is None or self._last[0] != author else self._last[1]
            self._wait(author, max(self._level, served))
        self._waiting[author].append((size, item))
        self._count += 1

    def _wait(self, author: Author, served: int) -> None:
        self._pushed += 1
        heappush(self._order, (served, self._pushed, author))

    def pop(self) -> tuple[Author, T, int]:
        """The next author, and what it waits for with its size. Raises ``IndexError`` without."""
        self._level, _, author = heappop(self._order)
        size, item = self._waiting[author].popleft()
        self._count -= 1
        served = self._level + size
        self._last = author, served
        if self._waiting[author]:
            self._wait(author, served)
        else:
            del self._waiting[author]
        return author, item, size

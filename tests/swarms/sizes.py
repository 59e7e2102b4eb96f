"""The number of peers of a swarm over time: one schedule for simulated swarms and real processes.

Written as ``2,40,2``: the swarm begins with two peers, grows to 40 and shrinks to two again, in
legs of equal length, one peer after another. ``20,20/40,40`` has a jump from 20 to 40 between two
legs, a flash crowd, and ``40,40/4,4`` loses nine tenths at once. A peer that ends does not come
back; a swarm that grows again gets new ones.

The peers that have been there longest end first, so a swarm that shrinks loses those that founded
it, which have the most work in its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

SIZE_MIN = 2
"""One peer merges with nobody."""


@dataclass(frozen=True, slots=True)
class Change:
    """Peers that start or end at one moment, by number."""

    at_s: float
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """A schedule: peers are numbered in the order in which they start."""

    founders: int
    changes: tuple[Change, ...]
    """Sorted by time."""
    over_s: float

    @property
    def count(self) -> int:
        """Number of peers that are ever there."""
        return self.founders + sum(len(change.starts) for change in self.changes)

    def at(self, time_s: float) -> int:
        """Number of peers that are to be there at a time."""
        done = [change for change in self.changes if change.at_s <= time_s]
        return self.founders + sum(len(each.starts) - len(each.ends) for each in done)


def parse(text: str, *, over_s: float) -> Sizes:
    """Read a schedule. Raises ``ValueError``."""
    if not over_s > 0.0:
        raise ValueError(f"over_s is {over_s:g}; a schedule takes more than 0 s")
    points = [_point(part, text) for part in text.split(",")]
    if len(points) < 2:
        raise ValueError(f"sizes {text!r} has one point; at least two are needed, as in 2,40,2")
    leg_s = over_s / (len(points) - 1)
    there = list(range(points[0][0]))
    begun = len(there)
    changes: list[Change] = []

    def change(at_s: float, size: int) -> None:
        nonlocal begun
        starts = tuple(range(begun, begun + max(0, size - len(there))))
        begun += len(starts)
        ends = tuple(there[: max(0, len(there) - size)])
        there[:] = [*there[len(ends) :], *starts]
        if starts or ends:
            changes.append(Change(at_s, starts, ends))

    change(0.0, points[0][-1])
    for leg, ((*_, begins), (ends, *_)) in enumerate(pairwise(points)):
        step = 1 if ends > begins else -1
        for number, size in enumerate(range(begins + step, ends + step, step), start=1):
            change(leg_s * (leg + number / abs(ends - begins)), size)
        change(leg_s * (leg + 1), points[leg + 1][-1])
    return Sizes(points[0][0], tuple(changes), over_s)


def _point(part: str, text: str) -> list[int]:
    """The sizes at a point: one, or two with a jump between them."""
    try:
        sizes = [int(size) for size in part.split("/")]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < SIZE_MIN:
        raise ValueError(
            f"sizes {text!r} has {part!r}; a point is a number of peers from {SIZE_MIN} on, or two "
            "with a jump between them, as in 20/40"
        )
    return sizes

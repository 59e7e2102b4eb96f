"""Spot checks: whether a contribution lowers the loss on the data that its author must have used.

Each peer's data order follows from its key, so anybody can read the sequences that an author had in
the steps of a contribution. An honest contribution lowers the loss on the first of them, a reversed
one raises it, and one in any other direction leaves it where it was. That holds for one fragment at
a time, and only on the author's own sequences: the effect on those of others is too small to see.
So a peer draws a contribution now and then, and has the loss measured without it and with it.

What a check shows is one peer's opinion: losses are no proof, and learners differ in hardware and
state. So it counts as strikes, here and nowhere else (``averaging.audit.strikes``). A peer that has
failed is checked again as soon as possible, and one failure has no consequence. After the second
one this peer, as a reducer, refuses its uploads for about ten minutes, as it refuses those that are
too long. A seal leaves out whoever any reducer refuses, so one honest reducer that has found a
poisoner keeps it out of all rounds in which it reduces. No reducer gains power by that: any of them
can refuse anybody in any case.

Not seen: a member that trains honestly and adds poison on top, and one that poisons only while it
is not looked at. Half of what it brings is then honest work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from averaging.audit.strikes import LIMIT, Strikes
from averaging.bounded_mapping import BoundedMapping
from dht.identity import PeerId

FALL_MIN = 0.005
"""Share of the loss by which a contribution has to lower it."""
WEIGHT = LIMIT * 2 / 3
"""Strikes of a failed check: two of them, and the time in which they fade, are a consequence."""
SUSPECTS_MAX = 64


class SpotChecks:
    """The checks of one peer. Times are on its own clock."""

    __slots__ = ("_drawn_at", "_every_steps", "_random", "_strikes", "_suspects")

    def __init__(self, strikes: Strikes, *, every_steps: int, random: Callable[[], float]) -> None:
        """``every_steps``: own steps between two checks. ``random``: a number below 1 that others
        cannot foresee."""
        if every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; it must be 1 or more")
        self._strikes = strikes
        self._every_steps = every_steps
        self._random = random
        self._drawn_at = -math.inf
        self._suspects = BoundedMapping[PeerId, None](SUSPECTS_MAX)
        """The peers that failed their last check, and are not refused."""

    def __repr__(self) -> str:
        return f"SpotChecks(every {self._every_steps} steps, {len(self._suspects)} suspects)"

    def draw(self, contributors: Iterable[PeerId], step: int) -> PeerId | None:
        """Return the author to check of a round with these contributors; ``None``: check nobody.

        ``step``: own steps so far. A suspect is checked at once.
        """
        there = sorted(contributors)
        suspects = [peer for peer in there if peer in self._suspects]
        if suspects:
            return suspects[int(self._random() * len(suspects))]
        if not there or step < self._drawn_at + self._every_steps:
            return None
        self._drawn_at = step
        return there[int(self._random() * len(there))]

    def checked(self, author: PeerId, before: float, after: float, now: float) -> bool:
        """The loss was measured without a contribution and with it. True if it is in order."""
        passed = after <= (1.0 - FALL_MIN) * before
        self._suspects.pop(author, None)
        if not passed:
            self._strikes.add(author, now, WEIGHT)
            if not self._strikes.is_out(author, now):
                self._suspects[author] = None
        return passed

    def refuses(self, author: PeerId, now: float) -> bool:
        """True if this peer, as a reducer, takes no uploads of that one for now."""
        return self._strikes.is_out(author, now)

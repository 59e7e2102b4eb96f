"""Spot checks: whether a contribution lowers the loss on the data that its author must have used.

Each peer's data order follows from its key, so anybody can read the sequences that an author had in
the steps of a contribution. An honest contribution lowers the loss on them, a reversed one raises
it, and one in any other direction leaves it where it was. That holds for one fragment at a time,
and only on the author's own sequences: the effect on those of others is too small to see. So a peer
draws a contribution now and then, and has the loss measured without it and with it.

By how much an honest one lowers the loss depends on the model, the batch and the learning rate: by
17% in one run, by nothing that can be measured during a warm-up from zero. So a contribution fails
if it raises the loss, and otherwise only against what is usual: the median of the falls that this
peer has measured, which is honest while most members are. Where that is too small to be measured in
the precision of training, no contribution fails unless it raises the loss.

What a check shows is one peer's opinion: losses are no proof, and learners differ in hardware and
state. So it counts as strikes, here and nowhere else (``averaging.audit.strikes``). A peer that has
failed is checked again as soon as possible, and one failure has no consequence. After the second
one this peer, as a reducer, refuses its uploads for about ten minutes, as it refuses those that are
too long. A seal leaves out whoever any reducer refuses, so one honest reducer that has found a
poisoner keeps it out of all rounds in which it reduces. No reducer gains power by that: any of them
can refuse anybody in any case.

The checks come after a round and not before its seal: reducers have slices and no fragments, and a
round would wait for trainers. So a check never prevents the harm of the round that it is about.

Not seen: a member that trains honestly and adds poison on top, and one that poisons only while it
is not looked at. Half of what it brings is then honest work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from averaging.audit.strikes import LIMIT, Strikes
from averaging.bounded_mapping import BoundedMapping
from dht.identity import PeerId

CHANGE_MIN = 0.005
"""Share of the loss by which a contribution that raises it fails, and by which one that is to lower
it has to at most."""
FALL_SHARE = 0.1
"""Share of the usual fall of the loss that is enough."""
FALL_MEASURABLE = 0.0005
"""Share of the loss below which a usual fall is lost in the rounding of bf16."""
FALLS_KEPT = 31
FALLS_MIN = 5
"""Falls that must be known before anything is usual."""
WEIGHT = LIMIT * 2 / 3
"""Strikes of a failed check: two of them, and the time in which they fade, are a consequence."""
EVADED = LIMIT / 3
"""Strikes of an author that does not show its upload or its data: it may have been restarted."""
SUSPECTS_MAX = 64
BACK_MAX = 1024
"""Steps before its mark that an author must remember the data of."""

REFUSED = "what it brought did not lower the loss on its own data"
"""The reason to take no upload, as its sender and the round's report are told."""


def steps_between(*, cycle_steps: float, per_cycle: float) -> int:
    """Return the own steps between two checks."""
    return max(1, round(cycle_steps / per_cycle))


class SpotChecks:
    """The checks of one peer. Times are on its own clock."""

    __slots__ = ("_drawn_at", "_every_steps", "_falls", "_random", "_strikes", "_suspects")

    def __init__(self, strikes: Strikes, *, every_steps: int, random: Callable[[], float]) -> None:
        """``every_steps``: own steps between two checks. ``random``: a number below 1 that others
        cannot foresee."""
        if every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; it must be 1 or more")
        self._strikes = strikes
        self._every_steps = every_steps
        self._random = random
        self._drawn_at = -math.inf
        self._falls = deque[float](maxlen=FALLS_KEPT)
        """The last falls of the loss, as shares of it."""
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

    def step_to_read(self, mark: int, steps: int) -> int:
        """Return the step of a contribution whose data is read, drawn now.

        Nobody can know it beforehand: to pass, a contribution must help on all of its steps' data.
        """
        return max(1, mark - int(self._random() * max(1, min(steps, BACK_MAX))))

    def fall_wanted(self) -> float:
        """The share of the loss by which a contribution has to lower it now; negative: by which it
        may raise it."""
        usual = median(self._falls) if len(self._falls) >= FALLS_MIN else 0.0
        if usual < FALL_MEASURABLE:
            return -CHANGE_MIN
        return min(CHANGE_MIN, FALL_SHARE * usual)

    def checked(self, author: PeerId, before: float, after: float, now: float) -> bool:
        """The loss was measured without a contribution and with it. True if it is in order.

        A loss before that is not a number says nothing of the contribution.
        """
        if not math.isfinite(before) or before <= 0.0:
            return True
        fall = (before - after) / before if math.isfinite(after) else -math.inf
        passed = fall >= self.fall_wanted()
        self._falls.append(fall)
        self._suspects.pop(author, None)
        if not passed:
            self._count(author, now, WEIGHT)
        return passed

    def evaded(self, author: PeerId, now: float) -> None:
        """An author has not shown what the check needs, although it answers."""
        self._suspects.pop(author, None)
        self._count(author, now, EVADED)

    def _count(self, author: PeerId, now: float, weight: float) -> None:
        self._strikes.add(author, now, weight)
        if not self._strikes.is_out(author, now):
            self._suspects[author] = None

    def strikes_of(self, author: PeerId, now: float) -> float:
        return self._strikes.count(author, now)

    def refuses(self, author: PeerId, now: float) -> bool:
        """True if this peer, as a reducer, takes no uploads of that one for now."""
        return self._strikes.is_out(author, now)

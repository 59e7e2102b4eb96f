"""The time at which a fragment is due: a number of own steps after the last closing of its roster.

Peers with free-running schedules would almost never meet. Instead, every peer that hears of a
closing counts from it, and a slow peer counts fewer of its steps than a fast one, so all are due at
about the same moment. No clock is compared with another peer's; only own steps are counted.

A peer that takes part in every k-th version (``averaging.rules.line_levels``) sits the others out,
unless so much time has passed that there are no others: where it is needed for a quorum, no roster
closes without it.

**Places in a cycle.** The first due times of a peer's fragments are spread evenly. After that each
of them counts from its own closings, so fragments whose closings came together once would stay
together: those of a peer that waited alone are all overdue when the second peer comes, and so are
all after a time without a quorum. Their rounds would begin in one moment, share the line, or wait
for each other on a slow one, and leave it idle for the rest of the cycle. So each fragment moves
back to its place in a cycle (``Spacing``), which is given by the last closing of fragment 0. It
moves by a share of the distance and of a cycle at a time: peers that hear of a closing at different
moments, or not at all, still meet, as one that is due calls all that have half a cycle of work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

ROUNDS_COUNTED: Final = 8
"""Own rounds by which a peer judges whether it was hurried too often: four peers that leave within
one cycle are all answered at once."""

HURRIED_SHARE: Final = 0.125
"""``called_share`` in the first round of a life. Where a member is about to leave it is that of the
steps of all versions that a peer sits out. It is not one step, and it is ``called_share`` again for
a peer whose last ``ROUNDS_COUNTED`` rounds came faster than that: one that says again and again
that it leaves would have the others exchange without end."""

RETRY_SHARE: Final = 0.25
"""After an attempt that failed a fragment is due again this share of a cycle later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePolicy:
    """The frequency of a fragment's merges."""

    cycle_steps: int = 24
    """H: steps of the median peer between two merges of a fragment, as the run prefers it."""
    fragments: int = 24
    """P: the first due times of the fragments are H/P apart."""
    called_share: float = 0.5
    """A peer that is called joins at once if it has made at least this share of its steps since the
    last round that it was in."""
    scale_by_speed: bool = True
    """Slow peers take fewer steps between two merges. False: all take H (for comparison)."""


class DueTime:
    """The due time of one fragment at one peer, in that peer's own steps."""

    def __init__(self, policy: DuePolicy, *, fragment: int, step: int) -> None:
        """``step`` is the peer's own step at its start; first due times follow from it."""
        self.policy = policy
        self.cycle_steps = policy.cycle_steps
        """H, as the newest roster that closed has set it."""
        self.eager = False
        """If true, any call is answered: it may be the last one."""
        self.every = 1
        """k: takes part in every k-th version."""
        self._last_version: int | None = None
        self._last_step = step
        self._took_part_at: deque[int] = deque(maxlen=ROUNDS_COUNTED)
        """The own steps at which it entered its last rounds."""
        offset = (fragment * policy.cycle_steps) // policy.fragments
        self.due_step = step + max(1, policy.cycle_steps - offset)
        """The own step with which the fragment is to be offered."""

    def interval(self, *, own_s: float | None, median_s: float | None) -> int:
        """Return H_i: own steps in one cycle of the median peer."""
        steps = self.cycle_steps
        if not self.policy.scale_by_speed or not own_s or not median_s:
            return steps
        return max(1, round(steps * median_s / own_s))

    def closed(self, step: int, interval: int) -> None:
        """Count from this step: a roster closed, with or without this peer."""
        self.due_step = step + max(1, interval)

    def attempt_failed(self, step: int, interval: int) -> None:
        """Retry after a share of the interval: this peer's attempt ended without a version."""
        self.due_step = max(step + 1, step + round(interval * RETRY_SHARE))

    def took_part(self, version: int, step: int) -> None:
        """Note that this peer is in the roster of this version."""
        self._last_version, self._last_step = version, step
        self._took_part_at.append(step)

    def sits_out(self, version: int, step: int, interval: int, *, called: bool = False) -> bool:
        """Return whether this peer takes no part in the next version, which is ``version``.

        ``called``: others are due, and it comes a little earlier then, as in ``answers_call``.
        """
        if self.every == 1 or self.eager or self._last_version is None:
            return False
        passed = version - self._last_version
        cycles = self.every - (1.0 - self.policy.called_share if called else 0.0)
        return passed < self.every and step - self._last_step < cycles * interval

    def is_due(self, step: int) -> bool:
        """Return whether to ask the learner now, whose next safe point is one step from here."""
        return step + 1 >= self.due_step

    def answers_call(self, step: int, interval: int, *, hurried: bool = False) -> bool:
        """Return whether a peer that is called after this many steps joins at once.

        The steps since its own last round count: a peer that missed the last closings has work for
        another round, however short ago it heard of them. ``hurried``: a member is about to leave.
        Who was in no round yet comes as early as then: a peer that was killed made half a cycle of
        steps before it was in a round with the others again.
        """
        share = self.policy.called_share
        if self._last_version is None:
            share = min(share, HURRIED_SHARE)  # a synchronous peer comes with one step
        elif hurried:
            usual = self.every * share
            often = self._was_hurried_often(step, ROUNDS_COUNTED * usual * interval)
            share = usual if often else self.every * HURRIED_SHARE
        least = 1.0 if self.eager else max(1.0, interval * share)
        return step - self._last_step >= least

    def _was_hurried_often(self, step: int, least: float) -> bool:
        """True if this peer's last rounds took fewer steps than ``least``."""
        rounds = self._took_part_at
        return len(rounds) == ROUNDS_COUNTED and step - rounds[0] < least


SHIFT_SHARE: Final = 0.5
"""Share of its distance to its place by which a fragment moves in a cycle."""

SHIFT_OF_CYCLE_MAX: Final = 0.125
"""Bound of one move, as a share of the cycle."""


class Spacing:
    """The last closings of all fragments of one peer, in its own steps."""

    __slots__ = ("_first_closed_at",)

    def __init__(self) -> None:
        self._first_closed_at: int | None = None
        """The step at which fragment 0 closed last."""

    def closed(self, fragment: int, step: int, *, fragments: int, interval: int) -> int:
        """Note a closing. Returns the steps by which the next cycle is longer; negative: shorter.

        ``interval``: own steps in one cycle.
        """
        if fragment == 0:
            self._first_closed_at = step
        if self._first_closed_at is None:
            return 0
        place = self._first_closed_at - fragment * interval // fragments
        late = (step - place) % interval
        if late > interval // 2:
            late -= interval
        most = int(SHIFT_OF_CYCLE_MAX * interval)
        return -max(-most, min(round(SHIFT_SHARE * late), most))

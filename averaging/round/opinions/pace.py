"""The progress of the learner, and the due time of its fragment."""

from __future__ import annotations

from collections.abc import Callable

from averaging.round.interface.identity import Identity
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.rules import line_levels
from averaging.rules.due import DueTime
from averaging.rules.line_levels import Every, Level, Line, Need
from averaging.rules.policy import RoundPolicy

CYCLES_HELD = 2
"""Cycles for which a level stays before it falls again. Measured speeds vary from transfer to
transfer, and after each change some members learn of it late."""
INTERVAL_KEPT_S = 10.0
"""The length of a cycle is computed again when it is older than this."""


class Pace:
    """The learner's step counter, and the due time in its steps."""

    def __init__(
        self, identity: Identity, peers: Neighbourhood, *, step: int, version: int
    ) -> None:
        """``version``: the one that the next round makes."""
        self._policy = policy = identity.policy_at(version)
        self.levels = policy.levels
        """Those of the policy that it goes by now."""
        self._fragment = fragment = identity.fragment
        self._spacing = identity.spacing
        self._peers = peers
        self.step = step
        self.step_time_s = 0.0
        self.due_time = DueTime(policy.due, fragment=fragment, step=step)
        self.every = line_levels.IN_EVERY_ROUND
        self.level: Level = self.levels[0]
        """The level of the newest roster that closed."""
        self.need = line_levels.FROM_THE_START
        self._need_changed_at = -CYCLES_HELD
        """The number of this peer's cycles at that change."""
        self._cycles = 0
        self._paced_level = self.level
        """The level for which ``every`` was decided."""
        self._cycle_steps = policy.due.cycle_steps
        self._cycle_at: float | None = None

    @property
    def is_due(self) -> bool:
        return self.due_time.is_due(self.step)

    def median_step_s(self, now: float) -> float:
        """Median step time of the peers in sight, this one included; 0: not known."""
        return self._peers.median_step_s(self.step_time_s, now)

    def answers_call(self, now: float, *, hurried: bool) -> bool:
        """True if there are enough steps to join a leader that calls."""
        return self.due_time.answers_call(self.step, self._cycle(now), hurried=hurried)

    def sits_out(self, version: int, now: float, *, called: bool) -> bool:
        """True if this peer takes no part in the next version, because of its line."""
        return self.due_time.sits_out(version, self.step, self._cycle(now), called=called)

    def took_part(self, version: int) -> None:
        self.due_time.took_part(version, self.step)

    def take_level(self, number: int) -> Level:
        """Go on with the cycle of this level; the last one for a number that the run lacks."""
        self.level = self.levels[min(number, len(self.levels) - 1)]
        self.due_time.cycle_steps = self.level.cycle_steps
        self._cycle_at = None
        return self.level

    def need_of_line(self, encoded_bytes: Callable[[str], int], now: float) -> Need | None:
        """Decide again which level the line needs. Returns the decision if it is a new one."""
        before = self.need
        if len(self.levels) == 1:
            return None
        line = Line(
            bytes_per_s=self._peers.bytes_per_s,
            step_s=self.median_step_s(now),
            fragments=self._policy.due.fragments,
            members=min(len(self._peers.trainers(now)), self._peers.group_size),
            share_max=self._policy.line_share,
        )
        need = line_levels.needed(before, line, self.levels, encoded_bytes)
        if need.level < before.level and self._cycles - self._need_changed_at < CYCLES_HELD:
            return None
        self.need = need
        if need.level == before.level:
            return None
        self._need_changed_at = self._cycles
        return need

    def versions_of_line(self, encoded_bytes: Callable[[str], int], now: float) -> Every | None:
        """Decide again how often to take part. Returns the decision if it is a new one."""
        before = self.every
        # A load of another size has nothing to do with how the last one varied: with the margin k
        # would stay at what the line needed before the level rose, and half of the rounds left out.
        kept = before if self.level == self._paced_level else line_levels.IN_EVERY_ROUND
        self._paced_level = self.level
        self.every = line_levels.every(
            kept,
            bytes_per_s=self._peers.bytes_per_s,
            fragment_bytes=max(map(encoded_bytes, (self.level.codec, self.level.codec_down))),
            fragments=self._policy.due.fragments,
            cycle_s=self.level.cycle_steps * self.median_step_s(now),
            share_max=self._policy.line_share,
            versions_max=self._policy.stale_max,
        )
        self.due_time.every = self.every.versions
        return None if self.every.versions == before.versions else self.every

    def amend(self, policy: RoundPolicy) -> None:
        """Go by another policy from the next cycle on."""
        if policy == self._policy:
            return
        number = self.levels.index(self.level) if self.level in self.levels else 0
        self._policy, self.levels = policy, policy.levels
        self.due_time.policy = policy.due
        if self.need.level >= len(self.levels):
            self.need = line_levels.FROM_THE_START
        self.take_level(number)

    def start_cycle(self, now: float) -> None:
        """A roster closed: count from here."""
        self._cycles += 1
        cycle, fragments = self._cycle(now), self._policy.due.fragments
        shift = self._spacing.closed(self._fragment, self.step, fragments=fragments, interval=cycle)
        self.due_time.closed(self.step, cycle + shift)

    def retry_later(self, now: float) -> None:
        """An attempt ended without a version."""
        self.due_time.attempt_failed(self.step, self._cycle(now))

    def _cycle(self, now: float) -> int:
        """Own steps in one cycle of the median peer."""
        if self._cycle_at is None or now - self._cycle_at > INTERVAL_KEPT_S:
            self._cycle_at = now
            self._cycle_steps = self.due_time.interval(
                own_s=self.step_time_s, median_s=self.median_step_s(now)
            )
        return self._cycle_steps

"""When a fragment is due: so many own steps after the last closing of it that was heard of.

Free-running schedules would almost never meet. Everybody who hears of a closing counts
from it, a slow peer fewer of its steps than a fast one, so all are due at about the same moment. No
clock is compared with another peer's; only own steps are counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePolicy:
    """How often a fragment is merged."""

    cycle_steps: int = 24
    """H: steps of the median peer between two merges of a fragment."""
    fragments: int = 24
    """P: first times are staggered by H/P."""
    called_share: float = 0.5
    """Who has this share of its steps when it is called joins at once."""
    retry_share: float = 0.25
    """After a round that came to nothing a fragment is due again this share of a cycle later."""
    scale_by_speed: bool = True
    """Slow peers take fewer steps between two merges. Off: everybody H steps (issue E compares)."""

    def __post_init__(self) -> None:
        if self.cycle_steps < 1:
            raise ValueError(f"cycle_steps is {self.cycle_steps}; a cycle has at least one step")
        if self.fragments < 1:
            raise ValueError(f"fragments is {self.fragments}; there is at least one")
        if not 0.0 < self.called_share <= 1.0:
            raise ValueError(f"called_share is {self.called_share}; it is above 0 and at most 1")
        if not 0.0 < self.retry_share <= 1.0:
            raise ValueError(f"retry_share is {self.retry_share}; it is above 0 and at most 1")


class DueTime:
    """One fragment's due time at one peer, in that peer's own steps."""

    __slots__ = ("_anchor", "_due", "_fragment", "eager", "policy")

    def __init__(self, policy: DuePolicy, *, fragment: int, step: int) -> None:
        """``step`` is the peer's own step as it starts: the fragments follow from there."""
        self.policy = policy
        self.eager = False
        """Whether any call is answered: this may be the last one."""
        self._fragment = fragment
        self._anchor = step
        offset = (fragment * policy.cycle_steps) // policy.fragments
        self._due = step + max(1, policy.cycle_steps - offset)

    def __repr__(self) -> str:
        return f"DueTime(fragment={self._fragment}, anchor={self._anchor}, due={self._due})"

    @property
    def due_step(self) -> int:
        """The own step with which the fragment is to be offered."""
        return self._due

    def interval(self, *, own_s: float | None, median_s: float | None) -> int:
        """H_i: own steps in one cycle of the median peer."""
        steps = self.policy.cycle_steps
        if not self.policy.scale_by_speed or not own_s or not median_s:
            return steps
        return max(1, round(steps * median_s / own_s))

    def closed(self, step: int, interval: int) -> None:
        """A roster closed, with me or without me: count from here."""
        self._anchor = step
        self._due = step + max(1, interval)

    def attempt_failed(self, step: int, interval: int) -> None:
        """My attempt ended without a version. Try again, but not at once."""
        self._due = max(step + 1, step + round(interval * self.policy.retry_share))

    def is_due(self, step: int) -> bool:
        """Whether to ask the learner now, whose next safe point is one step from here."""
        return step + 1 >= self._due

    def answers_call(self, step: int, interval: int) -> bool:
        """Whether somebody with this many steps since the last closing joins when called."""
        least = 1.0 if self.eager else max(1.0, interval * self.policy.called_share)
        return step - self._anchor >= least

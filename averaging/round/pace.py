"""The progress of the learner, and the due time of its fragment."""

from __future__ import annotations

from collections import deque

from averaging.round.neighbourhood import Neighbourhood
from averaging.rules import line_pace
from averaging.rules.due import DuePolicy, DueTime
from averaging.rules.line_pace import Every

SNAPSHOTS_KEPT = 8
SNAPSHOT_MARGIN = 1.25
"""The next snapshot may take this many times as long as the longest of the last ones."""
INTERVAL_KEPT_S = 10.0
"""The length of a cycle is computed again when it is older than this."""


class Pace:
    """The learner's step counter, and the due time in its steps."""

    __slots__ = (
        "_cycle_at",
        "_cycle_steps",
        "_peers",
        "_snapshot_asked_at",
        "_snapshots_s",
        "due_time",
        "every",
        "step",
        "step_time_s",
    )

    def __init__(
        self, policy: DuePolicy, peers: Neighbourhood, *, fragment: int, step: int
    ) -> None:
        self._peers = peers
        self.step = step
        self.step_time_s = 0.0
        self.due_time = DueTime(policy, fragment=fragment, step=step)
        self.every = line_pace.FROM_THE_START
        self._cycle_steps = policy.cycle_steps
        self._cycle_at: float | None = None
        self._snapshot_asked_at = 0.0
        self._snapshots_s: deque[float] = deque(maxlen=SNAPSHOTS_KEPT)

    def __repr__(self) -> str:
        return f"Pace(step={self.step}, {self.due_time})"

    @property
    def is_due(self) -> bool:
        return self.due_time.is_due(self.step)

    def median_step_s(self, now: float) -> float:
        """Median step time of the peers in sight, this one included; 0: not known."""
        return self._peers.median_step_s(self.step_time_s, now)

    def answers_call(self, now: float) -> bool:
        """True if there are enough steps to join a leader that calls."""
        return self.due_time.answers_call(self.step, self._cycle(now))

    def sits_out(self, version: int, now: float) -> bool:
        """True if this peer takes no part in the next version, because of its line."""
        return self.due_time.sits_out(version, self.step, self._cycle(now))

    def took_part(self, version: int) -> None:
        self.due_time.took_part(version, self.step)

    def line_measured(self, fragment_bytes: int, *, versions_max: int, now: float) -> Every | None:
        """Decide again how often to take part. Returns the decision if it is a new one."""
        policy = self.due_time.policy
        median_s = self.median_step_s(now)
        before = self.every
        self.every = line_pace.every(
            before,
            bytes_per_s=self._peers.bytes_per_s,
            fragment_bytes=fragment_bytes,
            fragments=policy.fragments,
            cycle_s=policy.cycle_steps * median_s,
            versions_max=versions_max,
        )
        self.due_time.every = self.every.versions
        return None if self.every.versions == before.versions else self.every

    def start_cycle(self, now: float) -> None:
        """A roster closed: count from here."""
        self.due_time.closed(self.step, self._cycle(now))

    def retry_later(self, now: float) -> None:
        """An attempt ended without a version."""
        self.due_time.attempt_failed(self.step, self._cycle(now))

    def snapshot_asked(self, now: float) -> None:
        self._snapshot_asked_at = now

    def snapshot_taken(self, now: float) -> None:
        self._snapshots_s.append(now - self._snapshot_asked_at)

    def snapshot_left_s(self, now: float, *, unknown_s: float) -> float:
        """Time until the snapshot that was asked for is there; at first it may take any time up to
        ``unknown_s``."""
        longest_s = max(self._snapshots_s, default=None)
        takes_s = unknown_s if longest_s is None else SNAPSHOT_MARGIN * longest_s
        return max(0.0, self._snapshot_asked_at + takes_s - now)

    def _cycle(self, now: float) -> int:
        """Own steps in one cycle of the median peer."""
        if self._cycle_at is None or now - self._cycle_at > INTERVAL_KEPT_S:
            self._cycle_at = now
            self._cycle_steps = self.due_time.interval(
                own_s=self.step_time_s, median_s=self.median_step_s(now)
            )
        return self._cycle_steps

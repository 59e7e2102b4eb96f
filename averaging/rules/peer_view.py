"""TODO"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SILENCE_MAX_S: Final = 30.0

ESTABLISHED_AFTER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class PeerView:
    """What I know of another peer, on my own clock."""

    first_seen: float
    heard_at: float
    failed_at: float | None = None
    """The last call that it did not answer."""
    reachable: bool = True
    """Others can dial it. Who only dials out neither leads nor reduces."""
    trains: bool = True
    """Has a learner. A bootstrap peer or keeper lends itself as leader and reducer at most."""
    arrives: bool = False
    """Will have one: a newcomer that is still fetching the run's state."""
    step_time_s: float | None = None
    bytes_per_s: float | None = None
    site: str | None = None
    """Peers who say the same are near each other, and are dealt into one group."""

    def is_live(self, now: float) -> bool:
        """Heard lately, and did not fail since."""
        if self.failed_at is not None and self.failed_at >= self.heard_at:
            return False
        return now - self.heard_at <= SILENCE_MAX_S

    def is_established(self, now: float) -> bool:
        return self.is_live(now) and now - self.first_seen >= ESTABLISHED_AFTER_S

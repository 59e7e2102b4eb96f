"""A peer's view of another peer, with times on the observer's clock."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from dht.protocol import NEWEST

SILENCE_MAX_S: Final = 30.0
"""A peer that was not heard for longer than this is not live."""

ESTABLISHED_AFTER_S: Final = 30.0
"""A peer that has been known for this long, and is live, may lead."""


class PeerView(Struct, frozen=True):
    """One peer's knowledge of another, on the observer's clock."""

    first_seen: float
    heard_at: float
    failed_at: float | None = None
    """Time of the last call that it did not answer."""
    reachable: bool = True
    """True if others can dial it. A peer that only dials out neither leads nor reduces."""
    trains: bool = True
    """True if it has a learner. A keeper or bootstrap peer serves as leader and reducer at most."""
    arrives: bool = False
    """True if it will have a learner: a newcomer that is still fetching the run's state."""
    keeps: bool = False
    """True if it is a keeper: it holds the run's state without a learner."""
    worked_at: float | None = None
    """Time at which a learner last trained, as far as the observer saw; ``None``: it is none."""
    step_time_s: float | None = None
    bytes_per_s: float | None = None
    protocol: int = NEWEST
    """The newest protocol number that it and the observer speak."""
    site: str | None = None
    """Peers that name the same site are near each other, and are dealt into one group."""

    def is_live(self, now: float) -> bool:
        """Return whether it was heard lately and has not failed since."""
        if self.failed_at is not None and self.failed_at >= self.heard_at:
            return False
        return now - self.heard_at <= SILENCE_MAX_S

    def is_established(self, now: float) -> bool:
        return self.is_live(now) and now - self.first_seen >= ESTABLISHED_AFTER_S

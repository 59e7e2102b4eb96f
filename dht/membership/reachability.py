"""Can others dial this peer? Decided by what other peers found when they tried.

A peer asks for dial-backs when it starts, when its addresses change, and now and
then. One fresh connection that arrived proves that it is reachable; that it is not
takes the word of two helpers, or of the only one there is, twice. Pure: ``dht.presence.presence``
asks, and tells what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dht.identity import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilitySettings:
    """How often a peer has its reachability tested."""

    first_retry_s: float = 5.0
    """Pause between attempts while nothing is known."""

    recheck_reachable_s: float = 600.0
    recheck_dial_out_s: float = 120.0
    helpers_per_check: int = 3
    denials_min: int = 2

    def __post_init__(self) -> None:
        if self.denials_min < 1:
            raise ValueError(f"denials_min is {self.denials_min}; it is at least 1")
        if self.helpers_per_check < 1:
            raise ValueError(f"helpers_per_check is {self.helpers_per_check}; it is at least 1")


@dataclass(slots=True)
class Reachability:
    """What is known, and when to look again."""

    settings: ReachabilitySettings = field(default_factory=ReachabilitySettings)
    reachable: bool | None = None
    """``None``: not known yet."""

    reason: str = "nobody was asked yet"
    due_at: float = 0.0
    settled: bool = False
    """Whether what is known is about the present addresses."""

    _addresses: frozenset[str] | None = None
    _denials: list[PeerId] = field(default_factory=list)

    def announce(self, addresses: frozenset[str], *, now: float) -> bool:
        """These are the direct addresses now. Says whether they changed.

        What was known of the old ones is kept until the new ones were tried: an
        address more does not make a good peer bad.
        """
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        self._denials.clear()
        self.due_at = now
        self.settled = not addresses
        if not addresses:
            self.reachable = False
            self.reason = "it has no direct address"
        return True

    def confirmed(self, helper: PeerId, *, now: float) -> bool:
        """A fresh connection came in and named the nonce. Says whether that is news."""
        news = self.reachable is not True
        self.reachable = self.settled = True
        self.reason = f"{helper} dialled it"
        self._denials.clear()
        self.due_at = now + self._pause_s()
        return news

    def denied(self, helper: PeerId, reason: str, *, others: int, now: float) -> bool:
        """A helper could not reach it; ``others``: helpers that could have been asked as well.

        Says whether that is news.
        """
        self._denials.append(helper)
        enough = len(set(self._denials)) >= self.settings.denials_min or (
            others == 0 and len(self._denials) >= self.settings.denials_min
        )
        if not enough:
            self.due_at = now + self.settings.first_retry_s
            return False
        news = self.reachable is not False
        self.reachable = False
        self.settled = True
        self.reason = reason
        self._denials.clear()
        self.due_at = now + self._pause_s()
        return news

    def asked(self, *, now: float) -> None:
        """A check begins. Unless it settles the matter, the next follows soon."""
        self.due_at = now + self._pause_s()

    def _pause_s(self) -> float:
        if not self.settled or self._denials:
            return self.settings.first_retry_s
        if self.reachable:
            return self.settings.recheck_reachable_s
        return self.settings.recheck_dial_out_s

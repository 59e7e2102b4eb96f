"""When a run is over, and when a peer that knows it may go. Pure.

**By tokens** a run ends in its history (``averaging.rules.final_mix``): a fragment is final at the
first version whose ``merged`` reaches the budget. Whoever follows the lineage finds the same
version, whenever it looks. Several groups mix once more then, and end together as by date.

**By date** there is no such version: a round knows no time of day. So the peers make a last round,
end together, and go by what they see of each other. At the date (by the swarm's clock, give or
take a second) each offers every fragment once more, whatever its cycle says, to all who are there,
and joins whoever calls it. When those rounds are over it offers nothing any more. Two peers of one
group then stand on one chain, and who is behind on it is told and catches up; of a fork that has
not healed the lighter side takes the heavier state. A peer may go when all whom it can ask are at
their end as well and stand where it stands. Nobody waits for ever for one that cannot: then they
differ, and the event log says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from dht.membership.clock_offset import ClockEstimate
from peer.run_file.sections import End
from peer.status import Status


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a peer leaves its run."""

    reason: str
    exit_code: int
    finished: bool
    """The run itself is over."""
    timeout_s: float
    """For what is under way."""


def seconds_left(end: End, clock: ClockEstimate | None, *, now: datetime) -> float | None:
    """Until the run's date, by the swarm's clock; ``None`` for a run without one.

    The own clock has one voice beside the others': two peers alone meet in the middle.
    """
    if end.date is None:
        return None
    offset_s = 0.0 if clock is None else clock.offset_s * clock.peers / (clock.peers + 1)
    return (end.date - now - timedelta(seconds=offset_s)).total_seconds()


@dataclass(slots=True)
class LastRounds:
    """One more round of every fragment, from the date on."""

    versions: tuple[int, ...]
    """A moment before the date."""
    _void: set[int] = field(default_factory=set)

    def came_to_nothing(self, fragment: int) -> None:
        self._void.add(fragment)

    def missing(self, versions: Sequence[int]) -> tuple[int, ...]:
        """The fragments that have neither a new version nor a round that came to nothing."""
        return tuple(
            fragment
            for fragment, (before, now) in enumerate(zip(self.versions, versions, strict=True))
            if now <= before and fragment not in self._void
        )


def who_differs(
    mine: Sequence[int], others: Iterable[Status], *, by_date: bool, model: str = ""
) -> list[str]:
    """Names of those for whom this peer should stay, each with what is not as it should be.

    By tokens a version that is higher than mine cannot be, and a lower one may need me. By date
    whoever is not at its end yet may still make a version that I should have. ``model`` is the name
    of what I have: two sides of a fork may stand at equal versions.
    """
    waiting = []
    for other in others:
        if by_date and other.phase != "leaving":
            waiting.append(f"{other.name or other.peer}: still {other.phase}")
        elif len(other.versions) != len(mine):
            waiting.append(f"{other.name or other.peer}: has no state yet")
        elif any(t != m if by_date else t < m for t, m in zip(other.versions, mine, strict=True)):
            waiting.append(f"{other.name or other.peer}: at {list(other.versions)}")
        elif other.versions == tuple(mine) and other.model and model and other.model != model:
            waiting.append(f"{other.name or other.peer}: at these versions with other parameters")
    return waiting

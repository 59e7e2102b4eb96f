"""When a run is over, and when a peer may leave after it.

**By tokens** a run ends in its history (``averaging.rules.final_mix``): a fragment is final at the
first version whose ``merged`` reaches the budget. Every peer that follows the lineage finds the
same version. Once one fragment is final the others are due at once: what is trained meanwhile can
be merged into these alone. A run of several groups then melds once more, and ends as by date.

**By date** no version is final in itself, because rounds do not know the time of day. Therefore
peers make a last round and compare the result. At the date (by the swarm's clock, within about a
second) each peer offers every fragment once more to all peers that are present, whatever its cycle
says, and joins any peer that calls it. The only learner that is left offers its work as one that
leaves: a keeper takes it, or it is folded. After that nothing more is offered. Two peers of one
group are then on one chain, and a peer that is behind on it catches up. Of two states that are
apart, after a partition or with more peers than a roster holds, the one with less work gives way. A
peer may leave when all peers that it can ask have ended, too, and have the same versions. The wait
is bounded: if it runs out, the event ``left_apart`` says who differs.

**Peers that leave at the same time**, as at the end of an evening, wait for one another in the same
way for a few seconds (``who_leaves_too``): else the first would go with older versions than the
last, and five peers would keep three models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from dht.membership.clock_offset import ClockEstimate
from peer.run_file.sections import End
from peer.status import PeerStatus


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a peer leaves its run."""

    reason: str
    exit_code: int
    finished: bool
    """The run itself is over."""
    timeout_s: float
    """Time for rounds under way to finish."""
    patience_s: float = 0.0
    """Longest time to stay beyond that where pending work needs it to be merged, and another peer
    to take it over."""

    def patience_left_s(self, spent_s: float) -> float:
        """Patience that is left after so long a stay; a trainer waits no longer than that."""
        return max(0.0, self.patience_s - max(0.0, spent_s - self.timeout_s))


PATIENCE_S: Final = 300.0
PATIENCE_MIN_S: Final = 5.0
PATIENCE_MAX_S: Final = 86_400.0

LAST_WORDS_S: Final = 10.0
"""Time for an agent to save and end, of a patience that is at least three times as long."""


def check_patience(seconds: float) -> None:
    """Raise ``ValueError`` unless a peer can leave in so long a time."""
    if not PATIENCE_MIN_S <= seconds <= PATIENCE_MAX_S:
        raise ValueError(
            f"the patience is {seconds:g} s; it is the longest time that leaving may take, from "
            f"{PATIENCE_MIN_S:g} to {PATIENCE_MAX_S:g} seconds"
        )


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a peer that leaves stays to hand over."""

    timeout_s: float
    patience_s: float
    """Longest time beyond that, where a slow line needs it."""
    last_words_s: float
    """Time to save and end after both."""

    @property
    def longest_s(self) -> float:
        return self.timeout_s + self.patience_s + self.last_words_s


def stay(patience_s: float, *, drain_s: float) -> Stay:
    """Divide the time that leaving may take. First work is offered, last of all it is saved."""
    last_words_s = min(LAST_WORDS_S, patience_s / 3)
    timeout_s = min(drain_s, patience_s - last_words_s)
    return Stay(timeout_s, patience_s - last_words_s - timeout_s, last_words_s)


def seconds_left(end: End, clock: ClockEstimate | None, *, now: datetime) -> float | None:
    """Seconds until the run's date, by the swarm's clock; ``None`` for a run without a date.

    This peer's clock counts like that of any other peer: two peers agree on the mean.
    """
    if end.date is None:
        return None
    offset_s = 0.0 if clock is None else clock.offset_s * clock.peers / (clock.peers + 1)
    return (end.date - now - timedelta(seconds=offset_s)).total_seconds()


def ended(
    end: End, answers: Iterable[PeerStatus], *, now: datetime, ordered: bool = False
) -> tuple[float, int] | None:
    """When the run has ended, and at how many tokens; ``None`` while it goes on.

    It has ended if all peers with a state say so, and their tokens, the date, or an order of the
    run's owner (``ordered``) bear it out.
    """
    holders = [answer for answer in answers if answer.versions]
    times = [answer.ended_at for answer in holders if answer.ended_at is not None]
    if not holders or len(times) < len(holders):
        return None
    tokens = max(answer.global_tokens for answer in holders)
    used = isinstance(end.tokens, int) and tokens >= end.tokens
    return (
        (min(times), tokens)
        if used or ordered or (end.date is not None and now >= end.date)
        else None
    )


@dataclass(slots=True)
class LastRounds:
    """One more round of every fragment, from the date on."""

    versions: tuple[int, ...]
    """Versions just before the date."""
    _void: set[int] = field(default_factory=set)

    def came_to_nothing(self, fragment: int) -> None:
        """A round of the fragment ended without a version."""
        self._void.add(fragment)

    def missing(self, versions: Sequence[int]) -> tuple[int, ...]:
        """Fragments with neither a new version nor a round that ended without one."""
        return tuple(
            fragment
            for fragment, (before, now) in enumerate(zip(self.versions, versions, strict=True))
            if now <= before and fragment not in self._void
        )


def who_differs(
    mine: Sequence[int], others: Iterable[PeerStatus], *, by_date: bool, model: str = ""
) -> list[str]:
    """Names of the peers that this peer should wait for, each with the reason.

    In a run that ends by tokens, a peer at a lower version may need this peer's state. In one that
    ends by date, a peer that has not ended may still make a version that this peer lacks. ``model``
    names this peer's states: two sides of a fork may have equal versions.
    """
    waiting = []
    for other in others:
        if by_date and other.phase != "leaving" and other.ended_at is None:
            waiting.append(f"{other.name or other.peer}: still {other.phase}")
        elif len(other.versions) != len(mine):
            waiting.append(f"{other.name or other.peer}: has no state yet")
        elif any(t != m if by_date else t < m for t, m in zip(other.versions, mine, strict=True)):
            waiting.append(f"{other.name or other.peer}: at {list(other.versions)}")
        elif other.versions == tuple(mine) and other.model and model and other.model != model:
            waiting.append(f"{other.name or other.peer}: at these versions with other parameters")
    return waiting


def who_leaves_too(
    mine: Sequence[int], others: Iterable[PeerStatus], *, model: str = ""
) -> list[str]:
    """Names of the peers for which one that leaves stays, where nobody trains on, with reasons.

    Peers that leave together end as a run does: with one model, which has the work of all. Each
    stays while another has work that is not merged, or stands elsewhere. Where others train on,
    they have the newest versions, and nobody stays for those that leave.
    """
    known = [other for other in others if other.versions]
    if any(other.role == "learner" and other.phase != "leaving" for other in known):
        return []
    waiting = []
    for other in known:
        name = other.name or other.peer
        if other.phase == "leaving" and other.fates.get("pending", 0) > 0:
            waiting.append(f"{name}: has work that is not merged")
        elif other.versions != tuple(mine):
            waiting.append(f"{name}: at {list(other.versions)}")
        elif other.model and model and other.model != model:
            waiting.append(f"{name}: at these versions with other parameters")
    return waiting


SLACK: Final = 3.0
WAY_BACK: Final = 1.25
"""Time for the bytes of both directions, relative to those of one. They pass at the same time but
for the last of them: two homes at 20 s per fragment handed four over in 91 s."""

UNKNOWN_BYTES_S: Final = 625_000.0
"""Speed that a line counts as that was not measured (5 Mbit/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOffers:
    """Pending work of a peer that leaves, and the line that has to carry it.

    On a fast line it is merged in seconds. On a slow one it takes as long as the bytes do, and the
    peer stays for up to ``SLACK`` times that: a line carries other traffic, and a round may fail.
    """

    encoded_bytes: int
    bytes_per_s: float
    """Speed of its line in the slower direction; 0: not known."""
    company_s: float = 0.0
    """Time that the others may need until they have steps of their own for a round."""

    @property
    def expected_s(self) -> float:
        """Time that it takes."""
        speed = self.bytes_per_s or UNKNOWN_BYTES_S
        return self.company_s + WAY_BACK * self.encoded_bytes / speed

    def patience_s(self, *, least_s: float, most_s: float) -> float:
        """Time to stay for it at most."""
        return max(least_s, min(most_s, SLACK * self.expected_s))

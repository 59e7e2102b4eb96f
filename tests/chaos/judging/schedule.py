"""Kinds of faults, and a schedule of faults drawn from a seed.

A schedule leaves the swarm alone at first, as its own control, and at the end, so that affected
peers have the promised time to come back. At any moment at least two learners are unaffected, and
no learner has two faults at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class FaultKind(StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """kill -9 of a learner with agent and daemon; it comes back."""
    LEADER = "leader"
    """The same for the leader of a round, in a given phase of the round."""
    SEEDS = "seeds"
    """kill -9 of every bootstrap peer; they come back."""
    FREEZE = "freeze"
    """SIGSTOP of a learner with agent and daemon."""
    CRAWL = "crawl"
    """A learner runs for a tenth of the time: it is stopped for most of every half second."""
    AGENT = "agent"
    """kill -9 of a learner's agent alone."""
    DAEMON = "daemon"
    """kill -9 of a learner's libp2p daemon alone."""
    LINK = "link"
    """A learner's connections have little bandwidth, a high latency, or break."""
    PARTITION = "partition"
    """Two halves of the swarm without connections between them."""
    FULL = "full"
    """The files of a learner's agent cannot grow."""
    UNWRITABLE = "unwritable"
    """A learner's checkpoint folder cannot be written to."""
    DAMAGE = "damage"
    """kill -9 of a learner, and its newest checkpoint is damaged before it comes back."""
    CLOCK = "clock"
    """A learner's clock jumps."""
    GARBAGE = "garbage"
    """A stranger sends random bytes on every protocol."""
    FLOOD = "flood"
    """A stranger opens streams without end and announces frames that are too large."""
    CROWD = "crowd"
    """Strangers with ever new keys send hostile requests of every kind to members and bootstrap
    peers."""


ABSENT = frozenset(
    {FaultKind.KILL, FaultKind.LEADER, FaultKind.FREEZE, FaultKind.DAMAGE, FaultKind.CRAWL}
)
"""Kinds that keep a learner from training."""

STRANGERS = frozenset({FaultKind.GARBAGE, FaultKind.FLOOD, FaultKind.CROWD})
"""Kinds that a separate process carries out."""

HAS_VICTIM = ABSENT | {
    FaultKind.AGENT,
    FaultKind.DAEMON,
    FaultKind.LINK,
    FaultKind.FULL,
    FaultKind.UNWRITABLE,
    FaultKind.CLOCK,
}

LASTS_S: Mapping[FaultKind, tuple[float, float]] = {
    FaultKind.KILL: (1.0, 6.0),
    FaultKind.LEADER: (1.0, 4.0),
    FaultKind.SEEDS: (5.0, 15.0),
    FaultKind.FREEZE: (5.0, 60.0),
    FaultKind.CRAWL: (10.0, 30.0),
    FaultKind.AGENT: (0.0, 0.0),
    FaultKind.DAEMON: (0.0, 0.0),
    FaultKind.LINK: (15.0, 40.0),
    FaultKind.PARTITION: (15.0, 45.0),
    FaultKind.FULL: (10.0, 30.0),
    FaultKind.UNWRITABLE: (10.0, 30.0),
    FaultKind.DAMAGE: (1.0, 3.0),
    FaultKind.CLOCK: (0.0, 0.0),
    FaultKind.GARBAGE: (8.0, 15.0),
    FaultKind.FLOOD: (10.0, 30.0),
    FaultKind.CROWD: (60.0, 120.0),
}
"""Shortest and longest duration of each kind, without the time that a restart takes."""

REST_S = 2.0
"""Least time between two faults of a kind."""

CROWD_REST_S = 30.0
"""The same for crowds: the time without strangers, with which the time beside them is compared."""

LEADER_PHASES = ("joining", "committed", "exchanging", "recovering")

START_S = 8.0
"""A learner that comes back is left alone for so long, so that it can start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault to inject."""

    at_s: float
    """Time since every learner was in the run."""
    kind: FaultKind
    lasts_s: float
    victim: int | None
    """Index of a learner; ``None`` for kinds without one, and for a leader (known only then)."""
    detail: str = ""
    amount: float = 0.0
    """Size of a clock's jump, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Periods with and without faults, from the moment when every learner was in the run."""

    total_s: float
    lead_in_s: float
    settle_s: float
    every_s: tuple[float, float]
    """Shortest and longest time between the beginnings of two faults."""

    @classmethod
    def of(cls, total_s: float) -> Timing:
        """Divide a duration. The quiet end is long enough for a start and two cycles."""
        lead_in_s = min(30.0, max(5.0, 0.12 * total_s))
        settle_s = min(45.0, max(14.0, 0.3 * total_s))
        if total_s - lead_in_s - settle_s < 5.0:
            raise ValueError(f"total_s is {total_s:g}; a scenario takes at least 30 s")
        every_s = (3.0, 7.0) if total_s <= 120 else (6.0, 14.0)
        return cls(total_s=total_s, lead_in_s=lead_in_s, settle_s=settle_s, every_s=every_s)

    @property
    def quiet_s(self) -> float:
        """When the last fault is over."""
        return self.total_s - self.settle_s


def plan(
    kinds: Mapping[FaultKind, float],
    timing: Timing,
    *,
    learners: int,
    whole_min: int,
    rng: np.random.Generator,
) -> tuple[Fault, ...]:
    """Draw a schedule: kinds by their weights, victims evenly. Each kind occurs once if it fits."""
    names = sorted(kinds)
    weights = np.array([kinds[name] for name in names], np.float64)
    hurt_until = [0.0] * learners
    absent: list[tuple[float, float]] = []
    busy: dict[FaultKind, float] = {}
    faults: list[Fault] = []
    first = list(rng.permutation(len(names)))
    leaders = 0
    at_s = timing.lead_in_s
    while names and at_s < timing.quiet_s - 1.0:
        index = first.pop(0) if first else int(rng.choice(len(names), p=weights / weights.sum()))
        kind = names[index]
        shortest, longest = LASTS_S[kind]
        longest = max(shortest, min(longest, 0.5 * (timing.quiet_s - timing.lead_in_s)))
        lasts_s = float(rng.uniform(shortest, longest))
        # The restart is a part of the fault: it begins before the quiet end.
        lasts_s = max(0.0, min(lasts_s, timing.quiet_s - at_s))
        victims = [i for i in range(learners) if hurt_until[i] <= at_s]
        missing = sum(1 for begin, end in absent if begin <= at_s < end)
        fits = busy.get(kind, 0.0) <= at_s
        if kind in ABSENT:
            fits = fits or kind in (FaultKind.KILL, FaultKind.LEADER)
            fits = fits and learners - missing > whole_min
        if kind in HAS_VICTIM:
            fits = fits and bool(victims)
        if fits:
            victim = None
            if kind in HAS_VICTIM and kind is not FaultKind.LEADER:
                victim = int(victims[int(rng.integers(len(victims)))])
                hurt_until[victim] = at_s + lasts_s + START_S
            detail, amount = "", 0.0
            if kind is FaultKind.LEADER:
                detail = LEADER_PHASES[leaders % len(LEADER_PHASES)]
                leaders += 1
            elif kind is FaultKind.CLOCK:
                amount = round(float(rng.choice([-7200.0, -30.0, -2.0, 2.0, 30.0, 7200.0])), 3)
                detail = f"{amount:+g} s"
            elif kind is FaultKind.LINK:
                detail = str(rng.choice(["narrow", "distant", "torn"]))
            if kind in ABSENT:
                absent.append((at_s, at_s + lasts_s + START_S))
            rest_s = CROWD_REST_S if kind is FaultKind.CROWD else REST_S
            busy[kind] = at_s + lasts_s + rest_s
            faults.append(
                Fault(
                    at_s=round(at_s, 3),
                    kind=kind,
                    lasts_s=round(lasts_s, 3),
                    victim=victim,
                    detail=detail,
                    amount=amount,
                )
            )
        at_s += float(rng.uniform(*timing.every_s))
    return tuple(faults)

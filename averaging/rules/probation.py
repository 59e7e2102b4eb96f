"""Probation: newcomers work before they count.

In a run that anybody may join, a peer counts once this peer has seen it work: it was a contributor
of ``rounds`` merges over ``seconds``. It is then *established* for this peer. Until then it is *on
probation*: it contributes with a bounded share (``averaging.rules.weights``), and neither leads,
reduces nor votes, and no majority, group or quorum counts it.

**Relative to those who have worked the most.** A fixed threshold would stop a young swarm, and one
that only newcomers are left of. So nobody has to have merged more than half as often, or for more
than half as long, as the live peer that has done so the most, this peer included. While nobody has
merged anything all peers count, and a swarm starts as if there were no probation. When the founder
leaves, the newcomers that have worked the most are the measure of the others. Keys that never
contribute to a merge fall behind with the first merges and never count. This peer's own work keeps
the measure up when its links to the others fail, so cutting it off does not promote newcomers.

**Views differ**, so the leader of a round names the voters, and a member checks (``objection``)
that a majority of them have done at least half of what it asks for itself, and that a majority of
the members that it is sure of are among them. The first keeps newcomers from deciding, the second a
leader from choosing its judges. A peer that has seen little of the run's past is sure of nobody
before it has seen ``2 * rounds``: others that came when it came look to it as old as the run. It
also decides nothing before that, because it is on probation itself.

**A partition** may cut a swarm in two that have hardly worked together. Who was here at the first
merge is therefore established from then on, until it misses ``rounds`` merges in a row that it was
here for; while it is away it misses none.

What is not stopped: a patient attacker that does honest work under many keys, and whoever is among
the first in a young swarm. Memory of merges ends with the process. A peer that restarts is held for
established by the others as before; what it holds of them it learns anew, within a few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from averaging.bounded_mapping import BoundedMapping
from averaging.messages import Commit
from dht.identity import PeerId

RELATIVE: Final = 0.5
"""Share of the most that any live peer has done which is enough, whatever the policy asks for."""

YOUNG_ROUNDS: Final = 4
"""While no live peer is known to have merged so often, all count."""

SLACK: Final = 0.5
"""Share of what a peer asks for itself that it accepts of a voter that another peer names."""

SURE: Final = 1.5
"""Multiple of the relative threshold above which honest peers agree, if they saw all of a run."""

SEEN_MAX: Final = 4096
"""Peers whose merges are remembered; the one that merged first is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbationPolicy:
    """What a peer must have done to count."""

    rounds: int = 0
    """Merges that contain its work, of all fragments together; 0: there is no probation."""
    seconds: float = 0.0
    """Time since the first of them."""

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}; it must be 0 or more")
        if not self.seconds >= 0.0:
            raise ValueError(f"seconds is {self.seconds}; it must be 0 s or more")


@dataclass(slots=True)
class _Work:
    """The merges of one peer that this peer saw."""

    since: float
    rounds: int = 0
    founding: bool = False
    """It was here when this peer saw the first merge of the run."""
    missed: int = 0
    """Merges without it in a row that it was here for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What counts as enough work at this moment, given who is live."""

    rounds: float
    seconds: float

    def progress(self, rounds: int, seconds: float) -> float:
        """Return how much of it this is; 1 or more: enough."""
        by_rounds = rounds / self.rounds if self.rounds > 0 else math.inf
        by_time = seconds / self.seconds if self.seconds > 0 else math.inf
        return min(by_rounds, by_time)


class Probation:
    """What one peer has seen of the work of all peers of a run, itself included.

    All fragments of a peer share one. Times are on the peer's own clock.
    """

    __slots__ = ("_began", "_seen", "_trusted", "policy", "saw_all")

    def __init__(
        self, policy: ProbationPolicy, *, trusted: Callable[[PeerId], bool] = lambda peer: False
    ) -> None:
        """``trusted``: peers that the owner of the run vouches for, established at any time."""
        self.policy = policy
        self.saw_all = True
        """True if this peer has been here since the run's first merge."""
        self._began = False
        """True once this peer has seen a merge."""
        self._trusted = trusted
        self._seen = BoundedMapping[PeerId, _Work](SEEN_MAX)

    def __repr__(self) -> str:
        return f"Probation({self.policy.rounds} rounds, {len(self._seen)} peers seen)"

    @property
    def is_on(self) -> bool:
        return self.policy.rounds > 0

    def saw_merged(
        self, contributors: Iterable[PeerId], live: Iterable[PeerId], now: float
    ) -> None:
        """A round was merged with the work of these peers, while those were live."""
        worked, live = set(contributors), set(live)
        if self.saw_all and not self._began:
            for peer in sorted(live):
                self._seen[peer] = _Work(now, founding=True)
        self._began = True
        for peer in sorted(worked - self._seen.keys()):
            self._seen[peer] = _Work(now)
        for peer, work in self._seen.items():
            if peer in worked:
                work.rounds, work.missed = work.rounds + 1, 0
            elif peer in live:
                work.missed += 1

    def asked(self, live: Iterable[PeerId], now: float) -> Asked:
        """Return what is asked of a peer while these are live."""
        known = [work for peer in live if (work := self._seen.get(peer)) is not None]
        rounds = max((work.rounds for work in known), default=0)
        if rounds < YOUNG_ROUNDS:
            return Asked(0.0, 0.0)
        seconds = max(now - work.since for work in known)
        policy = self.policy
        return Asked(min(policy.rounds, RELATIVE * rounds), min(policy.seconds, RELATIVE * seconds))

    def progress(self, peer: PeerId, asked: Asked, now: float) -> float:
        """Return how much of what is asked this peer has done; 1 or more: it is established."""
        if not self.is_on or self._trusted(peer):
            return math.inf
        work = self._seen.get(peer)
        if work is None:
            return asked.progress(0, 0.0)
        if work.founding and work.missed <= self.policy.rounds:
            return math.inf
        return asked.progress(work.rounds, now - work.since)

    def is_established(self, peer: PeerId, live: Iterable[PeerId], now: float) -> bool:
        """True if this peer counts a peer: its vote, its lead, and the states that it serves."""
        return not self.is_on or self.progress(peer, self.asked(live, now), now) >= 1.0

    def _is_sure_of(self, peer: PeerId, asked: Asked, now: float) -> bool:
        """True if no honest peer that has seen as much can hold this one to be on probation."""
        work = self._seen.get(peer)
        if work is None:
            return False
        policy, seconds = self.policy, now - work.since
        if work.rounds >= 2 * policy.rounds and seconds >= 2 * policy.seconds:
            return True
        enough = asked.rounds > 0 and asked.progress(work.rounds, seconds) >= SURE
        return self.saw_all and enough

    def objection(self, commit: Commit, asked: Asked, now: float) -> str | None:
        """Return the reason not to enter a round with these voters; ``None`` if there is none."""
        if not self.is_on:
            if commit.on_probation:
                return "it has members on probation; the run has no probation"
            return None
        voters = [commit.members[index].peer for index in commit.voters]
        worked = sum(self.progress(peer, asked, now) >= SLACK for peer in voters)
        if worked < commit.majority:
            return f"{worked} of its {len(voters)} voters have worked; a majority is needed"
        sure = [entry.peer for entry in commit.members if self._is_sure_of(entry.peer, asked, now)]
        named = len(set(sure) & set(voters))
        if sure and 2 * named <= len(sure):
            return f"{named} of {len(sure)} established members are its voters"
        return None

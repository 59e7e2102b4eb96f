"""The closing of a roster: how many must have joined, and how long the leader waits for the rest.

The grace window is the paper's (arXiv 2604.21428): it uses only time that the overlap of
communication and compute hides anyway, that is, what is left of tau steps when waiting for the
quorum and exchanging are paid for. This module does not know who the peers are; two leaders with
the same counts reach the same verdict.

The paper's tau is two steps. With it a round that takes longer leaves no grace, and a peer whose
step ends a little after the quorum misses every time. With ``carry`` overlap costs a learner
nothing, so a run's default (``outer.overlap_steps``) is a quarter of a cycle, six steps of 24: four
real processes with steps of 0.1 s on a busy machine had everybody in 595 of 610 rounds
(``test_must_hold_quality.py``).

A peer that is called and comes when its snapshot is taken says so at each call. The roster is open
for as long as it does, whatever the grace window is: leaving such a peer out saves the others
little, and costs it a replay of the round and all of them its work for one version more. Six peers
on lines of 20 to 100 Mbit/s whose snapshots take 1.3 to 4 s missed 24% to 31% of their rounds with
the window alone (``tests/averaging/simulated/late_experiment.py`` of commit 19e8096b).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ALL: Final = "all"

Required: TypeAlias = int | float | Literal["all"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumPolicy:
    """The conditions for closing a roster."""

    required: Required = None
    """Peers that must have joined: a number, a fraction of the live peers of the group, ``"all"``
    of them, or, when not set, a strict majority of them. Never fewer than two.
    """
    wait_s: float = 30.0
    """A roster that has no quorum this long after its first member joined is void."""
    gamma: float = 0.8
    """Share of the slack that a grace window uses. With a 4x spread of speeds rosters hold 88% of
    the live peers at 0.5 and 93% at 0.8 (``due_experiment.py`` of commit 19e8096b). 0: a roster
    closes at the quorum, whoever is on the way.
    """
    tau: float = 2.0
    """Steps that a merge may take while the learner continues."""

    def needed(self, live: int) -> int:
        """Return how many of ``live`` peers must have joined."""
        required = self.required
        if required is None:
            return max(2, live // 2 + 1)
        if isinstance(required, str):
            return max(2, live)
        if isinstance(required, float):
            return max(2, math.ceil(required * live - 1e-9))
        return required

    def is_reached(self, turnout: Turnout) -> bool:
        """Return whether enough have joined. Peers on probation do not replace others that are
        live, but one of them may be the second of a round. The only one that trains may be alone
        in it when it leaves its work to a keeper."""
        live = max(turnout.live, turnout.joined)
        if turnout.to_keeper and turnout.joined == live == 1:
            return True
        needed = self.needed(live)
        enough = turnout.joined >= min(needed, max(1, live))
        return enough and turnout.joined + turnout.newcomers >= needed


class Timings:
    """Durations of recent rounds at one leader, as exponential averages."""

    __slots__ = ("quorum_s", "sync_s")

    WEIGHT: Final = 0.2

    def __init__(self) -> None:
        self.quorum_s: float | None = None
        self.sync_s: float | None = None

    def quorum_took(self, seconds: float) -> None:
        self.quorum_s = self._moved(self.quorum_s, seconds)

    def sync_took(self, seconds: float) -> None:
        self.sync_s = self._moved(self.sync_s, seconds)

    def grace_s(self, policy: QuorumPolicy, step_time_s: float) -> float:
        """Return how long to wait once there is a quorum. Unmeasured durations count as 0."""
        slack = policy.tau * step_time_s - ((self.quorum_s or 0.0) + (self.sync_s or 0.0))
        return policy.gamma * max(0.0, slack)

    def _moved(self, average: float | None, seconds: float) -> float:
        seconds = max(0.0, seconds)
        return seconds if average is None else average + self.WEIGHT * (seconds - average)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnout:
    """The peers that have come so far, as counts."""

    live: int
    """Live peers of the group, including those who joined."""
    joined: int
    passed: int
    """Live peers that said that they do not come now."""
    opened_at: float
    """Time at which the first member joined."""
    quorum_at: float | None
    """Time at which there was a quorum for the first time."""
    expected_until: float | None = None
    """Time until which a peer that is missing is expected to join, or to answer the call."""
    newcomers: int = 0
    """Peers on probation that have joined; the numbers above do not contain them."""
    newcomers_until: float | None = None
    """Time until which others of them are waited for, however slow they are."""
    to_keeper: bool = False
    """All that have joined are about to leave, and a keeper can take the version that they make."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The roster stays open. Ask again at ``until``, or sooner if a peer joins, passes or dies."""

    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class Close:
    """Close the roster with the peers that have joined."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoRound:
    """Give up: all offered work stays pending."""

    reason: str


def decide(
    turnout: Turnout, policy: QuorumPolicy, *, grace_s: float, now: float
) -> Wait | Close | NoRound:
    """Return whether the roster closes now, with the reason."""
    live = max(turnout.live, turnout.joined)
    needed = policy.needed(live)
    deadline = turnout.opened_at + policy.wait_s
    count = f"{turnout.joined} of {live} live peers joined"
    if turnout.newcomers:
        count = f"{count}, and {turnout.newcomers} on probation"

    if policy.is_reached(turnout):
        missing = live - turnout.joined - turnout.passed
        if missing <= 0 and turnout.newcomers_until is not None and now < turnout.newcomers_until:
            return Wait(f"peers on probation may join: {count}", turnout.newcomers_until)
        if missing <= 0:
            passed = f", {turnout.passed} passed" if turnout.passed else ""
            return Close(f"everybody is here: {count}{passed}")
        graced = (now if turnout.quorum_at is None else turnout.quorum_at) + grace_s
        if policy.gamma > 0.0 and turnout.expected_until is not None:
            graced = max(graced, turnout.expected_until)
        until = min(graced, deadline)
        if now < until:
            return Wait(f"quorum of {needed} reached, grace for {missing} more: {count}", until)
        window = "the grace window is over" if graced <= deadline else "the deadline has come"
        return Close(f"quorum of {needed} reached and {window}: {count}")
    if now >= deadline:
        return NoRound(f"no quorum of {needed} within {policy.wait_s:g} s: {count}")
    return Wait(f"quorum of {needed} not reached: {count}", deadline)

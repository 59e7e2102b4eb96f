"""Transitions: what the parts of a round machine ask of the machine, beside effects.

A part (``averaging.round.joining`` and so on) changes nothing but its own state. It returns
changes: effects for the owner, and transitions. The machine applies them in their order, each
before the next one, and what one of them leads to comes before the next one as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from averaging.history.standing import Apart, Standing
from averaging.messages import Head, Join
from averaging.round.effects import Effect
from averaging.round.phase import Phase, Timer
from averaging.round.signed_commit import SignedCommit
from dht.identity import PeerId

# Bookkeeping


@dataclass(frozen=True, slots=True)
class Become:
    """Change the phase."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class SetTimer:
    timer: Timer
    at: float


@dataclass(frozen=True, slots=True)
class StopTimers:
    timers: tuple[Timer, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Add one to a counter of the machine."""

    counter: str


@dataclass(frozen=True, slots=True)
class StartCycle:
    """Count the steps to the next round from here."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The attempt ended without a version: be due again a part of a cycle later."""


@dataclass(frozen=True, slots=True)
class RosterClosed:
    """A roster of this version closed, with or without this peer: start a cycle."""

    version: int
    level: int | None = None
    """Level of the round; ``None``: it is not known, and remains as it was."""


@dataclass(frozen=True, slots=True)
class BeginWork:
    """The pending work begins at this version: what was before is discarded."""

    version: int


@dataclass(frozen=True, slots=True)
class Stand:
    """Move to another standing. ``fresh``: the work up to the last offer is contained in it."""

    standing: Standing
    fresh: bool


# For ``averaging.round.joining``


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Join the leader that called, change to it, or pass; after ``Compare`` with its head."""

    leader: PeerId
    head: Head | None
    until: float
    hurried: bool
    """A member is about to leave."""


@dataclass(frozen=True, slots=True)
class JoinCaller:
    """Join the leader that called if there is enough to offer, else pass."""

    leader: PeerId
    until: float
    hurried: bool


@dataclass(frozen=True, slots=True)
class ChangeLeader:
    """Send the join to another leader."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class Abandon:
    """Take back the attempt to get into a round. The phase is changed by the next transition."""

    reason: str


# For ``averaging.round.leading``


@dataclass(frozen=True, slots=True)
class AdmitJoin:
    """Count this join in the open roster."""

    sender: PeerId
    join: Join


@dataclass(frozen=True, slots=True)
class HoldJoin:
    """Keep this join until this peer has caught up with it, if it leads then; else refuse it."""

    sender: PeerId
    join: Join
    reason: str
    must_be_catching: bool


@dataclass(frozen=True, slots=True)
class ReadmitHeld:
    """Judge the held joins again: this peer has caught up."""


@dataclass(frozen=True, slots=True)
class ReadmitJoin:
    """Judge a held join again."""

    sender: PeerId
    join: Join


@dataclass(frozen=True, slots=True)
class TakeBackOwnJoin:
    """Remove the own join from the open roster; a roster without joins is dropped."""


@dataclass(frozen=True, slots=True)
class PassOwnRoster:
    """This peer does not join the roster that it has open."""


@dataclass(frozen=True, slots=True)
class LeaveOwnRoster:
    """The attempt is over: take back the own join, pass, and see whether the roster closes."""


@dataclass(frozen=True, slots=True)
class CallLeader:
    """A leader of lower rank has called: call it, so that it sends its members here."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class HandOverRoster:
    """A leader of higher rank has called: send the members of the open roster there."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class EnterOwnRound:
    """The open roster has closed: take part in its round as the leader."""

    signed: SignedCommit


# For ``averaging.round.catching_up``


@dataclass(frozen=True, slots=True)
class Compare:
    """A peer shows where it stands: catch up, rebase, or tell it that it should."""

    source: PeerId
    head: Head


@dataclass(frozen=True, slots=True)
class SettleFinalState:
    """One of two peers takes the other's state, which is final."""

    source: PeerId
    mine: Head
    relation: Apart
    theirs: Head


# From ``averaging.round.participation``


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The own part in a round is over without a new version."""

    round: bytes
    reason: str
    in_doubt: bool
    forsworn: bool = False
    """A majority will never finish the round. Some member may have finished it before."""


Question: TypeAlias = (
    AnswerCall
    | JoinCaller
    | AdmitJoin
    | HoldJoin
    | ReadmitJoin
    | LeaveOwnRoster
    | CallLeader
    | Compare
    | SettleFinalState
)
"""Transitions that a part decides by the situation as it is when their turn has come."""

Transition: TypeAlias = (
    Become
    | SetTimer
    | StopTimers
    | Count
    | StartCycle
    | RetryLater
    | RosterClosed
    | BeginWork
    | Stand
    | ChangeLeader
    | Abandon
    | ReadmitHeld
    | TakeBackOwnJoin
    | PassOwnRoster
    | HandOverRoster
    | EnterOwnRound
    | RoundEnded
    | Question
)

Change: TypeAlias = Effect | Transition
Changes: TypeAlias = list[Change]

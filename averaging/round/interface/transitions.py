"""Transitions: what the parts of a round machine ask of the machine, beside effects.

A part (``averaging.round.gathering.joining`` and so on) changes nothing but its own state. It
returns changes: effects for the owner, and transitions. The machine applies them in their order.
Changes that follow from one of them are applied before the next one.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from averaging.history.standing import Apart, Standing
from averaging.messages import Head, Join
from averaging.round.interface.effects import Effect
from averaging.round.interface.phase import Phase, Timer
from averaging.round.interface.signed_commit import SignedCommit
from dht.identity import PeerId

# Bookkeeping


class Become(Struct, frozen=True):
    """Change the phase."""

    phase: Phase


class SetTimer(Struct, frozen=True):
    timer: Timer
    at: float


class StopTimers(Struct, frozen=True):
    timers: tuple[Timer, ...]


class Count(Struct, frozen=True):
    """Add one to a counter of the machine."""

    counter: str


class StartCycle(Struct, frozen=True):
    """Count the steps to the next round from here."""


class RetryLater(Struct, frozen=True):
    """The attempt ended without a version: be due again a part of a cycle later."""


class RosterClosed(Struct, frozen=True):
    """A roster of this version closed, with or without this peer: start a cycle."""

    version: int
    level: int | None = None
    """Level of the round; ``None``: it is not known, and remains as it was."""


class BeginWork(Struct, frozen=True):
    """The pending work begins at this version: earlier work is discarded."""

    version: int


class Stand(Struct, frozen=True):
    """Move to another standing. ``fresh``: the work up to the last offer is contained in it."""

    standing: Standing
    fresh: bool


# For ``averaging.round.gathering.joining``


class AnswerCall(Struct, frozen=True):
    """Join the leader that called, or pass. The own standing has been compared with its head."""

    leader: PeerId
    head: Head | None
    until: float
    hurried: bool
    """A member is about to leave."""


class JoinCaller(Struct, frozen=True):
    """Join the leader that called if there is enough to offer, else pass."""

    leader: PeerId
    until: float
    hurried: bool


class ChangeLeader(Struct, frozen=True):
    """Send the join to another leader."""

    leader: PeerId


class Abandon(Struct, frozen=True):
    """Take back the attempt to get into a round. The phase is changed by the next transition."""

    reason: str


# For ``averaging.round.gathering.leading``


class AdmitJoin(Struct, frozen=True):
    """Count this join in the open roster."""

    sender: PeerId
    join: Join


class HoldJoin(Struct, frozen=True):
    """Keep this join until this peer has caught up with it, if it leads then; else refuse it."""

    sender: PeerId
    join: Join
    reason: str


class ReadmitHeld(Struct, frozen=True):
    """Judge the held joins again: this peer has caught up."""


class ReadmitJoin(Struct, frozen=True):
    """Judge a held join again."""

    sender: PeerId
    join: Join


class TakeBackOwnJoin(Struct, frozen=True):
    """Remove the own join from the open roster; a roster without joins is dropped."""


class PassOwnRoster(Struct, frozen=True):
    """This peer does not join the roster that it has open."""


class LeaveOwnRoster(Struct, frozen=True):
    """The attempt is over: take back the own join, pass, and see whether the roster closes."""


class CallLeader(Struct, frozen=True):
    """A leader of lower rank has called: call it, so that it sends its members here."""

    answer: AnswerCall


class HandOverRoster(Struct, frozen=True):
    """Another leader goes first: send the members of the open roster there."""

    leader: PeerId


class EnterOwnRound(Struct, frozen=True):
    """The open roster has closed: take part in its round as the leader."""

    signed: SignedCommit


# For ``averaging.round.gathering.catching_up``


class Compare(Struct, frozen=True):
    """A peer shows where it stands: catch up, rebase, or tell it that it should."""

    source: PeerId
    head: Head


class SettleFinalState(Struct, frozen=True):
    """One of two peers takes the other's state, which is final."""

    source: PeerId
    mine: Head
    relation: Apart
    theirs: Head


# From ``averaging.round.participation``


class RoundEnded(Struct, frozen=True):
    """The own part in a round is over without a new version."""

    round: bytes
    reason: str
    in_doubt: bool
    may_be_finished: bool = False
    """Some member may have finished the round, though this peer never will."""


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

"""The end of a run for one peer, and its leave-taking: a machine that decides and does nothing.

**By tokens** a run ends in its history (``averaging.rules.mixing``): a fragment is final at the
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

**A peer that leaves** has its work merged first, waits for others that leave too, lets its rounds
end, stays until another one has its versions, and saves (``peer.rules.leaving``). The first reason
to leave counts. Ctrl-C, SIGTERM and ``shoal leave`` all bring a ``Departure``; a second Ctrl-C is
``TRAINER_GONE``.

``Ending`` hears what happens and what was seen, and returns what is to be done, which
``peer.agent.leaving`` does. No other part of a peer decides that a run is over, or that this
peer leaves:

    arriving      -> taking part    it is in the run
    taking part   -> agreeing       the run has used its tokens, or is at its last version
    taking part   -> settling       the same, of a peer that stays after the end
    taking part   -> gathered       the date is near
    gathered      -> last rounds    the date is over
    last rounds   -> last work      no other learner is here
    last rounds   -> last drain     each fragment had its round, or nobody else trains any more
    last rounds   -> settling       the same, of a peer that stays after the end
    last work     -> last drain     its work is merged, or folded
    last drain    -> agreeing       no round is under way
    agreeing      -> draining       the others have the same versions
    settling      -> keeping        the same; the final model is exported
    keeping       -> settling       it has another model now
    agreeing      -> taking part    the owner has taken back a run that ended by tokens
    settling      -> taking part    the same
    keeping       -> taking part    the same
    IN_THE_RUN    -> offering       it is asked to leave
    offering      -> together       its work is merged
    together      -> draining       those that leave too have one model
    draining      -> handing over   no round is under way
    handing over  -> adopting       another peer has its versions
    adopting      -> saving         its trainer has adopted them
    IN_THE_RUN    -> cut short      it is asked to leave at once, or its trainer is gone
    LEAVES        -> cut short      its trainer is gone
    cut short     -> saving
    saving        -> gone

Each wait of a peer has an end, after which it goes the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from dht.identity import PeerId
from dht.membership.hello import ClockEstimate
from peer.quantities import tokens_left
from peer.rules.leaving import Departure, LastOffers, lacks, who_leaves_too
from peer.run_file.sections import End
from peer.status import PeerStatus

ENDED_BY_OWNER: Final = "the run's owner has ended it"
USED_ITS_TOKENS: Final = "the run has used its tokens"
REACHED_ITS_DATE: Final = "the run has reached its date"

LAST_ROUND_S: Final = 30.0
"""Time limit for a last round, and for leaving a run that has ended."""

CLOCKS_DIFFER_S: Final = 1.0
"""Uncertainty of the swarm's clock: a peer answers calls so long before the run's date, and begins
its own last rounds so long after it."""

AGREED_TIMES: Final = 2
"""Number of times in a row that a peer must see the others at its own versions before it goes."""

DRAIN_SHARE: Final = 0.4
"""Share of the time to leave in which rounds under way may end."""

PENDING_SHARE: Final = 0.4
"""Least share of the time to leave for a leaving peer to have merged what is pending."""

HAND_OVER_SHARE: Final = 0.2
"""Least share of the time to leave for another peer to take over this one's versions."""

FASTEST_SHARE: Final = 0.5
"""Share of that time in which the peer with the fastest line is the only one to be shown them."""

ADOPT_SHARE: Final = 0.2
ADOPT_MAX_S: Final = 2.0
"""Time for the trainer to adopt the last versions: a share of the time to leave, and at most."""

TOGETHER_S: Final = 10.0
"""Time after which a peer goes though others that leave at the same moment stand elsewhere."""

TOGETHER_LEAST_S: Final = 3.0
"""The same, after the own work was merged for longer than that."""


class State(StrEnum):
    """The stage at which a peer is on its way to its end."""

    ARRIVING = "arriving"
    TAKING_PART = "taking part"
    GATHERED = "gathered"
    """The date is near: all peers are one group, and answer every call."""
    LAST_ROUNDS = "last rounds"
    LAST_WORK = "last work"
    """Its work goes to a keeper, or is folded: no other learner is here at the date."""
    LAST_DRAIN = "last drain"
    """Rounds that were called just before the end must not make versions after it."""
    AGREEING = "agreeing"
    """The run is over: it stays while others need its versions, or it needs theirs."""
    SETTLING = "settling"
    """The same, of a peer that stays after the end."""
    KEEPING = "keeping"
    """It has exported the final model, and serves it."""
    OFFERING = "offering"
    """It leaves, and has its pending work merged."""
    TOGETHER = "together"
    """It waits for others that leave too, until all have one model."""
    DRAINING = "draining"
    HANDING_OVER = "handing over"
    """It waits until another peer has its versions."""
    ADOPTING = "adopting"
    """Its trainer adopts the last versions."""
    CUT_SHORT = "cut short"
    """It waits for nothing any more."""
    SAVING = "saving"
    GONE = "gone"


LEAVES: Final = frozenset(
    (
        *(State.AGREEING, State.OFFERING, State.TOGETHER, State.DRAINING),
        *(State.HANDING_OVER, State.ADOPTING),
    )
)
"""States of a peer that leaves, and still waits for something."""

IN_THE_RUN: Final = frozenset(State) - LEAVES - {State.CUT_SHORT, State.SAVING, State.GONE}
"""States of a peer that has no reason to leave yet."""

DONE: Final = {
    State.LAST_ROUNDS: State.LAST_DRAIN,
    State.LAST_WORK: State.LAST_DRAIN,
    State.AGREEING: State.DRAINING,
    State.SETTLING: State.KEEPING,
    State.OFFERING: State.TOGETHER,
    State.TOGETHER: State.DRAINING,
    State.DRAINING: State.HANDING_OVER,
    State.HANDING_OVER: State.ADOPTING,
    State.ADOPTING: State.SAVING,
    State.CUT_SHORT: State.SAVING,
    State.SAVING: State.GONE,
}
"""The next state when the purpose of one is achieved, or its time is over."""

LOOK_EVERY_S: Final = {State.LAST_ROUNDS: 0.5, State.AGREEING: 1.0, State.SETTLING: 1.0}
LOOK_ELSE_S: Final = 0.25


# --- what it hears ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A view of the peer itself and of its surroundings."""

    versions: tuple[int, ...] = ()
    model: str = ""
    final: Set[int] = frozenset()
    """Fragments that have reached the run's tokens, or its last version."""
    closed_ranks: bool = False
    in_flight: int = 0
    pending: int = 0
    """Own tokens that are not merged."""
    folds: int = 0
    paused: bool = False
    """The run's owner has paused it: nothing is merged."""
    learners: int = 0
    """Number of others who train."""
    date_left_s: float | None = None
    owner_set_version: bool = False
    """The run's owner has ordered its last version."""
    owner_set_date: bool = False
    state_bytes: int = 0
    """Bytes of all states, as one that takes them over fetches a fold."""
    round_bytes: int = 0
    """Bytes of all states, as the payload of rounds has them."""
    bytes_per_s: float = 0.0


class Heard(StrEnum):
    """Inputs that say everything by their name."""

    ARRIVED = "this peer is in the run"
    TRAINER_GONE = "the trainer has ended: nobody wants any more what this peer would bring"
    TAKEN_BACK = "the run's owner has taken it back to earlier states"
    ADOPTED = "the answer to Adopt"
    SAVED = "the answer to Do.SAVE"


@dataclass(frozen=True, slots=True)
class Look:
    """Time has passed. To be heard every ``look_every_s``."""

    seen: Seen


@dataclass(frozen=True, slots=True)
class Merged:
    """This peer has made a version."""

    final: Set[int]
    owner_set_version: bool


@dataclass(frozen=True, slots=True)
class CameToNothing:
    """A round of this fragment ended without a version."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to ``Ask`` in the order of those asked, and the view when they were there."""

    answers: Sequence[PeerStatus]
    asked: int
    seen: Seen


@dataclass(frozen=True, slots=True)
class Drained:
    """The answer to ``Drain``, and what was seen after it."""

    seen: Seen


Input: TypeAlias = (
    Heard | Look | Merged | CameToNothing | Departure | Answers | LastOffers | Drained
)
"""A ``Departure`` is a wish of the trainer, of the machine's owner, or by a signal; ``LastOffers``
are the answer to ``Do.OFFER``."""


# --- what is to be done -------------------------------------------------------------------------


class Do(StrEnum):
    """Effects that say everything by their name."""

    HURRY = "make fragments due once another one is final"
    GATHER = "put all peers into one group from now on, and join every leader that calls"
    OFFER = "offer pending work, and find out how much of it is left"
    END_MERGES = "merge nothing any more; of two states that are apart the lighter gives way"
    GREET = "say hello to the keepers, who take over work only of peers that they see"
    STOP = "end all other work of this peer"
    SAVE = "write a checkpoint"
    GOODBYE = "tell the others that this peer is gone"


class Whom(StrEnum):
    LEARNERS = "others who train"
    FOLLOWERS = "keepers, and learners even while they rest"
    TAKERS = "keepers; where there is none, the followers; the fastest line first"


ASKS: Final = {
    State.LAST_ROUNDS: Whom.LEARNERS,
    State.AGREEING: Whom.FOLLOWERS,
    State.SETTLING: Whom.FOLLOWERS,
    State.TOGETHER: Whom.FOLLOWERS,
    State.HANDING_OVER: Whom.TAKERS,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask others for their status."""

    whom: Whom


@dataclass(frozen=True, slots=True)
class Show:
    """Send these peers the own standing: one behind it catches up, one ahead of it answers."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class MakeDue:
    """Offer these fragments now."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Begin no round any more, and let those under way end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Adopt:
    """Let the trainer adopt the last versions."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Enter:
    """Be in this phase, for people to see."""

    phase: Literal["ready", "leaving"]
    text: str
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class Tell:
    """Report an event."""

    name: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Export:
    """Write the final model."""

    apart: str
    """Peers that ended the run elsewhere, and how."""


Effect: TypeAlias = Do | Ask | Show | MakeDue | Drain | Adopt | Enter | Tell | Export


# --- the machine --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Offering:
    """Pending work that is being handed over."""

    since: float
    least_s: float
    most_s: float
    folds: int
    """Folds before it."""
    bytes_at_first: int = 0
    told: int = 0
    """The tokens that were told last."""


class Ending:
    """The end of a run for one peer. The table is in the module's docstring."""

    def __init__(
        self,
        *,
        fragments: int,
        learns: bool,
        last_round_s: float = LAST_ROUND_S,
        stays: bool = False,
        ended_at: float | None = None,
    ) -> None:
        """``stays``: it serves the run after its end, too. ``ended_at``: see the attribute."""
        self.state = State.ARRIVING
        self.closed = set(range(fragments))
        """Fragments of which nothing is offered: those that are final, and all of one that arrives.
        It stays the same object."""
        self.ended_at = ended_at
        """Wall-clock time at which the run ended; ``None`` while it goes on."""
        self.departure: Departure | None = None
        """Why this peer leaves; ``None`` while it does not."""
        self._fragments = fragments
        self._learns = learns
        self._stays = stays
        self._last_round_s = last_round_s
        self._now = self._wall_time = 0.0
        self._seen = Seen()
        """The newest view."""
        self._rounds: LastRounds | None = None
        """The rounds at the run's date; ``None`` before it, and in a run that ends by tokens."""
        self._since = 0.0
        """Time at which this peer began to leave."""
        self._until = 0.0
        """Time at which the present state ends at the latest."""
        self._to_one_until = 0.0
        """Time until which the work is handed over to the fastest peer alone."""
        self._offering = _Offering(0.0, 0.0, 0.0, 0)
        self._agreed = 0
        self._waiting: list[str] = []
        self._apart = ""
        self._exported = ""
        """The name of the model that was exported."""

    def __repr__(self) -> str:
        return f"Ending({self.state}, closed={sorted(self.closed)}, {self.departure})"

    @property
    def trains_on(self) -> bool:
        """True while steps of the trainer may still be merged."""
        return self.is_calm or self.state is State.LAST_ROUNDS

    @property
    def is_calm(self) -> bool:
        """True while its model and its own pending work do not matter."""
        return self.state in (State.ARRIVING, State.TAKING_PART, State.GATHERED)

    def offers_last(self, pending: int) -> bool:
        """True while this peer makes no more steps, with work that may still be merged.

        ``pending``: its tokens that are not merged. Without any it is no company: a round would
        wait for it in vain, and another one that leaves would have its work merged too late.
        """
        is_over = self.departure is not None and self.departure.finished
        may_merge = self.state is State.LAST_WORK or (self.state in LEAVES and not is_over)
        return may_merge and pending > 0

    @property
    def look_every_s(self) -> float:
        return LOOK_EVERY_S.get(self.state, LOOK_ELSE_S)

    def hear(self, heard: Input, *, now: float, wall_time: float) -> list[Effect]:
        """Take note of what has happened. Returns what is to be done, in this order."""
        self._now, self._wall_time = now, wall_time
        match heard:
            case Look(seen):
                self._seen = seen
                return self._look()
            case Answers(answers, asked, seen):
                self._seen = seen
                return self._answered(answers, asked)
            case Drained(seen) if self.state in (State.LAST_DRAIN, State.DRAINING, State.CUT_SHORT):
                self._seen = seen
                return self._done()
            case Merged(final, by_owner):
                # At once: no version must follow the final one.
                return self._close(final, by_owner)
            case CameToNothing(fragment) if self._rounds is not None:
                self._rounds.came_to_nothing(fragment)
            case LastOffers() if self.state in (State.LAST_WORK, State.OFFERING):
                return self._offered(heard)
            case Departure() if self.state in IN_THE_RUN:
                return self._leave(heard)
            case Heard.ARRIVED if self.state is State.ARRIVING:
                return self._go(State.TAKING_PART)
            case Heard.TRAINER_GONE if self.state in IN_THE_RUN:
                return self._leave(TRAINER_IS_GONE)
            case Heard.TRAINER_GONE if self.state in LEAVES:
                return self._go(State.CUT_SHORT)
            case Heard.TAKEN_BACK if self._rounds is None:  # else it has ended by its date
                return self._taken_back()
            case Heard.ADOPTED if self.state is State.ADOPTING:
                return self._done()
            case Heard.SAVED if self.state is State.SAVING:
                return self._done()
            case Heard.SAVED if self.state is State.KEEPING:
                return [Export(self._apart)]
        return []

    def _go(self, state: State) -> list[Effect]:
        """Enter a state."""
        if self.state is State.ARRIVING:
            self.closed.clear()
        self.state = state
        timeout_s = 0.0 if self.departure is None else self.departure.timeout_s
        match state:
            case State.LAST_DRAIN:
                self.closed |= set(range(self._fragments))
                return [Drain(max(1.0, self._until - self._now))]
            case State.AGREEING | State.SETTLING:
                self._until, self._agreed, self._waiting = self._now + LAST_ROUND_S, 0, []
            case State.KEEPING:
                self._exported = self._seen.model
                return [Do.SAVE]
            case State.TOGETHER:
                rest_s = TOGETHER_S - (self._now - self._since)
                self._until = self._now + max(TOGETHER_LEAST_S, rest_s)
            case State.DRAINING:
                return [Drain(DRAIN_SHARE * timeout_s)]
            case State.CUT_SHORT:
                return [Drain(0.0)]
            case State.HANDING_OVER:
                stay_s = self._stay_to_hand_over_s()
                self._until = self._now + stay_s
                self._to_one_until = self._now + FASTEST_SHARE * stay_s
            case State.ADOPTING:
                return [Adopt(min(ADOPT_MAX_S, ADOPT_SHARE * timeout_s))]
            case State.SAVING:
                return [Do.STOP, Do.SAVE]
            case State.GONE if self.departure is not None and self.departure.finished:
                return [Export(self._apart), Do.GOODBYE]
            case State.GONE:
                return [Do.GOODBYE]
        return []

    def _done(self) -> list[Effect]:
        """Go on: the purpose of the present state is achieved, or its time is over."""
        seen, state, effects = self._seen, self.state, list[Effect]()
        match state:
            case State.LAST_ROUNDS if self._is_only_learner:
                left_s = self._until - self._now
                self._begin_to_offer(least_s=PENDING_SHARE * left_s, most_s=left_s)
                return self._go(State.LAST_WORK) + self._offer()
            case State.LAST_DRAIN:
                return [Do.END_MERGES, *self._over(self._date_reason)]
            case State.LAST_ROUNDS if self._stays:
                self.closed |= set(range(self._fragments))
                return [Do.END_MERGES, *self._over(self._date_reason)]
            case State.LAST_WORK | State.OFFERING if self._offering.told or seen.pending:
                fields = {
                    "merged": not seen.pending,
                    "alone": self._has_folded,
                    "tokens": seen.pending,
                    "seconds": self._now - self._offering.since,
                }
                effects.append(Tell("last_offers", fields))
            case State.AGREEING | State.SETTLING if self._waiting:
                self._apart = "; ".join(self._waiting)
                which = {"versions": list(seen.versions), "model": seen.model}
                effects.append(Tell("left_apart", {"text": self._apart, **which}))
            case State.DRAINING | State.CUT_SHORT if seen.in_flight:
                effects.append(Tell("drain_cut_short", {"in_flight": seen.in_flight}))
        return effects + self._go(DONE[state])

    # --- looks and answers ----------------------------------------------------------------------

    def _look(self) -> list[Effect]:
        seen, may_ask = self._seen, self._now < self._until
        match self.state:
            case State.TAKING_PART | State.GATHERED:
                return self._look_at_the_end()
            case State.LAST_WORK | State.OFFERING:
                return self._offer()
            case State.KEEPING if seen.model != self._exported:
                return self._go(State.SETTLING)
            case State.TOGETHER:
                may_ask &= bool(seen.versions) and not seen.paused
            case State.HANDING_OVER:
                may_ask &= bool(seen.versions)
        if self.state not in ASKS:
            return []
        return [Ask(ASKS[self.state])] if may_ask else self._done()

    def _answered(self, answers: Sequence[PeerStatus], asked: int) -> list[Effect]:
        seen, show = self._seen, Show(tuple(PeerId(answer.peer) for answer in answers))
        match self.state:
            case State.LAST_ROUNDS:
                return self._make_last_rounds(answers, asked)
            case State.AGREEING | State.SETTLING:
                by_date = self._rounds is not None or seen.closed_ranks
                waiting = who_differs(seen.versions, answers, by_date=by_date, model=seen.model)
                if seen.in_flight:
                    waiting.append("a round is under way")
                self._agreed = 0 if waiting else self._agreed + 1
                self._waiting = waiting if answers else []
                agree = not answers or self._agreed >= (AGREED_TIMES if by_date else 1)
                return self._done() if agree else [show]
            case State.TOGETHER:
                waits = who_leaves_too(seen.versions, answers, model=seen.model) or seen.in_flight
                return [Do.OFFER, show] if answers and waits else self._done()
            case State.HANDING_OVER:
                lack = [lacks(answer.versions, seen.versions) for answer in answers]
                if not lack or not all(lack):
                    return self._done()
                # One is enough, and several would share this peer's line.
                return [Show(show.peers[:1]) if self._now < self._to_one_until else show]
        return []

    # --- the run is over ------------------------------------------------------------------------

    def _look_at_the_end(self) -> list[Effect]:
        seen = self._seen
        if over := self._close(seen.final, seen.owner_set_version):
            return over
        effects: list[Effect] = [Do.HURRY] if seen.final else []
        left_s = seen.date_left_s
        if left_s is not None and left_s <= CLOCKS_DIFFER_S and self._rounds is None:
            self._rounds = LastRounds(seen.versions, seen.learners)
            effects += [Do.GATHER, *self._go(State.GATHERED)]
        if left_s is not None and left_s <= -CLOCKS_DIFFER_S and self._rounds is not None:
            self._until = self._now + self._last_round_s
            versions = list(self._rounds.versions)
            tells = Tell("last_round", {"versions": versions, "peers": seen.learners})
            effects += [tells, *self._go(State.LAST_ROUNDS)]
        return effects

    def _close(self, final: Set[int], by_owner: bool) -> list[Effect]:
        """Offer nothing of final fragments any more. The last one ends a run by tokens."""
        if self.state in (State.TAKING_PART, State.GATHERED, State.LAST_ROUNDS):
            self.closed |= final
        if self.state is State.TAKING_PART and len(self.closed) == self._fragments:
            return self._over(ENDED_BY_OWNER if by_owner else USED_ITS_TOKENS)
        return []

    def _make_last_rounds(self, answers: Sequence[PeerStatus], asked: int) -> list[Effect]:
        """Average every fragment once more with all live peers.

        A keeper stays open as long: homes that only dial out meet at it, and the only learner
        leaves it its work. One that does not answer may be dead, and counts as live for a while:
        without it this peer may be the only learner, and has work that is merged with nobody.
        """
        assert self._rounds is not None
        trains = any(
            each.phase in ("ready", "leaving") and each.ended_at is None for each in answers
        )
        if not trains and len(answers) >= asked:
            return self._done()
        if not self._learns:
            return []
        missing = self._rounds.missing(self._seen.versions)
        return [MakeDue(missing)] if missing else self._done()

    @property
    def _is_only_learner(self) -> bool:
        """True if nobody is here to merge with, and nobody had the last rounds with this peer: they
        may have ended before it, and it would fold work that they do not take any more."""
        assert self._rounds is not None
        has_had_them = self._rounds.others and not self._rounds.missing(self._seen.versions)
        return self._learns and not self._seen.learners and not has_had_them

    @property
    def _date_reason(self) -> str:
        return ENDED_BY_OWNER if self._seen.owner_set_date else REACHED_ITS_DATE

    def _over(self, reason: str) -> list[Effect]:
        """The run is over: leave it, or stay and serve what it ended with."""
        is_news = self.ended_at is None
        self.ended_at = self.ended_at or self._wall_time
        if self._stays:
            tells = Tell("ended_here", {"reason": reason})
            return [*([tells] if is_news else []), *self._go(State.SETTLING)]
        self.departure = Departure(reason, 0, finished=True, timeout_s=LAST_ROUND_S)
        self._since = self._now
        return [Enter("leaving", reason), *self._go(State.AGREEING)]

    def _taken_back(self) -> list[Effect]:
        """The owner has taken the run back: an end by tokens is void."""
        self.closed.clear()
        self.ended_at, self._exported = None, ""
        if self.state in (State.AGREEING, State.SETTLING, State.KEEPING):
            self.departure = None
            return [Enter("ready", "in the run", 1.0), *self._go(State.TAKING_PART)]
        if self.departure is not None:  # too late to stay, and not to export a wrong model
            self.departure = replace(self.departure, finished=False)
        return []

    # --- this peer leaves -----------------------------------------------------------------------

    def _leave(self, departure: Departure) -> list[Effect]:
        self.departure, self._since = departure, self._now
        enters = Enter("leaving", departure.reason)
        if departure.timeout_s <= 0:
            return [enters, *self._go(State.CUT_SHORT)]
        least_s, most_s = PENDING_SHARE * departure.timeout_s, departure.patience_s
        self._begin_to_offer(least_s=least_s, most_s=most_s)
        return [enters, Do.GREET, *self._go(State.OFFERING)]

    def _begin_to_offer(self, *, least_s: float, most_s: float) -> None:
        self._offering = _Offering(self._now, least_s, most_s, folds=self._seen.folds)

    def _offer(self) -> list[Effect]:
        """Wait for one more round of each fragment, so that no work is lost with this peer."""
        # Nothing is merged in a paused run until its owner resumes it, or after the run's end.
        may_merge = not self._seen.paused and len(self.closed) < self._fragments
        return [Do.OFFER] if self._seen.pending and may_merge else self._done()

    def _offered(self, left: LastOffers) -> list[Effect]:
        offering, pending = self._offering, self._seen.pending
        offering.bytes_at_first = offering.bytes_at_first or left.encoded_bytes
        effects: list[Effect] = []
        if pending != offering.told:
            if not offering.told:
                fields = {"tokens": pending, "seconds": left.expected_s}
                effects.append(Tell("handing_over", fields))
            offering.told = pending
            text = tokens_left(pending, left.expected_s)
            done = 1.0 - left.encoded_bytes / max(1, offering.bytes_at_first)
            effects.append(Enter("leaving", text, done))
        whole = replace(left, encoded_bytes=offering.bytes_at_first)
        stays_s = whole.patience_s(least_s=offering.least_s, most_s=offering.most_s)
        return effects + (self._done() if self._now - offering.since >= stays_s else [])

    @property
    def _has_folded(self) -> bool:
        """True if the pending work became this peer's own state, as nobody else trained."""
        return self._seen.folds > self._offering.folds

    def _stay_to_hand_over_s(self) -> float:
        """Time until another peer should have this one's versions."""
        assert self.departure is not None
        # A fold is fetched as a state, a round by its payload.
        size = self._seen.state_bytes if self._has_folded else self._seen.round_bytes
        left = LastOffers(encoded_bytes=size, bytes_per_s=self._seen.bytes_per_s)
        most_s = self.departure.patience_left_s(self._now - self._since)
        return left.patience_s(least_s=HAND_OVER_SHARE * self.departure.timeout_s, most_s=most_s)


TRAINER_IS_GONE: Final = Departure("the training program is gone", 0, finished=False, timeout_s=0.0)


# --- rules that need no state -------------------------------------------------------------------


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
    others: int = 0
    """Number of other learners then."""
    _void: set[int] = field(default_factory=set)

    def came_to_nothing(self, fragment: int) -> None:
        """A round of the fragment ended without a version."""
        self._void.add(fragment)

    def missing(self, versions: Sequence[int]) -> tuple[int, ...]:
        """Fragments with neither a new version nor a round that ended without one.

        ``versions`` is empty where the owner has taken the run back to states that are not here.
        """
        return tuple(
            fragment
            for fragment, (before, now) in enumerate(zip(self.versions, versions, strict=False))
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

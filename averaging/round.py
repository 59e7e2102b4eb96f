"""The round of one fragment as one peer lives it: a machine without clock, sockets or numbers.

``FragmentRounds`` takes inputs (messages, what the learner offers, what became of uploads, time)
and returns effects (``averaging.effects``). It holds no number of the model. One machine per
fragment and peer plays every part: member, leader, reducer, acceptor, successor.
``averaging.driver`` and the simulator run the same machine.

**Before the commit** (this module, ``averaging.leading``, ``averaging.gathering``)

    IDLE      nothing under way. Due, or called with enough steps: ``TakeSnapshot`` -> WANTED
    WANTED    the learner was asked. ``offered`` -> JOINING (or FOLDING, when alone)
    JOINING   ``Join`` sent to the leader I believe in. ``Noted`` -> PROMISED; ``Redirect`` -> the
              other one; silence or a broken link -> once more, then the next in rank
    PROMISED  to this leader and nobody else, until I ``Withdraw`` or hear ``Committed``,
              ``NoQuorum`` or ``Closed``. Another who calls is told ``Pass``, or joined instead
              (after ``Withdraw``) if its name ranks first
    ENTERED   a commit that names me holds for me: a ``Participation`` is under way
    CATCHING  behind or apart-and-light: the owner fetches; nothing is joined meanwhile
    FOLDING   alone: the owner makes the learner's parameters the state

Whoever receives a ``Join`` and finds that it is the first in rank leads: it answers ``Noted``,
calls the live peers of the group, and closes by ``averaging.quorum``. It needs no state for this. A
``Join`` from behind is answered ``Behind`` by anybody; one from ahead is held while the leader
itself catches up; one from another lineage is told to compare (the light side rebases) or taken for
a mix. Two leaders that meet settle it by rank: the lower one sends its members on.

**From the commit on** (``averaging.participation``, ``averaging.reducing``, ``averaging.sealing``)

    UPLOADING -> SEALED -> APPLYING -> FINISHED
        |           |
        +-----------+--> VOID (decided) or FORSWORN (given up: in doubt, or behind, or pending)

The commit is signed and never changes; its digest is the round's name. Members upload each slice to
its reducer, reducers report to the coordinator (the leader at first) who is complete, the
coordinator proposes as contributors those whom all reducers have, a majority of the roster accepts:
sealed. Reducers merge, members read the merged slices off the streams of their own uploads, and
apply.

**Who may say what.** A ballot belongs to one peer (``sealing.owner_of``); ``Prepare``, ``Propose``,
``Reassign`` and ``Forswear`` count only from its owner, and not below a promise. Everything about a
round counts only from its roster, its reducers and its leader. The rest is counted and dropped. All
messages may be lost, repeated or late: whatever matters is said again every ``resend_s`` until it
is answered or its deadline comes, and saying it twice changes nothing.

**Why it is safe**

1. *One seal.* The seal is single-decree Paxos among the roster. Ballot 0 is the leader's alone,
   and a leader that restarted is another incarnation that knows nothing of the round; so is an
   acceptor: it answers ``Declined`` and never votes again. Any later ballot asks a majority first
   and continues with the accepted seal of the highest ballot, so once a majority has accepted a
   seal no other can be chosen. "Void" is a seal like any other (an empty one): when it is chosen
   nobody can ever finish.
2. *All slices or none.* A seal names contributors whose uploads every reducer of the time had in
   full. The merged slice is a pure function of commit, seal and uploads. Who lacks one slice does
   not apply any.
3. *Same bytes.* The lineage hashes commit, seal and the digests of the merged slices: who got
   other bytes is apart at once, never silently different.
4. *Once per lineage.* A contribution is (mark, incarnation) in the commit, and ``merged`` moves
   with the version. A peer is in one round at a time; it offers work again only when it knows
   that the work is not in the lineage it follows: the round was void, or a majority forswore it,
   or the seal is known and leaves it out, or it never can be sealed without its own vote. Until
   then it is **in doubt**, asks the roster how it ended (``Ask``), and joins nothing. Whatever
   state it adopts meanwhile tells by its ``merged``.
5. *Lost slices.* A reducer that dies after the seal, being itself a contributor, takes its own
   upload of that slice along. Who has the merged slice hands it to the successor; if nobody has,
   the coordinator asks all to *forswear*, and a majority of vows ends the round as void for the
   living. Somebody among the others may have finished: that is a fork, apart from then on, to be
   rebased or mixed like any other; it cannot reach the lineage of those who vowed. The same
   holds for a doubt that ends after ``doubt_s`` without an answer. (A reducer could keep a copy
   of its own slice at its successor. That costs 1/n of the encoded fragment per round, half as
   much again in a group of two, to save a round in which nothing but time is lost, in the second
   between seal and answer. It is not done.)
6. *Two peers.* A majority of two is two: if I have not accepted the seal it cannot be chosen, so
   the death of the other leaves no doubt; if I have, it does.

**Nobody waits without a deadline.** Every phase has a timer (``deadline`` is the earliest), all
relative to the own clock; no time of another peer is compared with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from averaging import messages as said
from averaging.due import DueTime
from averaging.effects import (
    CatchUp,
    Discard,
    Effect,
    Fold,
    GiveUp,
    Note,
    Rebase,
    Send,
    Settle,
    TakeSnapshot,
    Value,
)
from averaging.gathering import Gathering
from averaging.grouping import PeerView
from averaging.leading import Leading
from averaging.lineage import Lineage, MergedMap
from averaging.messages import BadMessage, Commit, Head, Join, Message, Opening
from averaging.neighbourhood import Neighbourhood
from averaging.participation import Ended, Participation, Stage
from averaging.phase import Phase
from averaging.policy import RoundPolicy
from averaging.standing import (
    Apart,
    IAmBehind,
    Standing,
    TheyAreBehind,
    after_folding,
    relate,
)
from dht.identity import PeerId

ROUNDS_MAX = 16
"""Rounds of one fragment that a peer may be in at once: one as a member, others as they fade.

They fade for ``margin_s`` after everybody has finished; quick learners make several in that time.
"""
OUTCOMES_MAX = 64
LIARS_MAX = 64
DOUBTED_MARGINS = 4
"""A source that could not be caught up with is not tried again for so many ``margin_s``."""
ATTEMPTS_MAX = 6
"""Leaders that one attempt may turn to, redirects included."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the learner offers of the fragment, without the numbers. See
    ``averaging.port.Snapshot``."""

    mark: int
    steps: int
    tokens: int
    """Since the mark that my standing's ``merged`` shows for this incarnation (else since its
    start)."""
    base_version: int
    base_lineage: Lineage
    batch_tokens_max: int


@dataclass(slots=True)
class Doubt:
    """A contribution that may be merged where I cannot see it."""

    round: bytes
    commit: Commit
    mark: int
    ends_at: float
    ask_at: float
    wait_s: float
    forsworn: set[PeerId]


@dataclass(slots=True)
class Attempt:
    """One try to get into a round, from the offer to the commit."""

    join: Join
    leader: PeerId
    turns: int = 0
    resent: bool = False


class FragmentRounds:
    """All that one peer does about the rounds of one fragment. See the module.

    Every input takes ``now`` and returns effects, to be carried out in their order. ``tick`` is
    wanted at ``deadline``; earlier or more often does no harm.
    """

    __slots__ = (
        "_alone_since",
        "_begun_at_step",
        "_called_until",
        "_closed_version",
        "_doubted",
        "_fold",
        "_fresh_version",
        "_hint",
        "_interval",
        "_interval_at",
        "_joins",
        "_local",
        "_met_anybody",
        "_offer",
        "_out",
        "_outcomes",
        "_snapshot_used",
        "_source",
        "_step_time_s",
        "_timers",
        "_verify",
        "around",
        "attempt",
        "bytes_per_s",
        "codecs",
        "counters",
        "doubt",
        "due_time",
        "encoded_bytes",
        "founder",
        "fragment",
        "incarnation",
        "leading",
        "me",
        "mine",
        "phase",
        "policy",
        "rounds",
        "sign",
        "standing",
        "step",
        "topic",
    )

    def __init__(
        self,
        *,
        fragment: int,
        me: PeerId,
        incarnation: int,
        topic: bytes,
        policy: RoundPolicy,
        view: Mapping[PeerId, PeerView],
        standing: Standing | None,
        sign: Callable[[bytes], bytes],
        verify: Callable[[PeerId, bytes, bytes], bool],
        encoded_bytes: Callable[[str], int],
        codecs: tuple[str, ...],
        trains: bool = True,
        reachable: bool = True,
        bytes_per_s: float = 0.0,
        founder: bool = False,
        step: int = 0,
        now: float = 0.0,
    ) -> None:
        """``topic``: 16 bytes of run and layout, ``view``: kept up to date by the owner,
        ``standing``: ``None`` for an auxiliary without state, ``encoded_bytes``: the fragment's
        size under a codec, ``verify(peer, bytes, signature)``, ``step``: the learner's own step
        now.
        """
        self.fragment = fragment
        self.me = me
        self.incarnation = incarnation
        self.topic = topic
        self.policy = policy
        self.standing = standing
        self.sign = sign
        self._verify = verify
        self.encoded_bytes = encoded_bytes
        self.codecs = codecs
        self.bytes_per_s = bytes_per_s
        self.founder = founder
        self.step = step
        self.due_time = DueTime(policy.due, fragment=fragment, step=step)
        self.around = Neighbourhood(
            me=me,
            view=view,
            topic=topic,
            fragment=fragment,
            group_size=policy.group_size,
            suspect_s=policy.suspect_s,
            trains=trains,
            reachable=reachable,
            now=now,
        )
        self.leading = Leading(self, self.around)
        self.phase = Phase.IDLE
        self.counters: Counter[str] = Counter()
        self.rounds: dict[bytes, Participation] = {}
        self.mine: Participation | None = None
        self.doubt: Doubt | None = None
        self._step_time_s = 0.0
        self._begun_at_step = step
        self.attempt: Attempt | None = None
        self._offer: Offer | None = None
        self._fold = False
        self._alone_since: float | None = None
        self._met_anybody = False
        self._called_until: tuple[PeerId, float] | None = None
        self._closed_version = standing.version if standing else 0
        self._fresh_version = standing.version if standing else 0
        self._outcomes: OrderedDict[bytes, Head | None] = OrderedDict()
        self._hint: tuple[PeerId, Head] | None = None
        self._source: PeerId | None = None
        self._doubted: OrderedDict[PeerId, float] = OrderedDict()
        self._interval = policy.due.cycle_steps
        self._interval_at: float | None = None
        self._joins = 0
        self._timers: dict[str, float] = {}
        self._out: list[Effect] = []
        self._local: deque[Message] = deque()
        self._snapshot_used = False

    def __repr__(self) -> str:
        version = self.standing.version if self.standing else None
        return f"FragmentRounds({self.me}, fragment={self.fragment}, {self.phase}, v{version})"

    @property
    def trains(self) -> bool:
        """Whether I have a learner that takes part; without one I may lead and reduce."""
        return self.around.trains

    @trains.setter
    def trains(self, trains: bool) -> None:
        self.around.trains = trains

    @property
    def reachable(self) -> bool:
        """Whether others can dial me. Who cannot be dialled neither leads nor reduces."""
        return self.around.reachable

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        self.around.reachable = reachable

    @property
    def gathering(self) -> Gathering | None:
        """The roster that I have open as a leader."""
        return self.leading.gathering

    # Time

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is wanted, ``None`` when nothing waits."""
        times = list(self._timers.values())
        if self.gathering is not None:
            times.append(self.gathering.until)
        if self.doubt is not None:
            times.append(min(self.doubt.ask_at, self.doubt.ends_at))
        times += [at for part in self.rounds.values() if (at := part.next_at()) is not None]
        return min(times) if times else None

    def tick(self, now: float) -> list[Effect]:
        self.around.now = now
        for name in sorted(name for name, at in self._timers.items() if now >= at):
            if name in self._timers:
                del self._timers[name]
                self._ring(name, now)
        if self.gathering is not None and now >= self.gathering.until:
            self.leading.consider_closing(now)
        if self.doubt is not None:
            self._tick_doubt(self.doubt, now)
        for part in list(self.rounds.values()):
            part.tick(now)
            if now >= part.end_at and part.is_over:
                self._drop(part)
        return self._take(now)

    def _ring(self, name: str, now: float) -> None:
        if name == "snapshot" and self.phase is Phase.WANTED:
            self._idle(now, "the learner did not come to a safe point in time", retry=True)
        elif name == "answer" and self.attempt is not None:
            self._leader_silent(self.attempt, now)
        elif name == "catching" and self.phase is Phase.CATCHING:
            self._caught_up(None, now)
        elif name == "folding" and self.phase is Phase.FOLDING:
            self._fold = False
            self._idle(now, "folding took too long", retry=True)

    # The learner

    def progressed(self, step: int, step_time_s: float, now: float) -> list[Effect]:
        """The learner has done a step. Cheap; begins a round when one is due."""
        self.step = step
        self._step_time_s = step_time_s
        if self.phase is Phase.IDLE and self.due_time.is_due(step):
            return self.due(now)
        return []

    def due(self, now: float) -> list[Effect]:
        """The fragment is due at this peer. Skipped while it is busy; it stays due."""
        self.around.now = now
        self._due(now)
        return self._take(now)

    def _due(self, now: float) -> None:
        if not self._may_join():
            return
        self._fold = False
        if self.around.others_train(now):
            self._alone_since = None
            self._met_anybody = True
        else:
            if self._alone_since is None:
                self._alone_since = now
            founding = self.founder and not self._met_anybody
            if not founding and now - self._alone_since < self.policy.alone_s:
                self.event("alone")
                self.due_time.came_to_nothing(self.step, self._cycle(now))
                return
            self._fold = True
        self._want("alone, so I fold" if self._fold else "due", now)

    def _may_join(self) -> bool:
        return (
            self.phase is Phase.IDLE
            and self.trains
            and self.standing is not None
            and self.doubt is None
        )

    def _want(self, reason: str, now: float) -> None:
        self._to(Phase.WANTED)
        self._timers["snapshot"] = now + self.policy.snapshot_s
        self._out.append(TakeSnapshot(reason))

    def offered(self, offer: Offer | None, now: float) -> list[Effect]:
        """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing."""
        self.around.now = now
        if self.phase is not Phase.WANTED:
            self.counters["offer_not_wanted"] += 1
            if offer is not None and not self._snapshot_used:
                self._out.append(GiveUp(None, f"{self.phase}: not wanted any more", False))
        elif offer is None:
            self._idle(now, "the learner has nothing to offer", retry=True)
        else:
            self._timers.pop("snapshot", None)
            self._offered(offer, now)
        return self._take(now)

    def _offered(self, offer: Offer, now: float) -> None:
        assert self.standing is not None
        standing = self.standing
        known = standing.chain.find(offer.base_version, offer.base_lineage)
        if known is None:
            self._give_up_offer("its base is not in my chain", now)
            return
        if offer.steps < 1 or offer.tokens < 1:
            self._give_up_offer("nothing new since the last merge", now)
            return
        stale = standing.version - min(self._fresh_version, standing.version)
        if stale > self.policy.stale_max:
            self._fresh_version = standing.version
            self.event("stale", versions=stale)
            self._out.append(Discard(f"stale: began {stale} versions ago"))
            self._idle(now, f"began {stale} versions ago", retry=True)
            return
        self._offer = offer
        self._snapshot_used = True
        if self._fold:
            after = after_folding(
                standing,
                self.me,
                incarnation=self.incarnation,
                mark=offer.mark,
                tokens=offer.tokens,
            )
            self._to(Phase.FOLDING)
            self._timers["folding"] = now + self.policy.catch_up_s
            self._out.append(Fold(after, offer.mark, "alone"))
            return
        self._joins += 1
        join = Join(
            fragment=self.fragment,
            topic=self.topic,
            incarnation=self.incarnation,
            join=self._joins,
            head=standing.head(),
            merged_tokens=standing.merged.tokens,
            base_version=offer.base_version,
            staleness=stale,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
            batch_tokens_max=offer.batch_tokens_max,
            step_time_s=self._step_time_s,
            bytes_per_s=self.bytes_per_s,
            reachable=self.reachable,
            codecs=self.codecs,
        )
        called, self._called_until = self._called_until, None
        if self.gathering is not None:
            leader: PeerId | None = self.me
        elif called is not None and now <= called[1] and called[0] not in self.around.failed:
            leader = called[0]
        else:
            leader = self.around.leader(standing.version, (), now)
        if leader is None:
            self._give_up_offer("nobody can lead", now)
            return
        self._join(Attempt(join, leader), now)

    def _give_up_offer(self, reason: str, now: float) -> None:
        self._offer = None
        self.attempt = None
        self._snapshot_used = False
        self._out.append(GiveUp(None, reason, False))
        self._idle(now, reason, retry=True)

    def _idle(self, now: float, reason: str, *, retry: bool) -> None:
        """Nothing under way any more; what was offered, if anything, is settled already."""
        for name in ("snapshot", "answer", "catching", "folding"):
            self._timers.pop(name, None)
        self.attempt = None
        self._offer = None
        self._fold = False
        self._snapshot_used = False
        self._to(Phase.IDLE)
        self.event("idle", reason=reason)
        if retry:
            self.due_time.came_to_nothing(self.step, self._cycle(now))
        if self.gathering is not None:
            self.gathering.joins.pop(self.me, None)
            self.gathering.passed.add(self.me)
            self.leading.consider_closing(now)

    def folded(self, now: float) -> list[Effect]:
        """``Fold`` is done."""
        self.around.now = now
        if self.phase is Phase.FOLDING and self._offer is not None and self.standing is not None:
            standing = after_folding(
                self.standing,
                self.me,
                incarnation=self.incarnation,
                mark=self._offer.mark,
                tokens=self._offer.tokens,
            )
            self._stand(standing, fresh=True)
            self.due_time.closed(self.step, self._cycle(now))
            self.event("folded", version=standing.version)
            self._idle(now, "folded", retry=False)
        return self._take(now)

    # Finding the leader

    def _join(self, attempt: Attempt, now: float) -> None:
        self.attempt = attempt
        attempt.turns += 1
        if attempt.turns == 1:
            self.event("joining", leader=attempt.leader)
        self._to(Phase.JOINING)
        self._timers["answer"] = now + self.policy.answer_s
        failed = tuple(list(self.around.failed)[-said.FAILED_MAX :])
        attempt.join = _with_failed(attempt.join, failed)
        self.say(attempt.leader, attempt.join)

    def _leader_silent(self, attempt: Attempt, now: float) -> None:
        """My leader did not answer in time, or its link broke."""
        if attempt.leader == self.me:
            if self.gathering is None:
                self._give_up_offer("my gathering came to nothing", now)
            else:
                self._timers["answer"] = self.gathering.until + self.policy.answer_s
            return
        if not attempt.resent:
            attempt.resent = True
            self._timers["answer"] = now + self.policy.answer_s
            self.say(attempt.leader, attempt.join)
            return
        self.event("leader_silent", leader=attempt.leader, phase=str(self.phase))
        self.around.fail(attempt.leader, now)
        self.say(attempt.leader, said.Withdraw(self.fragment, attempt.join.join))
        self._next_leader(attempt, now)

    def _next_leader(self, attempt: Attempt, now: float) -> None:
        assert self.standing is not None
        leader = self.around.leader(self.standing.version, (), now)
        if leader is None or attempt.turns >= ATTEMPTS_MAX:
            self._give_up_offer("no leader answered", now)
            return
        attempt.resent = False
        self._joins += 1  # what I told the one before me must not hold any more
        attempt.join = _renumbered(attempt.join, self._joins)
        attempt.leader = leader
        self.event("next_leader", leader=leader)
        self._join(attempt, now)

    def follow(self, attempt: Attempt, leader: PeerId, now: float) -> None:
        """Take my ``Join`` to another leader."""
        if attempt.turns >= ATTEMPTS_MAX:
            self._give_up_offer("sent from one leader to another too often", now)
            return
        attempt.leader = leader
        attempt.resent = False
        self._joins += 1
        attempt.join = _renumbered(attempt.join, self._joins)
        self._join(attempt, now)

    # What others say

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """A message of this fragment from an authenticated peer."""
        self.around.now = now
        self._heard(sender, now)
        self._receive(sender, message, now)
        return self._take(now)

    def _heard(self, sender: PeerId, now: float) -> None:
        self.around.heard(sender)
        for part in self.rounds.values():
            part.heard(sender, now)

    def _receive(self, sender: PeerId, message: Message, now: float) -> None:
        match message:
            case Join():
                self.leading.joined(sender, message, now)
            case said.Noted():
                self._noted(sender, message, now)
            case said.Redirect():
                self._redirected(sender, message, now)
            case said.Call():
                self._called(sender, message, now)
            case said.Pass():
                self.leading.passed_by(sender, now)
            case said.Withdraw():
                self.leading.withdrawn(sender, message, now)
            case said.NoQuorum() | said.Refused():
                self._turned_away(sender, message, now)
            case said.Committed():
                self._committed(message, now)
            case said.Behind():
                self._told_behind(message, now)
            case said.Compare():
                self.compare(sender, message.head, now)
            case said.Closed():
                self._closed(sender, message, now)
            case _:
                self._of_round(sender, message, now)

    def _of_round(self, sender: PeerId, message: Message, now: float) -> None:
        round_id: bytes = message.round  # type: ignore[union-attr]
        part = self.rounds.get(round_id)
        if self.doubt is not None and self.doubt.round == round_id:
            self._about_doubt(self.doubt, sender, message, now)
        if part is not None:
            if not part.receive(sender, message, now):
                self.counters["stranger"] += 1
            return
        match message:
            case said.Finished():
                self.compare(sender, message.head, now)
            case said.Ask():
                self._asked(sender, round_id)
            case said.Prepare() | said.Propose() | said.Reassign() | said.Forswear():
                head = self._outcomes.get(round_id)
                if head is not None:
                    self.say(sender, said.Finished(self.fragment, round_id, head))
                else:
                    self.counters["unknown_round"] += 1
                    self._remember(round_id, None)
                    self.say(sender, said.Declined(self.fragment, round_id, "not in my rounds"))
            case _:
                self.counters["unknown_round"] += 1

    def _asked(self, sender: PeerId, round_id: bytes) -> None:
        """Somebody is in doubt about a round that I do not keep (any more)."""
        head = self._outcomes.get(round_id)
        if head is not None:
            self.say(sender, said.Finished(self.fragment, round_id, head))
            return
        # Not finished by this incarnation, and from now on never: should the commit still
        # come, it is declined.
        self._remember(round_id, None)
        mine = self.standing.head() if self.standing else None
        self.say(sender, said.Forsworn(self.fragment, round_id, mine))

    def _called(self, sender: PeerId, call: said.Call, now: float) -> None:
        if call.head is not None and self.standing is not None:
            self.compare(sender, call.head, now)
        if self.phase is Phase.CATCHING:
            self._called_until = (sender, now + call.wait_s)
            self.say(sender, said.Pass(self.fragment, "catching up"))
            return
        if self.gathering is not None:
            if not self.around.outranks(sender, self.me):
                self.say(sender, said.Pass(self.fragment, "I lead a gathering of my own"))
                return
            self.leading.hand_over(self.gathering, sender, now)
        if self.attempt is not None and self.phase in (Phase.JOINING, Phase.PROMISED):
            if self.attempt.leader == sender:
                return
            if self.attempt.leader == self.me:
                self.follow(self.attempt, sender, now)
            elif self.around.outranks(sender, self.attempt.leader):
                self.event("changed_leader", to=sender)
                withdraw = said.Withdraw(self.fragment, self.attempt.join.join)
                self.say(self.attempt.leader, withdraw)
                self.follow(self.attempt, sender, now)
            else:
                self.say(sender, said.Pass(self.fragment, "promised to another leader"))
            return
        self.maybe_come(sender, now + call.wait_s, now)

    def maybe_come(self, leader: PeerId, until: float, now: float) -> None:
        """I was called. Who has enough steps joins at once, the others say so."""
        if self.phase is Phase.WANTED:
            self._called_until = (leader, until)
            return
        enough = self.due_time.answers_call(self.step, self._cycle(now))
        if self._may_join() and enough:
            self._called_until = (leader, until)
            self._fold = False
            self._alone_since = None
            self._met_anybody = True
            self.event("came_when_called", leader=leader)
            self._want(f"called by {leader}", now)
            return
        reason = "in doubt" if self.doubt else "not enough steps" if not enough else self.phase
        if leader == self.me:
            if self.gathering is not None and self.phase not in (
                Phase.JOINING,
                Phase.PROMISED,
            ):
                self.gathering.passed.add(self.me)
        else:
            self.say(leader, said.Pass(self.fragment, str(reason)))

    # Joining

    def _answers_me(self, sender: PeerId, join: int) -> Attempt | None:
        attempt = self.attempt
        if attempt is None or attempt.leader != sender or attempt.join.join != join:
            self.counters["stale_answer"] += 1
            return None
        return attempt

    def _noted(self, sender: PeerId, message: said.Noted, now: float) -> None:
        attempt = self._answers_me(sender, message.join)
        if attempt is None or self.phase not in (Phase.JOINING, Phase.PROMISED):
            return
        self._to(Phase.PROMISED)
        attempt.resent = False
        longest = 2 * self.policy.quorum.wait_s
        self._timers["answer"] = now + min(message.wait_s, longest) + self.policy.margin_s

    def _redirected(self, sender: PeerId, message: said.Redirect, now: float) -> None:
        attempt = self._answers_me(sender, message.join)
        if attempt is None or self.phase not in (Phase.JOINING, Phase.PROMISED):
            return
        self.event("redirected", by=sender, to=message.leader)
        if message.leader == sender or message.leader in self.around.failed:
            self._give_up_offer("sent to a leader that does not answer me", now)
            return
        self.follow(attempt, message.leader, now)

    def _turned_away(
        self, sender: PeerId, message: said.NoQuorum | said.Refused, now: float
    ) -> None:
        if self._answers_me(sender, message.join) is not None:
            self.event("turned_away", by=sender, reason=message.reason)
            self._give_up_offer(message.reason, now)

    def _closed(self, sender: PeerId, message: said.Closed, now: float) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.leader == sender:
            self.event("too_late", leader=sender)
            self._give_up_offer("the roster closed without me", now)
        if message.round not in self.rounds:
            self.anchor(message.version, now)

    def anchor(self, version: int, now: float) -> None:
        """A roster closed, with me or without me: the next one is a cycle from here."""
        self._closed_version = max(self._closed_version, version)
        self.due_time.closed(self.step, self._cycle(now))

    # The commit

    def commit_message(self, part: Participation) -> said.Committed:
        return said.Committed(self.fragment, part.encoded, part.signature)

    def _committed(self, message: said.Committed, now: float) -> None:
        problem = self._learn_commit(message.commit, message.signature, now)
        if problem is not None:
            self.counters["commit_refused"] += 1

    def opening(
        self, sender: PeerId, opening: Opening, now: float
    ) -> tuple[str | None, list[Effect]]:
        """A bulk stream opens: may it send? ``None``, or why not; and effects first.

        The commit may come this way sooner than from the leader. It is judged by its signature,
        never by who carries it.
        """
        self.around.now = now
        self._heard(sender, now)
        part = self.rounds.get(opening.round)
        problem: str | None = None
        if part is None:
            if said.digest(opening.commit) != opening.round:
                problem = "the commit is not that of the round"
            else:
                problem = self._learn_commit(opening.commit, opening.signature, now)
            part = self.rounds.get(opening.round)
        if part is None:
            problem = problem or "this round is not mine"
        elif part.commit.index(sender) is None:
            problem = "the sender is not in the roster"
        elif opening.slice >= len(part.reducers):
            problem = f"slice {opening.slice} of {len(part.reducers)}"
        elif part.stage in (Stage.VOID, Stage.FORSWORN):
            problem = "the round is over for me"
        elif opening.slice not in part.reducer.slices:
            problem = "another peer reduces this slice"
        if problem is not None:
            self.counters["opening_refused"] += 1
        return problem, self._take(now)

    def _learn_commit(self, encoded: bytes, signature: bytes, now: float) -> str | None:
        """Take a commit from wherever it comes. Returns why it does not hold for me."""
        round_id = said.digest(encoded)
        if round_id in self.rounds:
            self.counters["repeated_commit"] += 1
            return None
        try:
            commit = said.decode_commit(encoded)
        except BadMessage as error:
            return str(error)
        if commit.topic != self.topic or commit.fragment != self.fragment:
            return "the commit is of another run, layout or fragment"
        if not self._verify(commit.leader, encoded, signature):
            self.counters["bad_signature"] += 1
            return "the commit is not signed by its leader"
        index = commit.index(self.me)
        if index is None and self.me not in commit.reducers:
            return "the commit does not name me"
        reason = self._objection(round_id, commit, index)
        if reason is not None:
            self.event("declined", leader=commit.leader, reason=reason)
            self.say(commit.leader, said.Declined(self.fragment, round_id, reason))
            return reason
        self.enter(round_id, commit, encoded, signature, leads=False, now=now)
        return None

    def _objection(self, round_id: bytes, commit: Commit, index: int | None) -> str | None:
        if round_id in self._outcomes:
            return "I gave this round up"
        if len(self.rounds) >= ROUNDS_MAX * (1 if self.trains else 8):
            return "too many rounds at once"
        if index is None:
            return None if self.reachable else "I can only dial out"
        entry = commit.members[index]
        attempt = self.attempt
        if entry.incarnation != self.incarnation:
            return "I have been restarted since"
        if attempt is None or attempt.leader != commit.leader:
            return "I am not promised to this leader"
        if entry.join != attempt.join.join:
            return "I have withdrawn that join"
        parent = commit.parents[entry.parent]
        if self.standing is None or parent.lineage != self.standing.lineage:
            return "I stand elsewhere now"
        if parent.version != self.standing.version:
            return "it gives my lineage another version"
        return self._objection_to_mix(commit)

    def _objection_to_mix(self, commit: Commit) -> str | None:
        """A leader that is behind, or knows no chain, may take history for another branch of it."""
        assert self.standing is not None
        old = {
            index
            for index, parent in enumerate(commit.parents)
            if parent.lineage != self.standing.lineage
            and self.standing.chain.find(parent.version, parent.lineage) is not None
        }
        if not old:
            return None
        for entry in commit.members:
            if entry.parent in old:
                self.say(entry.peer, said.Behind(self.fragment, self.standing.head(), self.me))
        return "it mixes versions that mine grew out of"

    def enter(
        self,
        round_id: bytes,
        commit: Commit,
        encoded: bytes,
        signature: bytes,
        *,
        leads: bool,
        now: float,
    ) -> None:
        index = commit.index(self.me)
        part = Participation(
            me=self.me,
            round_id=round_id,
            commit=commit,
            encoded=encoded,
            signature=signature,
            standing=self.standing,
            policy=self.policy,
            emit=self._out.append,
            send=self.say,
            note=self.event,
            is_down=self.around.is_down,
            ended=self._ended,
            now=now,
        )
        self.rounds[round_id] = part
        if index is not None:
            self._timers.pop("answer", None)
            self.attempt = None
            self.mine = part
            self._to(Phase.ENTERED)
            self.anchor(commit.version, now)
        part.begin(now, leads=leads)

    def _ended(self, part: Participation, ended: Ended, now: float) -> None:
        """Called by a participation: I am out of this round without a new version."""
        if self.mine is not part:
            if self.doubt is not None and self.doubt.round == part.id and not ended.in_doubt:
                self._settle(ended.reason)
            return
        self.mine = None
        in_doubt = ended.in_doubt
        self._out.append(GiveUp(part.id, ended.reason, in_doubt))
        assert part.entry is not None
        if in_doubt:
            self.event("in_doubt", reason=ended.reason)
            self.doubt = Doubt(
                round=part.id,
                commit=part.commit,
                mark=part.commit.members[part.entry].mark,
                ends_at=now + self.policy.doubt_s,
                ask_at=now + self.policy.resend_s,
                wait_s=self.policy.resend_s,
                forsworn={self.me},
            )
        self._idle(now, ended.reason, retry=True)
        hint, self._hint = self._hint, None
        if hint is not None:
            self.compare(hint[0], hint[1], now)

    # What became of uploads and slices

    def upload_arrived(
        self, round_id: bytes, slice_index: int, sender: PeerId, problem: str | None, now: float
    ) -> list[Effect]:
        """At a reducer: an ``own`` upload is here in full, finite and in bound, or ``problem``."""
        self.around.now = now
        part = self._part(round_id)
        if part is not None:
            part.upload_arrived(slice_index, sender, problem, now)
        return self._take(now)

    def upload_failed(
        self, round_id: bytes, slice_index: int, reason: str, now: float
    ) -> list[Effect]:
        """At a member: the stream broke before the merged slice came back on it."""
        self.around.now = now
        part = self._part(round_id)
        if part is not None:
            part.upload_failed(slice_index, reason, now)
        return self._take(now)

    def slice_merged(
        self, round_id: bytes, slice_index: int, digest: bytes, now: float
    ) -> list[Effect]:
        """At a reducer: ``Merge`` is done."""
        self.around.now = now
        part = self._part(round_id)
        if part is not None:
            part.slice_merged(slice_index, digest, now)
        return self._take(now)

    def merged_arrived(
        self, round_id: bytes, slice_index: int, digest: bytes, now: float
    ) -> list[Effect]:
        """The merged slice is here, from its reducer, or handed to me as its new reducer."""
        self.around.now = now
        part = self._part(round_id)
        if part is not None:
            part.merged_arrived(slice_index, digest, now)
        return self._take(now)

    def finished(
        self, round_id: bytes, now: float, *, merged: MergedMap | None = None
    ) -> list[Effect]:
        """``Apply`` is done. ``merged`` only after a mix: the map out of the merged slices."""
        self.around.now = now
        part = self._part(round_id)
        if part is None or part.stage is not Stage.APPLYING:
            return self._take(now)
        apply = part.applied
        assert apply is not None
        standing = apply.standing
        if merged is not None:
            standing = Standing(standing.version, standing.lineage, standing.chain, merged)
        self._stand(standing, fresh=apply.contained is not None)
        self.leading.timings.sync_took(now - part.entered_at)
        head = standing.head()
        self._remember(round_id, head)
        self.event(
            "finished",
            version=standing.version,
            contained=apply.contained is not None,
            kind=part.commit.kind,
            took_s=now - part.entered_at,
        )
        if self.mine is part:
            self.mine = None
            self._idle(now, "finished", retry=False)
        part.finished(head, now)
        self.leading.tell_late(round_id, head)
        hint, self._hint = self._hint, None
        if hint is not None:
            self.compare(hint[0], hint[1], now)
        return self._take(now)

    def _part(self, round_id: bytes) -> Participation | None:
        part = self.rounds.get(round_id)
        if part is None:
            self.counters["report_of_unknown_round"] += 1
        return part

    # Behind and apart

    def _told_behind(self, message: said.Behind, now: float) -> None:
        if message.source == self.me or self.standing is None:
            return
        apart = relate(self.standing.head(), self.standing.chain, message.head)
        if (
            not isinstance(apart, Apart)
            or apart.they_are_light
            or not self._believes(message.source, now)
        ):
            self.compare(message.source, message.head, now)
            return
        # A message shows some links of a chain; mine may lie between them. Who says so has looked
        # it up in all of its chain, and whatever is fetched must have it there as well.
        self._leave_attempt("behind", now)
        self.event("behind", source=message.source, version=message.head.version)
        version, lineage = message.head.version, message.head.lineage
        self._catch(CatchUp(message.source, version, lineage, "it found my lineage"), now)

    def _believes(self, source: PeerId, now: float) -> bool:
        """Whether I may catch up now, and this source has not failed me lately."""
        busy = self.phase in (Phase.ENTERED, Phase.FOLDING, Phase.CATCHING)
        return not busy and now >= self._doubted.get(source, now)

    def compare(self, source: PeerId, theirs: Head, now: float) -> None:
        """Somebody shows where it stands: catch up, rebase, or tell it that it should."""
        if self.standing is None or source == self.me:
            return
        if self.phase in (Phase.ENTERED, Phase.FOLDING):
            self._hint = (source, theirs)
            return
        if self.phase is Phase.CATCHING:
            return
        if now < self._doubted.get(source, now):
            self.counters["doubted_source"] += 1
            return
        mine = self.standing.head()
        match relate(mine, self.standing.chain, theirs):
            case IAmBehind():
                self._leave_attempt("behind", now)
                self.event("behind", source=source, version=theirs.version)
                self._catch(
                    CatchUp(source, theirs.version, theirs.lineage, "its chain holds my lineage"),
                    now,
                )
            case Apart() as apart if apart.i_am_light:
                self._leave_attempt("apart", now)
                self.event("rebase", source=source, mine=apart.mine, theirs=apart.theirs)
                self._catch(
                    Rebase(
                        source,
                        theirs.version,
                        theirs.lineage,
                        apart.ancestor,
                        f"merged since we parted: {apart.mine} tokens here, {apart.theirs} there",
                    ),
                    now,
                )
            case Apart() as apart if apart.they_are_light:
                self.say(source, said.Compare(self.fragment, mine))
            case TheyAreBehind():
                self.say(source, said.Behind(self.fragment, mine, self.me))
            case _:
                return

    def _leave_attempt(self, reason: str, now: float) -> None:
        attempt = self.attempt
        if attempt is not None:
            if attempt.leader != self.me:
                self.say(attempt.leader, said.Withdraw(self.fragment, attempt.join.join))
            elif self.gathering is not None:
                self.gathering.joins.pop(self.me, None)
        if self._snapshot_used:
            self._out.append(GiveUp(None, reason, False))
        self.attempt = None
        self._offer = None
        self._snapshot_used = False
        self._timers.pop("answer", None)
        self._timers.pop("snapshot", None)

    def _catch(self, effect: CatchUp | Rebase, now: float) -> None:
        self._to(Phase.CATCHING)
        self._timers["catching"] = now + self.policy.catch_up_s
        self._source = effect.source
        self._out.append(effect)

    def caught_up(self, standing: Standing | None, now: float) -> list[Effect]:
        """``CatchUp`` or ``Rebase`` is done; ``None``: it failed, and I stand where I stood."""
        self.around.now = now
        if self.phase is Phase.CATCHING:
            self._caught_up(standing, now)
        else:
            self.counters["caught_up_late"] += 1
            if standing is not None and self.phase is Phase.IDLE:
                self._stand(standing, fresh=False)
        return self._take(now)

    def _caught_up(self, standing: Standing | None, now: float) -> None:
        called, self._called_until = self._called_until, None
        source, self._source = self._source, None
        if standing is None:
            # It may have lied about what it has: others get a chance before it is believed again.
            if source is not None:
                self._doubted[source] = now + DOUBTED_MARGINS * self.policy.margin_s
                while len(self._doubted) > LIARS_MAX:
                    self._doubted.popitem(last=False)
            self.event("catch_up_failed")
            self._idle(now, "catching up failed", retry=True)
            return
        self._stand(standing, fresh=False)
        self.event("caught_up", version=standing.version)
        heard = standing.version <= self._closed_version
        self._idle(now, "caught up", retry=False)
        if not heard:
            self.anchor(standing.version, now)
        gathering = self.gathering
        if gathering is not None:
            gathering.passed.discard(self.me)
            self.leading.stand_elsewhere(gathering, now)
            self.maybe_come(self.me, now, now)
        elif called is not None and now < called[1]:
            self.maybe_come(called[0], called[1], now)

    def _stand(self, standing: Standing, *, fresh: bool) -> None:
        """From now on I stand here. ``fresh``: my work up to my last offer is contained."""
        before = self.standing
        mine = standing.merged.get(self.me)
        newcomer = self.step == self._begun_at_step
        if newcomer or fresh or before is None or mine != before.merged.get(self.me):
            # A newcomer's work begins here as well.
            self._fresh_version = standing.version
        self.standing = standing
        if self.doubt is not None:
            covered = standing.merged.covers(self.me, self.incarnation, self.doubt.mark)
            self.event("doubt_told", merged=covered)
            self.doubt = None

    # Doubt

    def _tick_doubt(self, doubt: Doubt, now: float) -> None:
        if now >= doubt.ends_at:
            self._settle(f"nobody could tell within {self.policy.doubt_s:g} s")
            return
        if now >= doubt.ask_at:
            doubt.wait_s = min(30.0, 2 * doubt.wait_s)
            doubt.ask_at = now + doubt.wait_s
            for entry in doubt.commit.members:
                if entry.peer not in doubt.forsworn:
                    self.say(entry.peer, said.Ask(self.fragment, doubt.round))

    def _about_doubt(self, doubt: Doubt, sender: PeerId, message: Message, now: float) -> None:
        if doubt.commit.index(sender) is None:
            return
        match message:
            case said.Finished():
                self.compare(sender, message.head, now)
            case said.Void():
                self._settle("the round is void")
            case said.Forsworn():
                if message.head is not None:
                    self.compare(sender, message.head, now)
                if self.phase is Phase.CATCHING or self.doubt is None:
                    return
                doubt.forsworn.add(sender)
                if len(doubt.forsworn) >= doubt.commit.majority:
                    self._settle("a majority has forsworn the round")
            case _:
                return

    def _settle(self, reason: str) -> None:
        assert self.doubt is not None
        self.event("settled", reason=reason)
        self._out.append(Settle(self.doubt.round, reason))
        self.doubt = None

    # Failures

    def lost(self, peer: PeerId, now: float) -> list[Effect]:
        """The link to a peer broke, or something could not be delivered to it."""
        self.around.now = now
        self.around.fail(peer, now)
        attempt = self.attempt
        if attempt is not None and attempt.leader == peer:
            # The message may be what was lost: say it again before turning to somebody else.
            at = now + self.policy.suspect_s
            self._timers["answer"] = min(at, self._timers.get("answer", at))
        if self.gathering is not None:
            self.leading.consider_closing(now)
        for part in list(self.rounds.values()):
            part.lost(peer, now)
        return self._take(now)

    def withdraw(self, reason: str, now: float) -> list[Effect]:
        """Leave: no new round from here on; one that is under way may still be finished."""
        self.around.now = now
        if self.phase in (Phase.WANTED, Phase.JOINING, Phase.PROMISED):
            self._leave_attempt(reason, now)
            self._idle(now, reason, retry=True)
        self.leading.dissolve(reason)
        self.trains = False
        return self._take(now)

    # Plumbing

    def say(self, to: PeerId, message: Message) -> None:
        if to == self.me:
            self._local.append(message)
        else:
            self._out.append(Send(to, message))

    def event(self, event: str, **fields: Value) -> None:
        self._out.append(Note(event, fields))

    def _to(self, phase: Phase) -> None:
        self.phase = phase

    def _take(self, now: float) -> list[Effect]:
        """All effects of this input, after what I said to myself has been heard."""
        while self._local:
            self._receive(self.me, self._local.popleft(), now)
        out = self._out[:]
        self._out.clear()
        return out

    def _remember(self, round_id: bytes, head: Head | None) -> None:
        self._outcomes[round_id] = head
        while len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

    def _drop(self, part: Participation) -> None:
        if part.id not in self._outcomes:
            self._remember(part.id, part.head)
        del self.rounds[part.id]
        part.forget()

    def _cycle(self, now: float) -> int:
        """H_i, from the median step time of the live peers; looked up now and then."""
        if self._interval_at is None or now - self._interval_at > 10.0:
            self._interval_at = now
            self._interval = self.due_time.interval(
                own_s=self._step_time_s, median_s=self.around.median_step_s(self._step_time_s, now)
            )
        return self._interval


def _with_failed(join: Join, failed: tuple[PeerId, ...]) -> Join:
    return msgspec.structs.replace(join, failed=failed)


def _renumbered(join: Join, number: int) -> Join:
    return msgspec.structs.replace(join, join=number)

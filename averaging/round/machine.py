"""The rounds of one fragment at one peer: a machine without clock, sockets or numbers.

``FragmentRounds.handle`` takes an input (``averaging.round.interface.inputs``) and the time, and
returns effects (``averaging.round.interface.effects``). It holds no number of the model. One
machine per fragment and peer plays every part: member, leader, reducer, acceptor, successor of a
dead leader. ``averaging.live.averager`` and the simulator run the same machine.

**Before the commit** (``averaging.round.gathering.joining``, ``averaging.round.gathering.leading``,
``averaging.round.gathering.roster``, ``averaging.round.gathering.catching_up``)

    IDLE      Nothing is under way. When due, or called with enough steps: ``TakeSnapshot``.
    WANTED    The learner was asked. With its offer the peer joins, or folds when it is alone.
    JOINING   ``Join`` was sent to the leader that this peer believes in. ``Noted`` binds it;
              ``Redirect`` names another leader. When the leader is silent or its link breaks, the
              join is sent once more, and then to the next in rank; so in all fragments if that
              leader alone is silent (``averaging.round.opinions.silence``). A leader with which
              joins fail again and again is passed over.
    PROMISED  Bound to this leader and no other, until ``Withdraw`` is sent or ``Committed``,
              ``NoQuorum`` or ``Closed`` arrives. Another leader that calls is told ``Pass``, or
              joined instead (after ``Withdraw``) if it ranks first by name.
    ENTERED   A commit that names this peer holds for it: a ``Participation`` is under way.
    CATCHING  Behind, or on the lighter side of a fork: the owner fetches; the peer joins nothing.
    FOLDING   Alone: the owner makes the learner's parameters the state.

A peer that receives a ``Join`` and finds that it is the first in rank leads: it answers ``Noted``,
calls the live peers of the group, and those that come into sight while the roster is open, until
each has answered, and closes it by ``averaging.rules.quorum``. A peer that is called answers
``Pass`` or ``Coming``; for the latter's snapshot the roster stays open. The leader needs no state
for this. Any peer answers ``Behind`` to a ``Join`` from behind. A ``Join`` from ahead is held while
the leader itself catches up, and sent to the next in rank if it does not. One from another lineage
is told to compare (the lighter side rebases), or taken for a mix. Two leaders that meet settle it
by rank: the lower one, when called, sends its members to the higher one; when the lower one calls,
the higher one calls back, or goes over itself if the other one will not follow it and nobody else
has joined it.

**Phases** (A message stands for ``Received``. ``RoundEnded`` stands for the input that ended a
round: it may lead to catching up, or to the next round, at once. An input that is not listed does
not change the phase, and one that is listed need not. ``tests/averaging/virtual/test_storms.py``
compares this table with what machines do.)

    IDLE      -> WANTED    Due Progressed Call Join CaughtUp RoundEnded
    IDLE      -> CATCHING  Behind Call Compare Finished Forsworn Join CaughtUp RoundEnded
    WANTED    -> JOINING   Offered
    WANTED    -> FOLDING   Offered
    WANTED    -> CATCHING  Behind Call Compare Finished Join
    WANTED    -> IDLE      Closed Offered Tick GiveWay Leave OrdersChanged
    JOINING   -> PROMISED  Noted
    JOINING   -> ENTERED   Committed StreamOpened Join
    JOINING   -> CATCHING  Behind Call Compare Finished Join
    JOINING   -> IDLE      Refused NoQuorum Closed Redirect Call Committed Tick GiveWay Leave
    JOINING   -> IDLE      Behind OrdersChanged
    PROMISED  -> JOINING   Redirect Refused Behind Call Join Tick PeerSilent Progressed
    PROMISED  -> ENTERED   Committed StreamOpened Join Pass LinkLost Tick
    PROMISED  -> CATCHING  Behind Call Compare Finished Join LinkLost Pass Tick
    PROMISED  -> IDLE      Refused NoQuorum Closed Redirect Call Tick GiveWay Leave
    PROMISED  -> IDLE      Committed StreamOpened OrdersChanged Progressed
    ENTERED   -> IDLE      Applied Void Forswear Declined Join Withdraw MergedArrived SliceMerged
    ENTERED   -> IDLE      Sealed LinkLost Tick
    CATCHING  -> IDLE      CaughtUp Tick
    FOLDING   -> IDLE      Folded Tick

One input may change the phase twice, and a message that a peer sends to itself is taken before
``handle`` returns. A leader enters its round by the input with which its roster closes.

**From the commit on** (``averaging.round.participation``, ``averaging.round.reducer``,
``averaging.round.sealing.paxos``, and ``averaging.round.sealing.doubt`` when it ends in doubt)

    UPLOADING -> SEALED -> APPLYING -> FINISHED
        |           |
        +-----------+--> VOID (decided) or FORSWORN (given up: in doubt, or behind, or pending)

The commit is signed and never changes; its digest is the round's name. Members upload each slice to
its reducer. Reducers report to the coordinator (the leader at first) which uploads are complete.
The coordinator proposes as contributors the members whose uploads all reducers have; when a
majority of the roster has accepted, the round is sealed. Reducers merge; members read the merged
slices from the streams of their own uploads, and apply.

**Authority.** A ballot belongs to one peer (``paxos.owner_of``). ``Prepare``, ``Propose``,
``Reassign`` and ``Forswear`` count only from its owner, and not below a promise. Messages about a
round count only from its roster, its reducers and its leader. All others are counted and dropped.
Any message may be lost, repeated or late: an important message is sent again every ``resend_s``
until it is answered or its deadline comes, and a repeat changes nothing.

**Why it is safe** stands in docs/understand/why-safe.md, for a reader of all parts.

**Several groups.** With more peers than one group holds, lineages part at every round, and
``averaging.rules.mixing`` says what follows: rounds **meld**. Members differ in their parents, all
of them contribute, and the new lineage grows out of the parents that a contributor stands on; a
member that stands on another parent leaves with its work pending. Four things differ from what is
said above and in that document:

- A peer that is behind by a version or two joins as it is.
- Peers are grouped, and ranked, by the newest version of which they heard a closing.
- The lighter side that rebases does not offer again what others go on with.
- A doubt that ends without an answer by the own lineage counts the work as merged, on another
  lineage (``Presume``): that one state lacks it says nothing about the others, and sooner or later
  all are mixed. A majority that forswore does not end such a doubt either: unless all members did,
  one may have finished and go on. The peer remembers of its last round that it was one of several
  (``several_groups_version``): a partition may hide the others later.

**The owner's orders.** All members of a round follow one directive of the run's owner
(``averaging.rules.orders``): the commit names that of its leader, which sends it ahead to peers
that may not know it, and a member that follows another one declines and sends its own. The codecs,
the cycle and the end are those of the directive at the version that the round makes. A paused
machine begins no round, and tells its directive to peers that join or call it: they may know that
the pause is over. After a rollback the owner of the machine replaces it, under another topic.

**The end** of a run: ``averaging.round.opinions.ending``.

**Every wait has a deadline.** Every phase but IDLE has a timer (``deadline`` is the earliest). All
deadlines are relative to the own clock; no time of another peer is compared with it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from averaging import messages
from averaging.history.standing import Standing
from averaging.messages import Commit, Committed, Head, Link, Message, ParentCertificate
from averaging.round.gathering.catching_up import ATTEMPTS_IN_VAIN, CatchingUp, UnreliableSources
from averaging.round.gathering.joining import UNUSUAL_FAILURE, Joining
from averaging.round.gathering.leading import Leading
from averaging.round.gathering.lingering import Lingering
from averaging.round.gathering.objections import members_behind, objection, overstatement_of_leader
from averaging.round.gathering.parents import Parents
from averaging.round.gathering.roster import OpenRoster
from averaging.round.interface import inputs, transitions
from averaging.round.interface.effects import (
    CountRefused,
    Effect,
    Forget,
    GiveUp,
    Note,
    RefuseStream,
    Send,
    Strike,
    Value,
    WarnOfCommit,
)
from averaging.round.interface.identity import Circumstances, Identity
from averaging.round.interface.inputs import Input
from averaging.round.interface.phase import Phase, Stage, Timer
from averaging.round.interface.signed_commit import (
    BadSignature,
    NotACommit,
    NotForThisPeer,
    SignedCommit,
    read_commit,
)
from averaging.round.interface.situation import Situation
from averaging.round.interface.transitions import Changes, Question, Transition
from averaging.round.opinions.certificates import SIGNATURES_SPARE, Certificates, link_of
from averaging.round.opinions.ending import Ending
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pace import Pace
from averaging.round.participation import Participation
from averaging.round.sealing.doubt import Doubt, Doubting
from averaging.round.sealing.outcomes import Outcomes
from averaging.rules import plausible
from averaging.rules.due import DueTime
from averaging.rules.mixing import Measured
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.probation import Probation
from averaging.rules.sites import carries, may_bring
from dht import protocol
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

ROUNDS_MAX = 16
"""Rounds of one fragment that a peer may be in at once: one as a member, others as they fade.

A round fades for ``margin_s`` after all have finished it; fast learners make several in that time.
"""
AUXILIARY_ROUNDS = 8
"""A peer without a learner leads and reduces for others: it may be in this many times as many."""
EARLY_MAX = 64
"""Messages that may wait for the commit that they are about; all of them are sent again."""
KEEP_OUT = (
    messages.Ask,
    messages.Prepare,
    messages.Propose,
    messages.Reassign,
    messages.Forswear,
)
"""Messages about an unknown round that are answered with never entering it. A member that had the
commit first kept others out of rounds whose leader had taken their joins."""


class FragmentRounds:
    """The round machine of one fragment at one peer. See the module.

    ``handle`` takes an input and the time, and returns effects, to be carried out in their order.
    ``Tick`` is wanted at ``deadline``.
    """

    def __init__(
        self,
        identity: Identity,
        circumstances: Circumstances | None = None,
        *,
        view: Mapping[PeerId, PeerView],
        standing: Standing | None,
        sources: UnreliableSources | None = None,
        probation: Probation | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> None:
        """``view``: kept up to date by the owner. ``standing``: ``None`` for an auxiliary peer
        without state. ``sources``, ``probation``: shared with the peer's other fragments. ``step``:
        the learner's own step now.
        """
        circumstances = circumstances or Circumstances()
        self._id = identity
        self.policy = identity.policy
        self.standing = standing
        version = standing.version if standing else 0
        self.peers = Neighbourhood(identity, circumstances, view, now=now, probation=probation)
        """The other peers as this one sees them. The owner may replace ``view`` and ``crowd``."""
        self._took_state(None, standing)
        self._look_for_own_work(standing)
        self.pace = Pace(identity, self.peers, step=step, version=version + 1)
        self._begun_at_step = step
        self.joining = Joining(identity, self.peers, self.pace)
        sources = sources or UnreliableSources(self.policy)
        self.certificates = Certificates(identity, self.peers, standing)
        self.catching_up = CatchingUp(identity, self.peers, sources, self.certificates)
        self.parents = Parents(identity, self.peers, self.certificates, self.catching_up)
        self.leading = Leading(identity, self.peers, self.pace, self.parents)
        self.doubting = Doubting(identity, self.peers)
        self.lingering = Lingering(identity, self.peers)
        self.phase = Phase.IDLE
        self.timers: dict[Timer, float] = {}
        self.counters: Counter[str] = Counter()
        self.rounds: dict[bytes, Participation] = {}
        self.own_round: Participation | None = None
        """The round that this peer is a member of."""
        self.outcomes = Outcomes(self.peers.worth)
        self.closed_version = version
        self._shown_version = version
        """The newest version of a certified head that another peer showed."""
        self.several_groups_version: int | None = None
        """The version of the last own round beside which other groups had theirs, as far as this
        peer saw then."""
        self.ending = Ending(
            identity, self.peers, self.pace, self.certificates, lambda: self._next_version
        )
        self.measured: Measured | None = None
        """Distance of this peer from its group at its last meld."""
        self.fresh_version = version
        """The version at which the pending work began."""
        self.fresh_at = now
        self._certificates_asked_of: bytes | None = None
        """The round of which a stream brought the commit before its parents were certified."""
        self.deadline: float | None = None
        """Time at which ``Tick`` is wanted; ``None``: nothing waits. Each input may move it."""
        self._effects: list[Effect] = []
        self._own_messages: deque[Message] = deque()
        self._early = BoundedMapping[object, tuple[PeerId, Message]](
            "early messages",
            EARLY_MAX,
            worth=lambda _, early: self.peers.worth(early[0]),
            author=lambda _, early: early[0],
        )
        """Messages about unknown rounds that came while this peer waits for a commit."""

    def __repr__(self) -> str:
        version = self.standing.version if self.standing else None
        who = f"{self._id.me}, fragment={self.fragment}"
        return f"FragmentRounds({who}, {self.phase}, v{version})"

    # For the owner

    def handle(self, given: Input, now: float) -> list[Effect]:
        """Take one input. Returns what to do, in order."""
        self.certificates.take_input()
        if self.phase is Phase.IDLE:
            self._apply(self.doubting.presume_open(now), now)
        if self.standing is not None and self.ending.is_reached_by(self.standing):
            self._consider_end(link_of(self.standing.head()), now)
        self._handle(given, now)
        self._hear_the_early(now)
        while self._own_messages:
            self._receive(self._id.me, self._own_messages.popleft(), now)
        self.lingering.ends_on(self.standing if self.ending.is_final(now) else None, now)
        self.deadline = self._next_at()
        effects, self._effects = self._effects, []
        return effects

    def _next_at(self) -> float | None:
        times = [
            *self.timers.values(),
            *(participation.next_at() for participation in self.rounds.values()),
        ]
        for at in (self.leading.next_at(), self.doubting.next_at(), self.lingering.next_at()):
            if at is not None:
                times.append(at)
        return min(times) if times else None

    @property
    def speaks(self) -> protocol.Range:
        """Oldest and newest protocol number that this peer speaks."""
        return self._id.speaks

    @property
    def fragment(self) -> int:
        return self._id.fragment

    @property
    def due_time(self) -> DueTime:
        return self.pace.due_time

    @property
    def open_roster(self) -> OpenRoster | None:
        """The roster that this peer has open as a leader."""
        return self.leading.roster

    @property
    def doubt(self) -> Doubt | None:
        """A contribution of this peer of which it is not known whether it is merged."""
        return self.doubting.doubt

    def policy_at(self, version: int) -> RoundPolicy:
        """The policy of a round that makes this version."""
        return self._id.policy_at(version)

    @property
    def _next_version(self) -> int:
        return 1 + (self.standing.version if self.standing is not None else self.closed_version)

    def is_called(self, now: float) -> bool:
        """True if a leader waits for this peer's join."""
        return self.joining.is_called(now)

    def wants_a_round(self, now: float) -> bool:
        """True if this peer is due, or called, and nothing is under way."""
        return self.joining.wants_a_round(self._situation(now), now)

    def alone_until(self, now: float) -> float | None:
        """When this peer begins to merge by itself; ``None``: it does, or others train."""
        if self.standing is None or self.peers.others_train(now):
            return None
        until = self.joining.alone_until(self._situation(now), now)
        return until if until > now else None

    # Inputs

    def _handle(self, given: Input, now: float) -> None:
        match given:
            case inputs.Received(sender, message):
                if not self._has_standing(sender, message):
                    self.counters["stranger"] += 1
                    if isinstance(message, messages.Join):
                        self._apply(self.leading.strangers_join(sender, message), now)
                    return
                self._heard(sender, now)
                self._receive(sender, message, now)
            case inputs.Progressed():
                self.pace.step, self.pace.step_time_s = given.step, given.step_time_s
                self._ask_who_is_back(now)
                if self.phase is Phase.PROMISED:
                    self._apply(self.joining.leader_seen_again(self._situation(now), now), now)
                if self.phase is Phase.IDLE and not given.waits and self.pace.is_due:
                    self._apply(self.joining.due(self._situation(now), now), now)
            case inputs.StepsCounted(step):
                self.pace.step = step
            case inputs.Tick():
                self._tick(now)
            case (
                inputs.UploadArrived()
                | inputs.UploadFailed()
                | inputs.SliceMerged()
                | inputs.MergedArrived()
            ):
                participation = self._participation(given.round)
                if participation is not None:
                    self._apply(participation.handle(given, now), now)
            case inputs.StreamOpened():
                self._stream_opened(given, now)
            case inputs.Due():
                self._apply(self.joining.due(self._situation(now), now), now)
            case inputs.Offered():
                self._offered(given, now)
            case inputs.GiveWay(reason):
                self._apply(self.joining.leave(reason, self._situation(now), retry=False), now)
            case inputs.Folded():
                self._apply(self.joining.folded(self._situation(now)), now)
            case inputs.Applied():
                self._applied(given, now)
            case inputs.CaughtUp():
                self._caught_up(given, now)
            case inputs.LinkLost(peer):
                self.peers.mark_failed(peer, now)
                answer_at = self.timers.get(Timer.ANSWER)
                self._apply(self.joining.link_lost(peer, answer_at, now), now)
                self._go_on_without(peer, now)
            case inputs.PeerSilent(peer):
                self.peers.mark_failed(peer, now)
                self._apply(self.joining.peer_silent(peer, self._situation(now), now), now)
                self._go_on_without(peer, now)
            case inputs.Leave(reason):
                self._apply(self.joining.leave(reason, self._situation(now), retry=True), now)
                self._apply(self.leading.dissolve(reason), now)
                self.peers.trains = False
            case inputs.ReachabilityChanged(reachable):
                self.peers.reachable = reachable
            case inputs.LineMeasured(bytes_per_s):
                self.peers.bytes_per_s = bytes_per_s
                self._consider_line(now)
            case inputs.EndIsNear():
                self.ending.comes_near()
            case inputs.MergeBeforeLeaving(leaves):
                self.due_time.eager = leaves or self.ending.is_near
                if leaves:
                    self._apply(self.joining.leave_soon(self._situation(now)), now)
                self.joining.leaves = leaves
            case inputs.LastRoundOver():
                self.ending.is_over = True
                reason = "the run has reached its date"
                self._apply(self.joining.leave(reason, self._situation(now), retry=False), now)
                self._apply(self.leading.dissolve(reason), now)
            case inputs.OrdersChanged():
                self._orders_changed(now)

    def _orders_changed(self, now: float) -> None:
        """The run's owner wants something else: committed rounds go on, joins and rosters end."""
        self._amend()
        paused = self._id.book.orders.paused
        if paused is not None:
            self._apply(self.joining.leave(paused, self._situation(now), retry=False), now)
            self._apply(self.leading.dissolve(paused), now)

    def _amend(self) -> None:
        self.pace.amend(self._id.policy_at(self._next_version))

    def _consider_line(self, now: float) -> None:
        """The line has become faster or slower, or its load has: take part in more versions or in
        fewer, and ask for smaller rounds or for larger ones."""
        need = self.pace.need_of_line(self._id.encoded_bytes, now)
        if need is not None:
            level = str(self.pace.levels[need.level])
            self._note("line_needs", level=level, reason=need.reason)
        every = self.pace.versions_of_line(self._id.encoded_bytes, now)
        if every is not None:
            self._note("takes_part", every=every.versions, reason=every.reason)

    def _tick(self, now: float) -> None:
        for timer in sorted(timer for timer, at in self.timers.items() if now >= at):
            if timer in self.timers:
                del self.timers[timer]
                self._ring(timer, now)
        self._apply(self.leading.tick(self._situation(now), now), now)
        self._apply(self.doubting.tick(now), now)
        self._apply(self.lingering.tick(self.standing, now), now)
        for participation in list(self.rounds.values()):
            self._apply(participation.handle(inputs.Tick(), now), now)
            if now >= participation.end_at and not participation.is_open:
                self._drop(participation, now)

    def _ring(self, timer: Timer, now: float) -> None:
        if timer is Timer.ANSWER:
            self._apply(self.joining.leader_silent(self._situation(now), now), now)
        elif timer is Timer.SNAPSHOT and self.phase is Phase.WANTED:
            self._apply(self.joining.snapshot_late(), now)
        elif timer is Timer.FOLDING and self.phase is Phase.FOLDING:
            self._apply(self.joining.folding_late(), now)
        elif timer is Timer.CATCHING and self.phase is Phase.CATCHING:
            limit_s = now - self.catching_up.began_at
            self._caught_up(inputs.CaughtUp(None, reason=f"not done within {limit_s:.0f} s"), now)

    def _offered(self, offered: inputs.Offered, now: float) -> None:
        standing = self.standing
        leads_others = (
            standing is not None
            and not self.peers.has_several_groups(now)
            and any(
                participation.coordinates
                and participation.is_open
                and participation.entry is None
                and participation.commit.version > standing.version
                for participation in self.rounds.values()
            )
        )
        changes = self.joining.offered(
            offered.offer, self._situation(now), now, leads_others=leads_others
        )
        self._apply(changes, now)

    def _go_on_without(self, peer: PeerId, now: float) -> None:
        """A peer has failed: the open roster and the rounds go on without it."""
        self._apply(self.leading.consider_closing(self._situation(now), now), now)
        self._tell_rounds(inputs.LinkLost(peer), now)

    def _caught_up(self, given: inputs.CaughtUp, now: float) -> None:
        standing, before = given.standing, self.standing
        self._took_state(before, standing)
        if self.phase is not Phase.CATCHING:
            self.counters["caught_up_late"] += 1
            if standing is not None and self.phase is Phase.IDLE:
                self._apply([transitions.Stand(standing, fresh=False)], now)
        else:
            call = self.joining.take_call()
            asks = self.catching_up.ended(standing, given.held_s, self.standing, now)
            if standing is None:
                released = self.leading.release_held("I am behind you, and cannot catch up")
                idle = self.joining.become_idle("catching up failed", retry=True)
                failed = Note("catch_up_failed", {"reason": given.reason})
                self._apply([failed, *released, *idle], now)
            else:
                self._stand_where_fetched(standing, call, now)
            self._apply(asks, now)
        if standing is not None and given.since is not None:
            self.fresh_version = min(given.since, self.fresh_version)
            given_up = before.merged.get(self._id.me) if before is not None else None
            if given_up is not None and given_up.incarnation == self._id.incarnation:
                self.doubting.leave_open(given_up.step)

    def _stand_where_fetched(
        self, standing: Standing, call: transitions.JoinCaller | None, now: float
    ) -> None:
        heard_closing = standing.version <= self.closed_version
        changes: Changes = [
            transitions.Stand(standing, fresh=False),
            Note("caught_up", {"version": standing.version}),
            *self.joining.become_idle("caught up", retry=False),
        ]
        if not heard_closing:
            changes.append(transitions.RosterClosed(standing.version))
        self._apply(changes, now)
        if self.open_roster is not None:
            hurried = self.open_roster.is_hurried
            self._apply(self.leading.review(self._situation(now), now), now)
            self._apply([transitions.JoinCaller(self._id.me, now, hurried)], now)
        elif call is not None and now < call.until:
            self._apply([call], now)

    # Messages

    def _has_standing(self, sender: PeerId, message: Message) -> bool:
        """True if this peer's messages may count at all: it is known, or in a roster with this one.

        A roster is its leader's word, and a leader takes only joins of peers that it knows.
        """
        if self.peers.knows(sender):
            return True
        round_id = getattr(message, "round", None)
        participation = self.rounds.get(round_id) if round_id is not None else None
        return participation is not None and participation.commit.index(sender) is not None

    def _heard(self, sender: PeerId, now: float) -> None:
        self.peers.mark_heard(sender, now)
        for participation in self.rounds.values():
            participation.heard(sender, now)

    def _ask_who_is_back(self, now: float) -> None:
        """Show peers that were out of reach where this one stands: both sides of a partition go
        one way again before their next rounds, and not in them."""
        for peer in self.peers.back():
            if self.standing is not None and self.peers.knows(peer):
                compare = messages.Compare(self.fragment, self.standing.head())
                self._send(peer, compare, now)

    def _receive(self, sender: PeerId, message: Message, now: float) -> None:
        head: Head | None = getattr(message, "head", None)
        reason = None if head is None else self._leap(head)
        if reason is not None:
            self.counters["implausible_head"] += 1
            fields = {"peer": sender, "reason": reason}
            self._effects.append(CountRefused("implausible", fields, "implausible_head"))
            return
        if head is not None:
            self.certificates.hear(link_of(head), head.signatures, now)
            self.lingering.heard(sender, head)
        self._apply(self._answer(sender, message, now), now)

    def _leap(self, theirs: Head) -> str | None:
        return plausible.leap(self.standing.head() if self.standing is not None else None, theirs)

    def _answer(self, sender: PeerId, message: Message, now: float) -> Changes:
        match message:
            case messages.Join():
                self._saw_head(message.head, now)
                self._tell_rounds(inputs.Received(sender, message), now)
                return self.leading.joined(sender, message, self._situation(now), now)
            case messages.Noted():
                return self.joining.noted(sender, message, self._situation(now), now)
            case messages.Redirect():
                return self.joining.redirected(sender, message, self._situation(now), now)
            case messages.Call():
                self._saw_head(message.head, now)
                return self.joining.called(sender, message, self._situation(now), now)
            case messages.Coming():
                return self.leading.coming(sender, message, self._situation(now), now)
            case messages.Pass():
                return self.leading.passed(sender, self._situation(now), now)
            case messages.Withdraw():
                self._tell_rounds(inputs.Received(sender, message), now)
                return self.leading.withdrawn(sender, message)
            case messages.NoQuorum() | messages.Refused():
                situation = self._situation(now)
                changes = self.joining.turned_away(sender, message, situation, now)
                if isinstance(message, messages.Refused):
                    changes += self.catching_up.refused(situation, now)
                return changes
            case messages.Closed():
                known = message.round in self.rounds
                situation = self._situation(now)
                return self.joining.too_late(sender, message, situation, now, knows_round=known)
            case messages.Committed():
                problem = self._learn_commit(
                    sender, message.commit, message.signature, now, beside=message.certificates
                )
                if problem is not None:
                    self.counters["commit_refused"] += 1
                return []
            case messages.Behind():
                self._saw_head(message.head, now)
                changes = self.catching_up.receive_behind(message, self._situation(now), now)
                if not self.catching_up.may_take(link_of(message.head), now):
                    situation = self._situation(now)
                    changes += self.joining.told_behind_in_vain(sender, situation, now)
                return changes
            case messages.Compare():
                self._saw_head(message.head, now)
                signed = self.catching_up.sign_for(sender, message.head, self._situation(now), now)
                return [*signed, transitions.Compare(sender, message.head)]
            case messages.Bits() | messages.Accused() | messages.Directed() | messages.Suspected():
                return [transitions.Count(f"{type(message).__name__.lower()}_is_the_owners")]
            case messages.Finished():
                self._saw_head(message.head, now)
        self._about_round(sender, message, now)
        return []

    def _tell_rounds(self, given: inputs.LinkLost | inputs.Received, now: float) -> None:
        for participation in list(self.rounds.values()):
            self._apply(participation.handle(given, now), now)

    def _about_round(self, sender: PeerId, message: Message, now: float) -> None:
        round_id: bytes = message.round  # type: ignore[union-attr]
        participation = self.rounds.get(round_id)
        if self.doubting.is_answered_by(sender, round_id):
            self._receive_in_doubt(sender, message, now)
        if participation is not None:
            self._apply(participation.handle(inputs.Received(sender, message), now), now)
            return
        may_come = self._awaits_a_commit and round_id not in self.outcomes
        if may_come and isinstance(message, KEEP_OUT):
            self._early[object()] = sender, message
            return
        match message:
            case messages.Finished():
                self._apply([transitions.Compare(sender, message.head)], now)
            case messages.Ask():
                # Not finished by this incarnation, and from now on never: should the commit still
                # come, it is declined.
                mine = self.standing.head() if self.standing else None
                signature = self._id.sign(messages.vow(round_id))
                vow = messages.Forsworn(self.fragment, round_id, mine, signature)
                self._answer_unknown_round(sender, round_id, vow, now)
            case (
                messages.Prepare() | messages.Propose() | messages.Reassign() | messages.Forswear()
            ):
                if self.outcomes.head(round_id) is None:
                    self.counters["unknown_round"] += 1
                absent = self.outcomes.is_absent(round_id)
                reason = "not in my rounds"
                declined = messages.Declined(self.fragment, round_id, reason, absent=absent)
                self._answer_unknown_round(sender, round_id, declined, now)
            case _:
                self.counters["unknown_round"] += 1

    def _answer_unknown_round(
        self, sender: PeerId, round_id: bytes, vow: Message, now: float
    ) -> None:
        """Say how a round ended that is not kept (any more), or vow to have no part in it."""
        head = self.outcomes.head(round_id)
        if head is not None:
            self._send(sender, messages.Finished(self.fragment, round_id, head), now)
        else:
            self.outcomes.keep_out(round_id, sender)
            self._send(sender, vow, now)

    @property
    def _awaits_a_commit(self) -> bool:
        """True if another leader may have a round for this peer, which does not know its name."""
        attempt = self.joining.attempt
        return attempt is not None and attempt.leader != self._id.me

    def _hear_the_early(self, now: float) -> None:
        """Take what was said of rounds whose commits might still have come."""
        while self._early and not self._awaits_a_commit:
            sender, message = self._early.pop(next(iter(self._early)))
            self._about_round(sender, message, now)

    def _receive_in_doubt(self, sender: PeerId, message: Message, now: float) -> None:
        if isinstance(message, (messages.Finished, messages.Forsworn)):
            if message.head is not None:
                self._apply([transitions.Compare(sender, message.head)], now)
            if self.phase is Phase.CATCHING:
                return
        self._apply(self.doubting.receive(sender, message, now), now)

    # The commit

    def _stream_opened(self, opened: inputs.StreamOpened, now: float) -> None:
        self._heard(opened.sender, now)
        problem = self._refusal(opened, now)
        if problem is not None:
            self.counters["opening_refused"] += 1
            self._effects.append(RefuseStream(problem))

    def _refusal(self, opened: inputs.StreamOpened, now: float) -> str | None:
        """The reason why the stream may not send; ``None`` if it may."""
        opening = opened.opening
        participation = self.rounds.get(opening.round)
        if participation is None:
            if messages.digest(opening.commit) != opening.round:
                return "the commit is not that of the round"
            problem = self._learn_commit(opened.sender, opening.commit, opening.signature, now)
            participation = self.rounds.get(opening.round)
            if participation is None:
                return problem or "this round is not mine"
        member = participation.commit.index(opened.sender)
        if member is None:
            return "the sender is not in the roster"
        if opening.slice >= len(participation.reducers):
            return f"slice {opening.slice} of {len(participation.reducers)}"
        if participation.stage in (Stage.VOID, Stage.FORSWORN):
            return "the round is over for me"
        if not may_bring(participation.commit, member, opening.riders):
            return "it carries members of other sites"
        reduces = opening.slice in participation.reducer.slices
        if not reduces and not carries(participation.commit, participation.entry, member):
            return "another peer reduces this slice"
        return None

    def _learn_commit(
        self,
        sender: PeerId,
        encoded: bytes,
        signature: bytes,
        now: float,
        *,
        beside: tuple[ParentCertificate, ...] | None = None,
    ) -> str | None:
        """Take a commit from wherever it comes. Returns why it does not hold for this peer.

        ``beside``: the certificates that its leader sent with it; ``None``: it came by a stream.
        """
        if messages.digest(encoded) in self.rounds:
            self.counters["repeated_commit"] += 1
            return None
        try:
            signed = read_commit(encoded, signature, self._id)
        except BadSignature as error:
            self.counters["bad_signature"] += 1
            return str(error)
        except NotACommit as error:
            fields = {"peer": sender, "reason": str(error)}
            self._effects.append(WarnOfCommit("not_a_commit", fields))
            return str(error)
        except NotForThisPeer as error:
            return str(error)
        commit = signed.commit
        self.parents.hear(commit, beside or (), now)
        for parent in commit.parents:
            if self.certificates.is_certified(parent, now):
                self._consider_end(parent, now)
        reason = self.parents.objection(commit, now)
        if reason is not None and beside is None:
            self._ask_for_certificates(signed, now)
            return reason
        reason = reason or self._objection(signed.round, commit, now)
        if reason is None:
            self._enter(signed, now, is_leader=False)
            return None
        self._decline(signed, reason, now)
        return reason

    def _decline(self, signed: SignedCommit, reason: str, now: float) -> None:
        """Do not enter a round, now or later, and tell its leader why."""
        commit = signed.commit
        if commit.directive != self._id.book.orders.stamp:
            self._tell_directive(commit.leader, now)
        index = commit.index(self._id.me)
        mine = index is not None and self.joining.has_made(commit.members[index])
        absent = self.outcomes.decline(signed.round, names_this_machine=mine)
        self._note("declined", leader=commit.leader, reason=reason)
        median_step_s = self.pace.median_step_s(now)
        overstated = overstatement_of_leader(commit, self.peers, median_step_s, now)
        if overstated is not None:
            fields = {"peer": commit.leader, "reason": f"it claims {overstated}"}
            self._effects.append(Strike("overstated", fields))
        situation = self._situation(now)
        self._send(
            commit.leader,
            messages.Declined(self.fragment, signed.round, reason, absent=absent),
            now,
        )
        self._apply(self.joining.commit_refused(commit, reason, situation), now)

    def _ask_for_certificates(self, signed: SignedCommit, now: float) -> None:
        """Ask the leader for a commit that a stream brought: certificates come beside it."""
        attempt = self.joining.attempt
        if attempt is None or attempt.leader != signed.commit.leader:
            return
        if self._certificates_asked_of != signed.round:
            self._certificates_asked_of = signed.round
            self._send(attempt.leader, attempt.join, now)

    def _objection(self, round_id: bytes, commit: Commit, now: float) -> str | None:
        """The reason not to enter the round; ``None`` if there is none."""
        if round_id in self.outcomes:
            return "I gave this round up"
        for parent in commit.parents:
            leap = self._leap(Head(parent.version, parent.lineage, (parent,)))
            if leap is not None:
                return leap
        if len(self.rounds) >= ROUNDS_MAX * (1 if self.peers.trains else AUXILIARY_ROUNDS):
            return "too many rounds at once"
        situation = self._situation(now)
        reason = objection(
            commit,
            self._id,
            situation,
            self.peers,
            median_step_s=self.pace.median_step_s(now),
            now=now,
        )
        if reason is not None or self.standing is None or commit.index(self._id.me) is None:
            return reason
        lineages_part = self.peers.lineages_part(now)
        behind = members_behind(commit, self.standing, lineages_part=lineages_part)
        for entry in behind:
            head = self.standing.head()
            found = commit.parents[entry.parent].lineage
            self._send(entry.peer, messages.Behind(self.fragment, head, self._id.me, found), now)
        return "it mixes versions that mine grew out of" if behind else None

    def _enter(self, signed: SignedCommit, now: float, *, is_leader: bool) -> None:
        commit = signed.commit
        participation = Participation(
            self._id, signed, self.standing, self.peers, self.certificates, now=now
        )
        self.rounds[signed.round] = participation
        self.peers.met(commit.members)
        if participation.entry is not None:
            self.timers.pop(Timer.ANSWER, None)
            self.joining.entered()
            self.own_round = participation
            self.phase = Phase.ENTERED
            if commit.kind == "meld" or self.peers.has_several_groups(now):
                self.several_groups_version = commit.version
                self.certificates.among_groups = True
            self.pace.took_part(commit.version)
            self._roster_closed(commit.version, commit.level, now)
        self._apply(participation.begin(now, is_leader=is_leader), now)

    # The end of a round

    def _applied(self, applied: inputs.Applied, now: float) -> None:
        participation = self._participation(applied.round)
        if participation is None or participation.stage is not Stage.APPLYING:
            return
        apply = participation.to_apply
        assert apply is not None
        standing = applied.standing or apply.standing
        if applied.dispersion is not None:
            before = self.measured.version if self.measured is not None else 0
            version = standing.version
            self.measured = Measured(version, applied.dispersion, after=version - before)
        took_s = now - participation.entered_at
        self.leading.timings.sync_took(took_s)
        contained = apply.contained is not None
        if applied.left is not None and self.standing is not None:
            self.certificates.left(link_of(self.standing.head()), applied.left)
        self._apply([transitions.Stand(standing, fresh=contained)], now)
        self.catching_up.fellows = tuple(entry.peer for entry in participation.commit.members)
        head = standing.head()
        self.outcomes.finish(participation.id, head)
        self._saw_merged(participation, now)
        self._note(
            "finished",
            version=standing.version,
            contained=contained,
            kind=participation.commit.kind,
            took_s=took_s,
        )
        if self.own_round is participation:
            self.own_round = None
            self.joining.led_to_version(participation.commit.leader)
            self._apply(self.joining.become_idle("finished", retry=False), now)
        self._apply(participation.finished(head), now)
        self._apply(self.leading.tell_late(participation.id, head), now)
        self._apply(self.catching_up.take_hint(self._situation(now), now), now)

    def _took_state(self, before: Standing | None, after: Standing | None) -> None:
        """This peer begins with a state, or takes one that others have made."""
        if after is not None and after.version:
            versions = after.version - (before.version if before is not None else 0)
            tokens = {peer: mark.tokens for peer, mark in after.merged.items()}
            self.peers.took_state(versions, tokens)

    def _look_for_own_work(self, standing: Standing | None) -> None:
        mine = standing.merged.get(self._id.me) if standing is not None else None
        self.peers.is_back = mine is not None and mine.incarnation != self._id.incarnation

    def _saw_merged(self, participation: Participation, now: float) -> None:
        if participation.seal and participation.commit.kind != "mix":
            members = participation.commit.members
            self.peers.finished_with(members)
            self.peers.saw_merged([members[index].peer for index in participation.seal], now)

    def _participation(self, round_id: bytes) -> Participation | None:
        participation = self.rounds.get(round_id)
        if participation is None:
            self.counters["report_of_unknown_round"] += 1
        return participation

    def _round_ended(self, ended: transitions.RoundEnded, now: float) -> None:
        """This peer is out of a round without a new version."""
        participation = self.rounds[ended.round]
        if self.own_round is not participation:
            if self.doubting.is_about(participation.id) and not ended.in_doubt:
                finished = ended.may_be_finished
                self._apply(self.doubting.void(ended.reason, now, may_be_finished=finished), now)
            return
        self.own_round = None
        commit = participation.commit
        reason = f"its round ended without a version: {ended.reason}"
        failed = self.joining.join_failed(commit.leader, reason, weight=UNUSUAL_FAILURE)
        self._apply(failed, now)
        several = commit.version == self.several_groups_version
        elsewhere = ended.may_be_finished and participation.may_contain_own_work()
        in_doubt = ended.in_doubt or (elsewhere and several)
        self._effects.append(GiveUp(participation.id, ended.reason, in_doubt))
        assert participation.entry is not None
        mark = commit.members[participation.entry].mark
        if elsewhere and not in_doubt:
            self.doubting.leave_open(mark)
        if in_doubt:
            self._note("in_doubt", reason=ended.reason)
            self.doubting.begin(participation.id, commit, mark, now, several_groups=several)
            if ended.may_be_finished:
                self._apply(self.doubting.void(ended.reason, now, may_be_finished=True), now)
        self._apply(self.joining.become_idle(ended.reason, retry=True), now)
        self._apply(self.catching_up.take_hint(self._situation(now), now), now)

    def _drop(self, participation: Participation, now: float) -> None:
        self.outcomes.forget(participation.id, participation.head)
        if participation.entry is None and participation.stage is Stage.FINISHED:
            self._saw_merged(participation, now)  # this peer has only led it, or reduced
        del self.rounds[participation.id]
        self.leading.forget_late(participation.id)
        self._effects.append(Forget(participation.id))

    # Standing

    def _stand(self, change: transitions.Stand, now: float) -> None:
        before, standing = self.standing, change.standing
        mine = standing.merged.get(self._id.me)
        newcomer = self.pace.step == self._begun_at_step
        if newcomer or change.fresh or before is None or mine != before.merged.get(self._id.me):
            # A newcomer's work begins here as well.
            self.fresh_version, self.fresh_at = standing.version, now
        if before is None or standing.lineage != before.lineage:
            self.peers.count_version()
            self.joining.stands()
            self.catching_up.stands()
        self.standing = self.certificates.standing = standing
        self._look_for_own_work(standing)
        self._amend()
        self._consider_end(link_of(standing.head()), now)
        self._apply(self.doubting.standing_changed(standing), now)

    def _saw_head(self, head: Head | None, now: float) -> None:
        """Another peer stands on this head: if it is certified, it counts as closed and may end the
        run."""
        if head is not None and self.certificates.is_certified(link_of(head), now):
            self._shown_version = max(self._shown_version, head.version)
            self._consider_end(link_of(head), now)

    def _attempt_failed(self, now: float) -> None:
        self.pace.retry_later(now)
        self.joining.attempt_failed()
        self.catching_up.attempt_failed()
        if self.catching_up.attempts_failed >= ATTEMPTS_IN_VAIN:
            # Dealt by a closing that is too old, it would look for a group of its own for ever. And
            # by a version that colluders invented as well, so it is soon passed.
            shown = min(self._shown_version, self._next_version + self._id.policy.stale_max)
            self.peers.closed_version = max(self.peers.closed_version, shown)

    def _consider_end(self, link: Link, now: float) -> None:
        """Close ranks when a peer is at the run's goal on one of several lineages."""
        if self.ending.closes_ranks(link, now):
            self._note("closed_ranks", version=link.version)
            self._apply(self.leading.look_round(self._situation(now), now), now)

    def _roster_closed(self, version: int, level: int | None, now: float) -> None:
        if level is not None and version >= self.closed_version:
            self._take_level(level, now)
        self.closed_version = max(self.closed_version, version)
        self.peers.closed_version = max(self.peers.closed_version, self.closed_version)
        self.pace.start_cycle(now)

    def _take_level(self, level: int, now: float) -> None:
        before, after = self.pace.level, self.pace.take_level(level)
        if before != after:
            self._note("level", level=str(after), before=str(before))
            self._consider_line(now)

    # Changes

    def _situation(self, now: float) -> Situation:
        roster = self.leading.roster
        return Situation(
            phase=self.phase,
            standing=self.standing,
            fresh_version=self.fresh_version,
            fresh_at=self.fresh_at,
            shown_version=self._shown_version,
            bytes_per_s=self.peers.bytes_per_s,
            catching_since=self.catching_up.began_at if self.phase is Phase.CATCHING else None,
            attempt=self.joining.attempt,
            roster_decides_at=None if roster is None else roster.decide_at,
            under_way=self._under_way(),
            measured=self.measured,
            in_doubt=self.doubting.doubt is not None,
            goal=self.ending.goal,
            is_final=self.ending.is_final(now),
            closed_ranks=self.ending.closed_ranks,
            end=self.ending.end(now),
            several_groups_version=self.several_groups_version,
        )

    def _under_way(self) -> SignedCommit | None:
        own = self.own_round
        if own is None:
            coordinated = (each for each in self.rounds.values() if each.coordinates)
            own = next((each for each in coordinated if each.is_open), None)
        return own.signed if own is not None and own.is_open else None

    def _apply(self, changes: Changes, now: float) -> None:
        """Carry out changes in their order, each with all that it leads to."""
        for change in changes:
            if isinstance(change, Send):
                self._send(change.to, change.message, now)
            elif isinstance(change, Effect):
                self._effects.append(change)
            else:
                self._apply(self._transition(change, now), now)

    def _transition(self, change: Transition, now: float) -> Changes:
        """Carry out one transition. Returns what it leads to."""
        match change:
            case transitions.Become(phase):
                self.phase = phase
            case transitions.SetTimer(timer, at):
                self.timers[timer] = at
            case transitions.StopTimers(timers):
                for timer in timers:
                    self.timers.pop(timer, None)
            case transitions.Count(counter):
                self.counters[counter] += 1
            case transitions.StartCycle():
                self.pace.start_cycle(now)
            case transitions.RetryLater():
                self._attempt_failed(now)
            case transitions.RosterClosed(version, level):
                self._roster_closed(version, level, now)
            case transitions.BeginWork(version):
                self.fresh_version, self.fresh_at = version, now
            case transitions.Stand():
                self._stand(change, now)
            case transitions.EnterOwnRound(signed):
                self._enter(signed, now, is_leader=True)
            case transitions.RoundEnded():
                self._round_ended(change, now)
            case transitions.TakeBackOwnJoin():
                self.leading.take_back_own_join()
            case transitions.PassOwnRoster():
                self.leading.pass_own_roster()
            case transitions.ReadmitHeld():
                return self.leading.readmit_held()
            case transitions.HandOverRoster(leader):
                return self.leading.hand_over(leader, now)
            case transitions.ChangeLeader(leader):
                return self.joining.change_leader(leader, now)
            case transitions.Abandon(reason):
                return self.joining.abandon(reason)
            case _:
                return self._ask_part(change, self._situation(now), now)
        return []

    def _ask_part(self, change: Question, situation: Situation, now: float) -> Changes:
        """Ask the part that a transition is for."""
        match change:
            case transitions.AnswerCall():
                return self.joining.answer_call(change, situation, now)
            case transitions.JoinCaller():
                return self.joining.join_caller(change, situation, now)
            case transitions.AdmitJoin(sender, join):
                return self.leading.admit(sender, join, situation, now)
            case transitions.HoldJoin():
                return self.leading.hold(change, situation, now)
            case transitions.ReadmitJoin(sender, join):
                return self.leading.readmit(sender, join, situation, now)
            case transitions.LeaveOwnRoster():
                return self.leading.leave_own_roster(situation, now)
            case transitions.CallLeader(answer):
                return self.leading.call_leader(answer, situation, now)
            case transitions.Compare(source, head):
                return self.catching_up.compare(source, head, situation, now)
            case transitions.SettleFinalState(source, mine, relation, theirs):
                return self.catching_up.settle_final_state(
                    source, mine, relation, theirs, situation, now
                )

    def _tell_directive(self, to: PeerId, now: float) -> None:
        """Send the owner's directive to a peer; one that knows a newer one answers with it."""
        self._send(to, messages.Directed(self.fragment, self._id.book.orders.encoded), now)

    def _send(self, to: PeerId, message: Message, now: float) -> None:
        if to == self._id.me:
            self._own_messages.append(message)
            return
        if isinstance(message, messages.Committed) and self._id.book.must_tell(to):
            self._tell_directive(to, now)
        head: Head | None = getattr(message, "head", None)
        if head is not None:
            goal = self.ending.goal
            ends = goal is not None and goal.is_reached_by(head)
            briefly = isinstance(message, messages.Join | messages.Call) and not ends
            signatures_max = self._signatures_in(message, now) if briefly else None
            shown = self.certificates.show(head, now, signatures_max=signatures_max)
            message = msgspec.structs.replace(message, head=shown)
        if isinstance(message, Committed):
            message = self.parents.beside(message, to, now)
        self._effects.append(Send(to, message))

    def _signatures_in(self, message: Message, now: float) -> int:
        """Number of signatures in a join or a call: the own one where all stand on one link."""
        if not isinstance(message, messages.Join):
            return 1
        proves = self.catching_up.shows_all or self.peers.has_several_groups(now)
        return self.certificates.parent_needed(now) + SIGNATURES_SPARE if proves else 1

    def _note(self, event: str, **fields: Value) -> None:
        self._effects.append(Note(event, fields))

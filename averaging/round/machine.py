"""The rounds of one fragment at one peer: a machine without clock, sockets or numbers.

``FragmentRounds.handle`` takes an input (``averaging.round.interface.inputs``) and the time, and
returns effects (``averaging.round.interface.effects``). It holds no number of the model. One
machine per fragment and peer plays every part: member, leader, reducer, acceptor, successor of a
dead leader. ``averaging.live.averager`` and the simulator run the same machine.

**Before the commit** (``averaging.round.gathering.joining``, ``averaging.round.gathering.leading``,
``averaging.round.gathering.roster``, ``averaging.round.gathering.catching_up``)

    IDLE      Nothing is under way. When due, or called with enough steps: ``TakeSnapshot``.
    WANTED    The learner was asked. With its offer the peer joins, or folds when it is alone.
    JOINING   ``Join`` was sent to the leader of this peer's attempt
              (``averaging.round.opinions.pacemaker``). It is bound to this leader and no other,
              until ``Withdraw`` is sent or ``Committed``, ``Refused`` or ``Closed`` arrives;
              ``Redirect`` names another leader. Another leader that calls is told ``Pass``, or
              joined instead (after ``Withdraw``) if its attempt is a later one. When the leader is
              silent or its link breaks, the join is sent once more, and then to the leader of a
              later attempt.
    ENTERED   A commit that names this peer holds for it: a ``Participation`` is under way.
    CATCHING  Behind, or on the lighter side of a fork: the owner fetches; the peer joins nothing.
    FOLDING   Alone: the owner makes the learner's parameters the state.

A peer that receives a ``Join`` and finds that the attempt is its own leads: it answers ``Noted``,
calls the live peers of the group, and those that come into sight while the roster is open, until
each has answered, and closes it by ``averaging.rules.quorum``. A peer that is called answers
``Pass`` or ``Coming``; for the latter's snapshot the roster stays open. Any peer answers ``Behind``
to a ``Join`` from behind. A leader that has to catch up itself sends all who join it to a later
attempt. A ``Join`` from another lineage is told to compare (the lighter side rebases), or taken for
a meld. Of two leaders that meet the one of the lower attempt sends its members to the other one.

**Phases** (A message stands for ``Received``. ``RoundEnded`` stands for the input that ended a
round: it may lead to catching up, or to the next round, at once. An input that is not listed does
not change the phase, and one that is listed need not. ``tests/averaging/virtual/test_storms.py``
compares this table with what machines do.)

    IDLE      -> WANTED    Due Progressed Call Join CaughtUp RoundEnded
    IDLE      -> CATCHING  Behind Call Compare Finished Forsworn Join RoundEnded
    WANTED    -> JOINING   Offered
    WANTED    -> FOLDING   Offered
    WANTED    -> CATCHING  Behind Call Compare Finished Join
    WANTED    -> IDLE      Closed Offered Tick GiveWay Leave OrdersChanged CaughtUp
    JOINING   -> ENTERED   Committed StreamOpened Join Pass LinkLost Tick
    JOINING   -> CATCHING  Behind Call Compare Finished Join LinkLost Pass Tick
    JOINING   -> IDLE      Refused Closed Redirect Call Tick GiveWay Leave
    JOINING   -> IDLE      Committed StreamOpened OrdersChanged CaughtUp
    ENTERED   -> IDLE      Applied Void Forswear Declined Join Withdraw MergedArrived SliceMerged
    ENTERED   -> IDLE      Sealed LinkLost Tick Call
    CATCHING  -> IDLE      CaughtUp Tick
    FOLDING   -> IDLE      Folded Tick

One input may change the phase twice, and a message that a peer sends to itself is taken before
``handle`` returns. A leader enters its round by the input with which its roster closes.

**From the commit on** (``averaging.round.participation``, ``averaging.round.slices``,
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
  all are melded. A majority that forswore does not end such a doubt either: unless all members did,
  one may have finished and go on. The peer remembers of its last round that it was one of several
  (``Certificates.among_groups_at``): a partition may hide the others later.

**The owner's orders.** All members of a round follow one directive of the run's owner
(``averaging.rules.orders``): the commit names that of its leader, which sends it ahead to peers
that may not know it, and a member that follows another one declines and sends its own. The codecs,
the cycle and the end are those of the directive at the version that the round makes. A paused
machine begins no round, and tells its directive to peers that join or call it: they may know that
the pause is over. After a rollback the owner of the machine replaces it, under another topic.

**The end** of a run: ``averaging.round.opinions.ending``.

**Every wait has a deadline.** Every phase but IDLE ends at a time (``deadline`` is the earliest).
All deadlines are relative to the own clock; no time of another peer is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from averaging import messages
from averaging.history.standing import Standing
from averaging.messages import Commit, Head, Link, Message, ParentCertificate
from averaging.round.gathering.catching_up import ATTEMPTS_IN_VAIN, CatchingUp
from averaging.round.gathering.joining import Called, Joining
from averaging.round.gathering.leading import CATCHES_UP, LEAVES, Leading
from averaging.round.gathering.objections import (
    Parents,
    objection,
    overstatement_of_leader,
)
from averaging.round.interface import inputs
from averaging.round.interface.effects import (
    CountRefused,
    Effect,
    Forget,
    GiveUp,
    RefuseStream,
    Strike,
    WarnOfCommit,
)
from averaging.round.interface.identity import (
    BadSignature,
    Circumstances,
    Identity,
    NotACommit,
    NotForThisPeer,
    SignedCommit,
    read_commit,
)
from averaging.round.interface.inputs import Input
from averaging.round.interface.phase import Phase, Stage
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.ending import Lingering
from averaging.round.opinions.fragment import Fragment
from averaging.round.participation import Participation
from averaging.round.sealing.doubt import Doubt, Doubting, Outcomes
from averaging.rules import plausible
from averaging.rules.electors import Electors
from averaging.rules.peer_view import PeerView
from averaging.rules.reputation import Deed
from averaging.rules.sites import carries, may_bring
from dht.identity import PeerId

ROUNDS_MAX = 16
"""Rounds of one fragment that a peer may be in at once: one as a member, others as they fade.

A round fades for ``margin_s`` after all have finished it; fast learners make several in that time.
"""
KEEPER_ROUNDS = 8
"""A peer without a learner leads and reduces for others: it may be in this many times as many."""
KEEP_OUT = (
    messages.Ask,
    messages.Prepare,
    messages.Propose,
    messages.Reassign,
    messages.Forswear,
)
"""Messages about an unknown round that are answered with never entering it. While its commit may
come they are not: all of them are sent again. A member that had the commit first kept others out of
rounds whose leader had taken their joins."""


class FragmentRounds(Fragment):
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
        electors: Electors | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> None:
        """``view``: kept up to date by the owner. ``standing``: ``None`` for a peer that has yet to
        fetch its first state. ``electors``: shared with the peer's other fragments. ``step``: the
        learner's own step now.
        """
        super().__init__(
            identity,
            circumstances or Circumstances(),
            view=view,
            standing=standing,
            electors=electors,
            step=step,
            now=now,
        )
        self._took_state(None, standing)
        self._begun_at_step = step
        self.doubting = Doubting(self)
        self.joining = Joining(self, self.doubting)
        self.catching_up = CatchingUp(self, self.joining, self.doubting)
        self.parents = Parents(self.peers, self.certificates, self.catching_up)
        self.leading = Leading(self, self.doubting, self.joining, self.catching_up, self.parents)
        self.lingering = Lingering(self.identity, self.peers, self.certificates, self.send)
        self.rounds: dict[bytes, Participation] = {}
        self.own_round: Participation | None = None
        """The round that this peer is a member of."""
        self.outcomes = Outcomes()
        self.deadline: float | None = None
        """Time at which ``Tick`` is wanted; ``None``: nothing waits. Each input may move it."""

    # For the owner

    def handle(self, given: Input, now: float) -> list[Effect]:
        """Take one input. Returns what to do, in order."""
        self.now = now
        if self.phase is Phase.IDLE:
            self.doubting.presume_open(now)
        if self.standing is not None and self.ending.is_reached_by(self.standing):
            self._consider_end(link_of(self.standing.head()), now)
        self._handle(given, now)
        while self.own_messages:
            self._receive(self.identity.me, self.own_messages.popleft(), now)
        if self.phase is Phase.CATCHING:
            self.leading.dissolve(CATCHES_UP, another_leads=True)
        self.lingering.ends_on(self.standing if self.ending.is_final(now) else None, now)
        self.deadline = self._next_at()
        self.certificates.input_taken()
        effects, self.effects = self.effects, []
        return effects

    def _next_at(self) -> float | None:
        times = [
            self.phase_until,
            *(participation.next_at() for participation in self.rounds.values()),
        ]
        for at in (self.leading.next_at(), self.doubting.next_at(), self.lingering.next_at()):
            if at is not None:
                times.append(at)
        first = min(times)
        return None if first == math.inf else first

    @property
    def fragment(self) -> int:
        return self.identity.fragment

    @property
    def doubt(self) -> Doubt | None:
        """A contribution of this peer of which it is not known whether it is merged."""
        return self.doubting.doubt

    def alone_until(self, now: float) -> float | None:
        """When this peer begins to merge by itself; ``None``: it does, or others train."""
        if self.standing is None or self.peers.others_train(now):
            return None
        until = self.joining.alone_until(now)
        return until if until > now else None

    # Inputs

    def _handle(self, given: Input, now: float) -> None:
        match given:
            case inputs.Received(sender, message):
                if self._has_standing(sender, message):
                    self._heard(sender, now)
                    self._receive(sender, message, now)
                    return
                self.count("stranger")
                if isinstance(message, messages.Join):
                    self.leading.strangers_join(sender, message)
            case inputs.Progressed():
                self.pace.step, self.pace.step_time_s = given.step, given.step_time_s
                self._ask_who_is_back()
                if not given.waits and self.joining.wants_a_round(now):
                    self.joining.due(now)
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
                    participation.handle(given, now)
            case inputs.StreamOpened():
                self._stream_opened(given, now)
            case inputs.Due():
                self.joining.due(now)
            case inputs.Offered(offer):
                self.joining.offered(offer, now)
            case inputs.GiveWay(reason):
                self.joining.leave(reason, retry=False)
            case inputs.Folded():
                self.joining.folded()
            case inputs.Applied():
                self._applied(given, now)
            case inputs.CaughtUp():
                self._caught_up(given, now)
            case inputs.LinkLost(peer):
                self.peers.mark_failed(peer, now)
                self.joining.link_lost(peer, now)
                self._go_on_without(peer, now)
            case inputs.Leave():
                self.joining.leave(LEAVES, retry=True)
                self.leading.dissolve(LEAVES, another_leads=True)
                self.peers.trains = False
            case inputs.ReachabilityChanged(reachable):
                self.peers.reachable = reachable
            case inputs.LineMeasured(bytes_per_s):
                self.peers.bytes_per_s = bytes_per_s
                self.consider_line()
            case inputs.EndIsNear():
                self.ending.comes_near()
            case inputs.MergeBeforeLeaving(leaves):
                self.pace.due_time.eager = leaves or self.ending.is_near
                if leaves:
                    self.joining.leave_soon()
                self.joining.leaves = leaves
            case inputs.LastRoundOver():
                self.ending.is_over = True
                self._gather_no_more("the run has reached its date")
            case inputs.OrdersChanged():
                # Committed rounds go on.
                self._amend()
                paused = self.identity.book.orders.paused
                if paused is not None:
                    self._gather_no_more(paused)

    def _gather_no_more(self, reason: str) -> None:
        """Joins and rosters end; a round that is committed goes on."""
        self.joining.leave(reason, retry=False)
        self.leading.dissolve(reason)

    def _amend(self) -> None:
        self.pace.amend(self.identity.policy_at(self.next_version))

    def _tick(self, now: float) -> None:
        if now >= self.phase_until:
            self.phase_until = math.inf
            self._phase_is_over(now)
        self.leading.tick(now)
        self.doubting.tick(now)
        self.lingering.tick(now)
        for participation in list(self.rounds.values()):
            participation.handle(inputs.Tick(), now)
            if now >= participation.end_at and not participation.is_open:
                self._drop(participation, now)

    def _phase_is_over(self, now: float) -> None:
        match self.phase:
            case Phase.WANTED:
                reason = "the learner did not come to a safe point in time"
                self.joining.become_idle(reason, retry=True)
            case Phase.JOINING:
                self.joining.leader_silent(now)
            case Phase.FOLDING:
                self.joining.become_idle("folding took too long", retry=True)
            case Phase.CATCHING:
                reason = f"not done within {now - self.catching_up.began_at:.0f} s"
                self._caught_up(inputs.CaughtUp(None, reason=reason), now)

    def _go_on_without(self, peer: PeerId, now: float) -> None:
        """A peer has failed: the open roster and the rounds go on without it."""
        self.leading.consider_closing(now)
        self._tell_rounds(inputs.LinkLost(peer), now)

    def _caught_up(self, given: inputs.CaughtUp, now: float) -> None:
        standing, before = given.standing, self.standing
        self._took_state(before, standing)
        if self.phase is not Phase.CATCHING:
            self.count("caught_up_late")
            if standing is not None:
                self.joining.leave("caught up late", retry=False)
                assert self.phase is Phase.IDLE, "a round or a fold goes on from the own state"
                self.stand(standing, fresh=False)
        else:
            call = self.joining.take_call()
            told = self.catching_up.ended(standing, given.held_s, now)
            if standing is None:
                self.note("catch_up_failed", reason=given.reason)
                self.joining.become_idle("catching up failed", retry=True)
            else:
                self._stand_where_fetched(standing, call, now)
            if told is not None:
                self.show_standing(told)
        if standing is not None and given.since is not None:
            self.fresh_version = min(given.since, self.fresh_version)
            given_up = before.merged.get(self.identity.me) if before is not None else None
            if given_up is not None and given_up.incarnation == self.identity.incarnation:
                self.doubting.leave_open(given_up.step)

    def _stand_where_fetched(self, standing: Standing, call: Called | None, now: float) -> None:
        heard_closing = standing.version <= self.peers.closed_version
        self.stand(standing, fresh=False)
        self.note("caught_up", version=standing.version)
        self.joining.become_idle("caught up", retry=False)
        if not heard_closing:
            self.roster_closed(standing.version, None)
        if call is not None and now < call.until:
            self.joining.join_caller(call, now)

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

    def _ask_who_is_back(self) -> None:
        """Show peers that were out of reach where this one stands: both sides of a partition go
        one way again before their next rounds, and not in them."""
        for peer in self.peers.back():
            if self.standing is not None and self.peers.knows(peer):
                self.certificates.shows_all = True
                self.show_standing(peer)

    def _receive(self, sender: PeerId, message: Message, now: float) -> None:
        head: Head | None = getattr(message, "head", None)
        reason = None if head is None else self._leap(head)
        if reason is not None:
            self.count("implausible_head")
            fields = {"peer": sender, "reason": reason}
            self.emit(CountRefused("implausible", fields, "implausible_head"))
            return
        if head is not None:
            self.certificates.hear(link_of(head), head.signatures, now)
            self.lingering.heard(sender, head)
        self._answer(sender, message, now)

    def _leap(self, theirs: Head) -> str | None:
        return plausible.leap(self.standing.head() if self.standing is not None else None, theirs)

    def _answer(self, sender: PeerId, message: Message, now: float) -> None:
        match message:
            case messages.Join():
                self._saw_head(message.head, now)
                self._tell_rounds(inputs.Received(sender, message), now)
                self.leading.joined(sender, message, now)
            case messages.Noted():
                self.joining.noted(sender, message, now)
            case messages.Redirect():
                self.joining.redirected(sender, message, now)
            case messages.Call():
                self._saw_head(message.head, now)
                self._tell_rounds(inputs.Received(sender, message), now)
                self.leading.called(sender, message, now)
            case messages.Coming():
                self.leading.coming(sender, now)
            case messages.Pass():
                self.leading.passed(sender, now)
            case messages.Withdraw():
                self._tell_rounds(inputs.Received(sender, message), now)
                self.leading.withdrawn(sender, message)
            case messages.Refused():
                self.catching_up.refused(now, message.reason)
                self.joining.turned_away(sender, message, now)
                self.catching_up.ask_for_signatures(now)
            case messages.Closed():
                knows_round = message.round in self.rounds
                self.joining.too_late(sender, message, now, knows_round=knows_round)
            case messages.Committed():
                beside = message.certificates
                problem = self._learn_commit(
                    sender, message.commit, message.signature, now, beside=beside
                )
                if problem is not None:
                    self.count("commit_refused")
            case messages.Behind():
                self._saw_head(message.head, now)
                self.catching_up.compare(sender, message.head, now, knows=message.found)
            case messages.Compare():
                self._saw_head(message.head, now)
                self.catching_up.sign_for(sender, message.head, now)
                self.catching_up.compare(sender, message.head, now)
            case messages.Bits() | messages.Accused() | messages.Directed() | messages.Suspected():
                self.count(f"{type(message).__name__.lower()}_is_the_owners")
            case messages.Finished():
                self._saw_head(message.head, now)
                self._about_round(sender, message, now)
            case _:
                self._about_round(sender, message, now)

    def _tell_rounds(self, given: inputs.LinkLost | inputs.Received, now: float) -> None:
        for participation in list(self.rounds.values()):
            participation.handle(given, now)

    def _about_round(self, sender: PeerId, message: Message, now: float) -> None:
        round_id: bytes = message.round  # type: ignore[union-attr]
        participation = self.rounds.get(round_id)
        if self.doubting.is_answered_by(sender, round_id):
            self._receive_in_doubt(sender, message, now)
        if participation is not None:
            participation.handle(inputs.Received(sender, message), now)
            if isinstance(message, messages.Finished):
                self._follow_led_round(participation, sender, now)
            return
        may_come = self._awaits_a_commit and round_id not in self.outcomes
        if may_come and isinstance(message, KEEP_OUT):
            self.count("early_message")
            return
        match message:
            case messages.Finished():
                self.catching_up.compare(sender, message.head, now)
            case messages.Ask():
                # Not finished by this incarnation, and from now on never: the commit names a join
                # that is over.
                mine = self.standing.head() if self.standing else None
                signature = self.identity.sign(messages.vow(round_id))
                vow = messages.Forsworn(self.fragment, round_id, mine, signature)
                self._answer_unknown_round(sender, round_id, vow)
            case (
                messages.Prepare() | messages.Propose() | messages.Reassign() | messages.Forswear()
            ):
                if self.outcomes.head(round_id) is None:
                    self.count("unknown_round")
                absent = self.outcomes.is_absent(round_id)
                reason = "not in my rounds"
                declined = messages.Declined(self.fragment, round_id, reason, absent=absent)
                self._answer_unknown_round(sender, round_id, declined)
            case _:
                self.count("unknown_round")

    def _follow_led_round(self, participation: Participation, member: PeerId, now: float) -> None:
        """A round that this peer led, or reduced for, without work of its own may be over: it is
        behind its version, and so are those that came too late."""
        head = participation.head
        if participation.entry is None and head is not None:
            self.leading.tell_late(participation.id, head)
            self.catching_up.compare(member, head, now)

    def _answer_unknown_round(self, sender: PeerId, round_id: bytes, vow: Message) -> None:
        """Say how a round ended that is not kept (any more), or vow to have no part in it."""
        head = self.outcomes.head(round_id)
        finished = head and messages.Finished(self.fragment, round_id, head)
        self.send(sender, finished or vow)

    @property
    def _awaits_a_commit(self) -> bool:
        """True if another leader may have a round for this peer, which does not know its name."""
        attempt = self.joining.attempt
        return attempt is not None and attempt.leader != self.identity.me

    def _receive_in_doubt(self, sender: PeerId, message: Message, now: float) -> None:
        if isinstance(message, (messages.Finished, messages.Forsworn)):
            if message.head is not None:
                self.catching_up.compare(sender, message.head, now)
            if self.phase is Phase.CATCHING:
                return
        self.doubting.receive(sender, message, now)

    # The commit

    def _stream_opened(self, opened: inputs.StreamOpened, now: float) -> None:
        self._heard(opened.sender, now)
        problem = self._refusal(opened, now)
        if problem is not None:
            self.count("opening_refused")
            self.emit(RefuseStream(problem))

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
            self.count("repeated_commit")
            return None
        try:
            signed = read_commit(encoded, signature, self.identity)
        except BadSignature as error:
            self.count("bad_signature")
            return str(error)
        except NotACommit as error:
            fields = {"peer": sender, "reason": str(error)}
            self.emit(WarnOfCommit("not_a_commit", fields))
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
            return reason  # the leader's own message brings certificates
        reason = reason or self._objection(signed.round, commit, now)
        if reason is None:
            self._enter(signed, now, is_leader=False)
            return None
        self._decline(signed, reason, now)
        return reason

    def _decline(self, signed: SignedCommit, reason: str, now: float) -> None:
        """Do not enter a round, now or later, and tell its leader why."""
        commit = signed.commit
        if commit.directive != self.identity.book.orders.stamp:
            self.tell_directive(commit.leader)
        index = commit.index(self.identity.me)
        mine = index is not None and self.joining.has_made(commit.members[index])
        absent = self.outcomes.decline(signed.round, names_this_machine=mine)
        self.note("declined", leader=commit.leader, reason=reason)
        overstated = overstatement_of_leader(commit, self, now)
        if overstated is not None:
            fields = {"peer": commit.leader, "reason": f"it claims {overstated}"}
            self.emit(Strike("overstated", fields, Deed.LIES))
        declined = messages.Declined(self.fragment, signed.round, reason, absent=absent)
        self.send(commit.leader, declined)
        self.joining.commit_refused(commit, reason)

    def _objection(self, round_id: bytes, commit: Commit, now: float) -> str | None:
        """The reason not to enter the round; ``None`` if there is none."""
        if round_id in self.outcomes:
            return "I gave this round up"
        for parent in commit.parents:
            leap = self._leap(Head(parent.version, parent.lineage, (parent,)))
            if leap is not None:
                return leap
        if len(self.rounds) >= ROUNDS_MAX * (1 if self.peers.trains else KEEPER_ROUNDS):
            return "too many rounds at once"
        reason = objection(commit, self, self.joining.attempt, now)
        if reason is not None or commit.index(self.identity.me) is None:
            return reason
        return self.doubting.objection_to_meld() if commit.melds else None

    def _enter(self, signed: SignedCommit, now: float, *, is_leader: bool) -> None:
        commit = signed.commit
        participation = Participation(self, signed, now=now)
        self.rounds[signed.round] = participation
        self.peers.met(commit.members)
        if participation.entry is not None:
            self.joining.attempt = None
            self.own_round = participation
            self.goes_to(Phase.ENTERED)
            is_one_of_several = commit.melds and self.peers.may_have_several_groups
            if is_one_of_several or self.peers.has_several_groups(now):
                self.certificates.among_groups_at = commit.version
            self.pace.took_part(commit.version)
            self.roster_closed(commit.version, commit.level)
        participation.begin(now, is_leader=is_leader)

    # The end of a round

    def _applied(self, applied: inputs.Applied, now: float) -> None:
        participation = self._participation(applied.round)
        if participation is None or participation.stage is not Stage.APPLYING:
            return
        apply = participation.to_apply
        assert apply is not None
        standing = applied.standing or apply.standing
        took_s = now - participation.entered_at
        self.leading.timings.sync_took(took_s)
        contained = apply.contained is not None
        if applied.left is not None and self.standing is not None:
            self.certificates.left(link_of(self.standing.head()), applied.left)
        self.stand(standing, fresh=contained)
        self.catching_up.fellows = tuple(entry.peer for entry in participation.commit.members)
        head = standing.head()
        self.outcomes.finish(participation.id, head)
        self._saw_merged(participation, now)
        self.note(
            "finished",
            version=standing.version,
            contained=contained,
            kind=participation.commit.kind,
            took_s=took_s,
        )
        if self.own_round is participation:
            self.own_round = None
            self.pacemaker.led_to_version(participation.commit.leader)
            self.joining.become_idle("finished", retry=False)
        participation.finished(head)
        self.leading.tell_late(participation.id, head)
        self.catching_up.take_hint(now)

    def _took_state(self, before: Standing | None, after: Standing | None) -> None:
        """This peer begins with a state, or takes one that others have made."""
        if after is not None and after.version:
            versions = after.version - (before.version if before is not None else 0)
            tokens = {peer: mark.tokens for peer, mark in after.merged.items()}
            self.peers.took_state(versions, tokens)

    def _saw_merged(self, participation: Participation, now: float) -> None:
        if participation.seal:
            members = participation.commit.members
            self.peers.finished_with(members)
            self.peers.saw_merged([members[index].peer for index in participation.seal], now)

    def _participation(self, round_id: bytes) -> Participation | None:
        participation = self.rounds.get(round_id)
        if participation is None:
            self.count("report_of_unknown_round")
        return participation

    def round_ended(
        self, round_id: bytes, reason: str, *, in_doubt: bool, may_be_finished: bool
    ) -> None:
        participation, now = self.rounds[round_id], self.now
        if self.own_round is not participation:
            if self.doubting.is_about(round_id) and not in_doubt:
                self.doubting.void(reason, now, may_be_finished=may_be_finished)
            return
        self.own_round = None
        commit = participation.commit
        failure = f"its round ended without a version: {reason}"
        self.joining.join_failed(commit.leader, failure)
        several = commit.version == self.certificates.among_groups_at
        elsewhere = may_be_finished and participation.may_contain_own_work()
        in_doubt = in_doubt or (elsewhere and several)
        self.emit(GiveUp(round_id, reason, in_doubt))
        assert participation.entry is not None
        mark = commit.members[participation.entry].mark
        if elsewhere and not in_doubt:
            self.doubting.leave_open(mark)
        if in_doubt:
            self.note("in_doubt", reason=reason)
            self.doubting.begin(round_id, commit, mark, now, several_groups=several)
            if may_be_finished:
                self.doubting.void(reason, now, may_be_finished=True)
        self.joining.become_idle(reason, retry=True)
        self.catching_up.take_hint(now)

    def _drop(self, participation: Participation, now: float) -> None:
        self.outcomes.forget(participation.id, participation.head)
        if participation.entry is None and participation.stage is Stage.FINISHED:
            self._saw_merged(participation, now)  # this peer has only led it, or reduced
        del self.rounds[participation.id]
        self.leading.forget_late(participation.id)
        self.emit(Forget(participation.id))

    # Standing

    def stand(self, standing: Standing, *, fresh: bool) -> None:
        before, now = self.standing, self.now
        mine = standing.merged.get(self.identity.me)
        newcomer = self.pace.step == self._begun_at_step
        if newcomer or fresh or before is None or mine != before.merged.get(self.identity.me):
            # A newcomer's work begins here as well.
            self.fresh_version, self.fresh_at = standing.version, now
        if before is None or standing.lineage != before.lineage:
            self.pacemaker.next_version()
            self.joining.stands()
            self.catching_up.stands()
        self.certificates.standing = standing
        self._amend()
        self._consider_end(link_of(standing.head()), now)
        self.doubting.standing_changed(standing)

    def _saw_head(self, head: Head, now: float) -> None:
        """Another peer stands on this head: if it is certified, it counts as closed and may end the
        run."""
        if self.certificates.is_certified(link_of(head), now):
            self.shown_version = max(self.shown_version, head.version)
            self._consider_end(link_of(head), now)

    def attempt_failed(self) -> None:
        self.pace.retry_later(self.now)
        self.catching_up.attempt_failed()
        if self.catching_up.attempts_failed >= ATTEMPTS_IN_VAIN:
            # Dealt by a closing that is too old, it would look for a group of its own for ever. And
            # by a version that colluders invented as well, so it is soon passed.
            shown = min(self.shown_version, self.next_version + self.policy.stale_max)
            self.peers.closed_version = max(self.peers.closed_version, shown)

    def _consider_end(self, link: Link, now: float) -> None:
        """Close ranks when a peer is at the run's goal on one of several lineages."""
        if self.ending.closes_ranks(link, now):
            self.note("closed_ranks", version=link.version)
            self.leading.look_round(now)

    # For the parts

    def leave_own_roster(self) -> None:
        self.leading.leave_own_roster(self.now)

    def enter_own_round(self, signed: SignedCommit) -> None:
        self._enter(signed, self.now, is_leader=True)

    @property
    def under_way(self) -> SignedCommit | None:
        own = self.own_round
        if own is None:
            coordinated = (each for each in self.rounds.values() if each.coordinates)
            own = next((each for each in coordinated if each.is_open), None)
        return own.signed if own is not None and own.is_open else None

"""Getting into a round of one fragment: from the learner's offer to the leader's commit.

The part of ``averaging.round.machine`` for a peer that wants to be led: when to offer, which leader
to join, what to do when a leader is silent or sends it elsewhere, and folding when no other peer
trains. Whether a commit holds is not decided here (``averaging.round.gathering.objections``).

Every method returns changes (``averaging.round.interface.transitions``) for the machine to apply.
"""

from __future__ import annotations

import math

import msgspec

from averaging import messages
from averaging.history.standing import Standing, after_folding
from averaging.messages import Commit, Entry, Head, Join
from averaging.round.interface.effects import (
    Discard,
    Fold,
    GiveUp,
    Note,
    Send,
    Silent,
    TakeSnapshot,
)
from averaging.round.interface.identity import Identity
from averaging.round.interface.inputs import Offer
from averaging.round.interface.phase import UNCOMMITTED, Phase, Timer
from averaging.round.interface.situation import Attempt, Situation
from averaging.round.interface.transitions import (
    AnswerCall,
    Become,
    BeginWork,
    CallLeader,
    Changes,
    Compare,
    Count,
    HandOverRoster,
    JoinCaller,
    LeaveOwnRoster,
    PassOwnRoster,
    RetryLater,
    RosterClosed,
    SetTimer,
    Stand,
    StartCycle,
    StopTimers,
    TakeBackOwnJoin,
)
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pace import Pace
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

LEADERS_TRIED_MAX = 6
"""Leaders that one attempt may turn to, redirects included."""
FAILED_JOINS_MAX = 9
"""A leader with which this many joins failed is passed over at one version, ..."""
PASSED_OVER_DOUBLINGS_MAX = 4
"""... and at twice as many with each further one, up to this often.

One that wastes joins on purpose took three quarters of the rounds from three others when it was
asked anew at each version that it ranked first for."""
UNUSUAL_FAILURE = 3
"""Weight of a failure that an honest leader hardly causes, such as a redirect in a circle."""
NO_ANSWER = "it does not answer"
RESTARTED = "it was restarted and has lost my join"
LEADERS_REMEMBERED_MAX = 64
LEAVERS_WAIT_S = 0.25
"""Time between two attempts of a peer that leaves, after the first that failed, twice as long after
each further one, ..."""
LEAVERS_WAIT_MAX_S = 2.0
"""... but no longer than this: nobody tells it of the end of a round that comes to nothing."""

_ANSWERED_IN = (Phase.JOINING, Phase.PROMISED)


class Joining:
    """One peer as a joiner."""

    def __init__(self, identity: Identity, peers: Neighbourhood, pace: Pace) -> None:
        self._id = identity
        self._policy = identity.policy
        self._peers = peers
        self._pace = pace
        self.attempt: Attempt | None = None
        self.call: JoinCaller | None = None
        """The leader that has called this peer, and until when it waits."""
        self._caller: PeerId | None = None
        """The leader that called last, whether this peer came or not."""
        self._coming_to: PeerId | None = None
        """The leader that waits for this peer's snapshot."""
        self._offer: Offer | None = None
        self._folds = False
        self._snapshot_used = False
        self.leaves = False
        """The peer is about to leave: work that cannot be merged now is lost."""
        self._leavers_wait_s = 0.0
        self._due_at = -math.inf
        """When a fragment of a peer that leaves was last due."""
        self._left_out_of = 0
        """The newest version whose roster closed without this peer."""
        self._joins = identity.first_number
        self._failed_joins = BoundedMapping[PeerId, int](
            "failed joins", LEADERS_REMEMBERED_MAX, worth=lambda _, count: count
        )

    def __repr__(self) -> str:
        leader = self.attempt.leader if self.attempt is not None else None
        return f"Joining({self._id.me}, leader={leader})"

    # The learner

    def due(self, situation: Situation, now: float) -> Changes:
        """Ask the learner, unless something is under way; the fragment stays due."""
        if not self._may_join(situation) or self._sits_out(situation, now):
            return []
        if self.leaves:
            if now < self._due_at + self._leavers_wait_s:
                return []
            self._due_at = now
        self._folds = False
        if self._peers.others_train(now):
            return self._ask_learner("due", now)
        if self.leaves and self._peers.keepers(now):
            # A keeper merges it as a round of one: it gets the work encoded, not as a state.
            return self._ask_learner("a keeper takes it", now)
        if self.leaves and (lacked := self._lacked_version(situation)) is not None:
            # A version made of its own work would only fork one that others have.
            return [Note("lacks_version", {"version": lacked}), RetryLater()]
        if not self.leaves and now < self.alone_until(situation, now):
            return [Note("alone"), RetryLater()]
        self._folds = True
        return self._ask_learner("alone, so I fold", now)

    def alone_until(self, situation: Situation, now: float) -> float:
        """When this peer, beside no other that trains, begins to merge its work by itself.

        Those that it does not see any more may go on elsewhere: until the work would be stale there
        it stays pending, and is lost on neither side of a partition. Nobody waits for those that
        have said goodbye. A fold would also replace the very state that a newcomer is fetching. One
        whose trainer makes no steps just now may go on in a moment: were both to fold, each while
        the other stood still, they would have two histories.
        """
        assert situation.standing is not None
        waits_since = [
            self._peers.unseen_since(situation.standing.merged, now),
            situation.fresh_at if self._peers.others_arrive(now) else None,
        ]
        known = [at for at in waits_since if at is not None]
        until = max(known) + self._policy.alone_s if known else -math.inf
        return max(until, self._peers.may_work_until(now))

    def _may_join(self, situation: Situation) -> bool:
        return (
            situation.phase is Phase.IDLE
            and self._peers.trains
            and situation.standing is not None
            and not situation.in_doubt
            and not situation.is_final
            and self._id.book.orders.paused is None
        )

    def _sits_out(self, situation: Situation, now: float, *, called: bool = False) -> bool:
        """True if the line does not carry the next version (``averaging.rules.line_pace``)."""
        stands_on = situation.standing.version if situation.standing is not None else 0
        version = 1 + max(stands_on, self._peers.closed_version)
        return self._pace.sits_out(version, now, called=called or self.is_called(now))

    def _lacked_version(self, situation: Situation) -> int | None:
        """The newest version that others certified, or made without this peer, if it lacks it."""
        newest, standing = max(situation.shown_version, self._left_out_of), situation.standing
        return newest if standing is not None and standing.version < newest else None

    def is_called(self, now: float) -> bool:
        """True if a leader waits for this peer's join."""
        return self.call is not None and now <= self.call.until

    def wants_a_round(self, situation: Situation, now: float) -> bool:
        """True if this peer is due, or called, and nothing is under way."""
        wants = self._pace.is_due or self.is_called(now)
        return wants and self._may_join(situation) and not self._sits_out(situation, now)

    def _ask_learner(self, reason: str, now: float) -> Changes:
        self._pace.snapshot_asked(now)
        deadline = now + self._policy.snapshot_s
        return [Become(Phase.WANTED), SetTimer(Timer.SNAPSHOT, deadline), TakeSnapshot(reason)]

    def offered(
        self, offer: Offer | None, situation: Situation, now: float, *, leads_others: bool
    ) -> Changes:
        """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing.

        ``leads_others``: this peer leads a round of the next version in which it is no member.
        """
        if situation.phase is not Phase.WANTED:
            changes: Changes = [Count("offer_not_wanted")]
            if offer is not None and not self._snapshot_used:
                changes.append(GiveUp(None, f"{situation.phase}: not wanted any more", False))
            return changes
        if offer is None:
            return self.become_idle("the learner has nothing to offer", retry=True)
        self._pace.snapshot_taken(now)
        changes = [StopTimers((Timer.SNAPSHOT,))]
        return changes + self._use(offer, situation, now, leads_others=leads_others)

    def snapshot_late(self) -> Changes:
        reason = "the learner did not come to a safe point in time"
        return self.become_idle(reason, retry=True)

    def leave(self, reason: str, situation: Situation, *, retry: bool) -> Changes:
        """Abandon the attempt, if there is one. The fragment stays due, and a call stays open."""
        if situation.phase not in UNCOMMITTED:
            return []
        return [*self.abandon(reason), *self.become_idle(reason, retry=retry)]

    def leave_soon(self, situation: Situation) -> Changes:
        """Say in joins from now on that this peer is about to leave.

        A join that did not say it is withdrawn: it has older work, and nobody is called for it.
        """
        if self.leaves:
            return []
        self.leaves = True
        self.stands()
        return self.leave("about to leave", situation, retry=False)

    def attempt_failed(self) -> None:
        """An attempt led to no version. A peer that leaves is asked to try again all the time.

        While the others make a round without it, each further attempt would be as vain. It comes
        at once when it stands on their version, or when a leader calls.
        """
        wait_s = max(LEAVERS_WAIT_S, 2 * self._leavers_wait_s)
        self._leavers_wait_s = min(LEAVERS_WAIT_MAX_S, wait_s)

    def stands(self) -> None:
        """This peer stands elsewhere now: an attempt that failed may succeed."""
        self._leavers_wait_s = 0.0

    def _use(
        self, offer: Offer, situation: Situation, now: float, *, leads_others: bool
    ) -> Changes:
        """Join a leader with this offer, or fold it, unless it is of no use."""
        standing = situation.standing
        assert standing is not None
        if standing.chain.find(offer.base_version, offer.base_lineage) is None:
            return self._give_up_offer("its base is not in my chain")
        if offer.steps < 1 or offer.tokens < 1:
            return self._give_up_offer("nothing new since the last merge")
        stale = standing.version - min(situation.fresh_version, standing.version)
        is_old = now - situation.fresh_at > self._policy.stale_s
        if stale > self._policy.stale_max and is_old:
            return [
                BeginWork(standing.version),
                Note("stale", {"versions": stale}),
                Discard(f"stale: began {stale} versions ago"),
                *self.become_idle(f"began {stale} versions ago", retry=True),
            ]
        if leads_others:
            # A second round beside the one that it leads for others would fork the lineage.
            return self._give_up_offer("the roster that I closed is without me")
        self._offer = offer
        self._snapshot_used = True
        if self._folds:
            return [
                Become(Phase.FOLDING),
                SetTimer(Timer.FOLDING, now + self._policy.catch_up_s),
                Fold(self._folded_standing(standing, offer), offer.mark, "alone"),
            ]
        leader = self._first_leader(standing, situation, now)
        self._joins += 1
        if leader is None:
            return self._give_up_offer("nobody can lead")
        join = self._first_join(offer, standing, situation, stale)
        return self._join(Attempt(join, leader), now)

    def _first_leader(self, standing: Standing, situation: Situation, now: float) -> PeerId | None:
        """This peer, if it has a roster open, else the leader that called, or the first in rank."""
        call, self.call = self.call, None
        if situation.gathers:
            return self._id.me
        head = standing.head()
        if call is not None and now <= call.until and self._peers.follows(call.leader, head, now):
            return call.leader
        return self._peers.leader(head, (), now)

    def has_made(self, entry: Entry) -> bool:
        """True if a roster names a join of this machine, and not one that was made before a restart
        of the peer or of its agent alone."""
        is_numbered = self._id.first_number < entry.join <= self._joins
        return is_numbered and entry.incarnation == self._id.incarnation

    def _first_join(
        self, offer: Offer, standing: Standing, situation: Situation, stale: int
    ) -> Join:
        return Join(
            fragment=self._id.fragment,
            topic=self._id.topic,
            incarnation=self._id.incarnation,
            join=self._joins,
            head=standing.head(),
            merged_tokens=standing.merged.tokens,
            base_version=offer.base_version,
            staleness=stale,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
            batch_tokens_max=offer.batch_tokens_max,
            step_time_s=self._pace.step_time_s,
            bytes_per_s=situation.bytes_per_s,
            reachable=self._peers.reachable,
            codecs=self._id.codecs,
            level=self._pace.need.level,
            site=self._id.site,
            leaves=self.leaves,
        )

    def _give_up_offer(self, reason: str) -> Changes:
        return [GiveUp(None, reason, False), *self.become_idle(reason, retry=True)]

    def become_idle(self, reason: str, *, retry: bool) -> Changes:
        """Nothing is under way any more; offered work, if any, is settled already."""
        self.attempt = None
        self._offer = None
        self._folds = False
        self._snapshot_used = False
        changes: Changes = [
            *self._not_coming(reason),
            StopTimers(tuple(Timer)),
            Become(Phase.IDLE),
            Note("idle", {"reason": reason}),
        ]
        if retry:
            changes.append(RetryLater())
        changes.append(LeaveOwnRoster())
        return changes

    def folding_late(self) -> Changes:
        return self.become_idle("folding took too long", retry=True)

    def folded(self, situation: Situation) -> Changes:
        if situation.phase is not Phase.FOLDING or self._offer is None:
            return []
        assert situation.standing is not None
        standing = self._folded_standing(situation.standing, self._offer)
        return [
            Stand(standing, fresh=True),
            StartCycle(),
            Note("folded", {"version": standing.version}),
            *self.become_idle("folded", retry=False),
        ]

    def _folded_standing(self, standing: Standing, offer: Offer) -> Standing:
        return after_folding(
            standing,
            self._id.me,
            incarnation=self._id.incarnation,
            mark=offer.mark,
            tokens=offer.tokens,
        )

    # Finding the leader

    def _join(self, attempt: Attempt, now: float) -> Changes:
        failed = self._peers.avoided()[-messages.FAILED_MAX :]
        first_leader = attempt.first_leader
        join = msgspec.structs.replace(attempt.join, failed=failed)
        attempt = msgspec.structs.replace(
            attempt,
            join=self._id.signed(join, attempt.leader),
            leaders_tried=attempt.leaders_tried + 1,
            first_leader=attempt.leader if first_leader is None else first_leader,
            leader_life=self._peers.life_of(attempt.leader),
            asked_at=now,
            until=math.inf,
        )
        self.attempt = attempt
        if self._coming_to == attempt.leader:
            self._coming_to = None
        changes: Changes = self._not_coming("promised to another leader")
        if attempt.leaders_tried == 1:
            changes.append(Note("joining", {"leader": attempt.leader}))
        return [
            *changes,
            Become(Phase.JOINING),
            SetTimer(Timer.ANSWER, now + self._policy.answer_s),
            Send(attempt.leader, attempt.join),
        ]

    def link_lost(self, peer: PeerId, answer_at: float | None, now: float) -> Changes:
        """Ask the leader again soon: it may be the message that was lost."""
        if self.attempt is None or self.attempt.leader != peer:
            return []
        at = now + self._policy.suspect_s
        return [SetTimer(Timer.ANSWER, at if answer_at is None else min(at, answer_at))]

    def leader_silent(self, situation: Situation, now: float) -> Changes:
        """The leader did not answer in time, or its link broke."""
        attempt = self.attempt
        if attempt is None:
            return []
        if attempt.leader == self._id.me:
            if situation.roster_decides_at is None:
                return self._give_up_offer("my gathering came to nothing")
            return [SetTimer(Timer.ANSWER, situation.roster_decides_at + self._policy.answer_s)]
        if self._was_restarted(attempt):
            return self._leave_leader(attempt, RESTARTED, situation, now)
        if now >= attempt.until:
            reason = "it notes joins and closes no roster"
            return self._leave_leader(attempt, reason, situation, now)
        if not attempt.resent:
            asked_at = now if attempt.asked_at is None else attempt.asked_at
            self.attempt = msgspec.structs.replace(attempt, resent=True, asked_at=asked_at)
            return [
                SetTimer(Timer.ANSWER, now + self._policy.answer_s),
                Send(attempt.leader, attempt.join),
            ]
        silent: Changes = []
        if attempt.asked_at is not None:
            silent.append(Silent(attempt.leader, attempt.asked_at))
        return silent + self._leave_leader(attempt, NO_ANSWER, situation, now)

    def peer_silent(self, peer: PeerId, situation: Situation, now: float) -> Changes:
        """Another fragment found a peer silent: do not wait for it here as well."""
        attempt = self.attempt
        if attempt is None or peer == self._id.me or attempt.leader != peer:
            return []
        return self._leave_leader(attempt, NO_ANSWER, situation, now)

    def leader_seen_again(self, situation: Situation, now: float) -> Changes:
        """Leave a leader that was restarted: it knows nothing of the joins that it has noted.

        It would note them once more and, if closing a roster is what it dies of, all others waited
        for it again and again.
        """
        attempt = self.attempt
        if attempt is None or not self._was_restarted(attempt):
            return []
        return self._leave_leader(attempt, RESTARTED, situation, now)

    def _was_restarted(self, attempt: Attempt) -> bool:
        life = self._peers.life_of(attempt.leader)
        return None not in (life, attempt.leader_life) and life != attempt.leader_life

    def _leave_leader(
        self, attempt: Attempt, reason: str, situation: Situation, now: float
    ) -> Changes:
        assert situation.standing is not None
        fields = {"leader": attempt.leader, "phase": str(situation.phase)}
        self._peers.mark_failed(attempt.leader, now)
        changes: Changes = [
            Note("leader_silent", fields),
            *self.join_failed(attempt.leader, reason, weight=UNUSUAL_FAILURE),
            Send(attempt.leader, self.withdrawal(attempt.join)),
        ]
        leader = self._peers.leader(situation.standing.head(), (), now)
        if leader is None or attempt.leaders_tried >= LEADERS_TRIED_MAX:
            return changes + self._give_up_offer("no leader answered")
        changes.append(Note("next_leader", {"leader": leader}))
        return changes + self._join(self._redirected(attempt, leader), now)

    def _redirected(self, attempt: Attempt, leader: PeerId) -> Attempt:
        """The same offer to another leader; the join gets a new number, the old one is void."""
        self._joins += 1
        join = msgspec.structs.replace(attempt.join, join=self._joins)
        return msgspec.structs.replace(attempt, join=join, leader=leader, resent=False)

    def withdrawal(self, join: Join) -> messages.Withdraw:
        return messages.Withdraw(self._id.fragment, join.join, self._id.incarnation)

    def join_failed(self, leader: PeerId, reason: str, *, weight: int = 1) -> Changes:
        """A join with this leader led to no version. After several it is passed over.

        First at this version, and after each further failure for longer, until this peer finishes
        a round of it. It may be honest and see little of the swarm, or it may lie. It is
        not accused: the next in rank leads instead. When this peer leads itself and gets no further
        either, the others were not the reason: they are asked again.
        """
        if leader == self._id.me:
            self._failed_joins.clear()
            self._peers.passed_over.clear()
            return []
        if leader in self._peers.passed_over:
            return []
        count = self._failed_joins.pop(leader, 0) + weight
        self._failed_joins[leader] = count
        if count < FAILED_JOINS_MAX:
            return []
        doublings = min(count - FAILED_JOINS_MAX, PASSED_OVER_DOUBLINGS_MAX)
        self._peers.pass_over(leader, versions=2**doublings)
        return [Note("passed_over", {"leader": leader, "reason": reason})]

    def told_behind_in_vain(self, sender: PeerId, situation: Situation, now: float) -> Changes:
        """A peer says that this one is behind a version that too few have signed.

        As a leader it keeps all others from a round for as long as it stands there.
        """
        attempt = self.attempt
        if attempt is None or attempt.leader != sender or situation.phase not in _ANSWERED_IN:
            return []
        reason = "it says that I am behind a version that too few have signed"
        return self._leave_leader(attempt, reason, situation, now)

    def change_leader(self, leader: PeerId, now: float) -> Changes:
        """Send the join to another leader."""
        attempt = self.attempt
        assert attempt is not None
        if attempt.leaders_tried >= LEADERS_TRIED_MAX:
            reason = "sent from one leader to another too often"
            changes: Changes = []
            if attempt.first_leader is not None:
                changes = self.join_failed(attempt.first_leader, reason, weight=UNUSUAL_FAILURE)
            return changes + self._give_up_offer(reason)
        return self._join(self._redirected(attempt, leader), now)

    # Messages of leaders

    def called(
        self, sender: PeerId, call: messages.Call, situation: Situation, now: float
    ) -> Changes:
        answer = AnswerCall(sender, call.head, now + call.wait_s, call.leaves)
        if call.head is None or situation.standing is None:
            return [answer]
        return [Compare(sender, call.head), answer]

    def answer_call(self, answer: AnswerCall, situation: Situation, now: float) -> Changes:
        """Join the leader that called, change to it, or pass."""
        leader = answer.leader
        called = JoinCaller(leader, answer.until, answer.hurried)
        if not self._peers.may_lead(leader, now):
            return [Count("call_of_no_leader"), self._pass(leader, "you may not lead")]
        self._caller = leader
        head = situation.standing.head() if situation.standing is not None else None
        if leader in self._peers.passed_over:
            if not self._has_caught_up(leader, answer.head, head):
                passes = self._pass(leader, "I have joined you in vain")
                # Of two that gather and have nobody else, one goes over, or both would wait.
                alone = situation.gathers and len(self._peers.trainers(now)) <= 2
                return [passes, CallLeader(answer)] if alone else [passes]
            self._peers.stop_passing_over(leader)
        if situation.phase is Phase.CATCHING:
            self.call = called
            # Near the end of the run the leader waits until this peer has caught up.
            eager = self._pace.due_time.eager
            return [] if eager else [self._pass(leader, "catching up")]
        if situation.gathers:
            if not self._peers.outranks(leader, self._id.me, head, answer.head, now):
                return [CallLeader(answer)]
            return [HandOverRoster(leader), answer]
        attempt = self.attempt
        if attempt is None or situation.phase not in _ANSWERED_IN:
            return self.join_caller(called, situation, now)
        if attempt.leader == leader:
            # A leader that has noted the join and calls has lost it, with its answer.
            return [Send(leader, attempt.join)] if situation.phase is Phase.PROMISED else []
        if attempt.leader == self._id.me:
            return self.change_leader(leader, now)  # the own roster was handed over to it
        if head is None or not self._peers.follows(leader, head, now):
            return [self._pass(leader, "I follow another leader")]
        if self._peers.outranks(leader, attempt.leader, head, head, now):
            return [
                Note("changed_leader", {"to": leader}),
                Send(attempt.leader, self.withdrawal(attempt.join)),
                *self.change_leader(leader, now),
            ]
        return [self._pass(leader, "promised to another leader")]

    def _has_caught_up(self, leader: PeerId, theirs: Head | None, mine: Head | None) -> bool:
        """True if a leader that was passed over for being behind stands where this peer does.

        Of a swarm of two the other one had opened a roster of its own by then, and each waited
        in vain for the other until the quorum's deadline.
        """
        has_wasted_joins = self._failed_joins.get(leader, 0) >= FAILED_JOINS_MAX
        stands_here = mine is not None and theirs is not None and theirs.lineage == mine.lineage
        return stands_here and not has_wasted_joins

    def join_caller(self, called: JoinCaller, situation: Situation, now: float) -> Changes:
        """Join the leader that called at once if there are enough steps, else pass."""
        leader = called.leader
        if situation.phase is Phase.WANTED:
            self.call = called
            return self._come_to(leader, situation, now)
        enough = self._pace.answers_call(now, hurried=called.hurried)
        sits_out = self._sits_out(situation, now, called=True) and not called.hurried
        if self._may_join(situation) and enough and not sits_out:
            self.call = called
            self._folds = False
            came = Note("came_when_called", {"leader": leader})
            asked = self._ask_learner(f"called by {leader}", now)
            return [came, *self._come_to(leader, situation, now), *asked]
        if leader == self._id.me:
            waits = not situation.gathers or situation.phase in _ANSWERED_IN
            return [] if waits else [PassOwnRoster()]
        if self._id.book.orders.paused is not None:
            # It does not know of the pause, or it knows of its end and answers with that.
            directed = messages.Directed(self._id.fragment, self._id.book.orders.encoded)
            return [Send(leader, directed), self._pass(leader, self._id.book.orders.paused)]
        if situation.in_doubt:
            reason = "in doubt"
        elif sits_out:
            reason = f"my line carries one version of {self._pace.every.versions}"
        elif not enough:
            reason = "not enough steps"
        elif situation.is_final:
            reason = "the run has ended"
        else:
            reason = str(situation.phase)
        return [self._pass(leader, reason)]

    def _come_to(self, leader: PeerId, situation: Situation, now: float) -> Changes:
        """Tell the leader that called when the snapshot is expected.

        A leader that this peer does not follow has called for a round all the same, with another.
        """
        head = situation.standing.head() if situation.standing is not None else None
        me = self._id.me
        if head is None or not (leader == me or self._peers.follows(leader, head, now)):
            return [self._pass(leader, "I follow another leader")]
        changes: Changes = []
        if self._coming_to != leader:
            changes = self._not_coming("promised to another leader")
        self._coming_to = leader
        wait_s = self._pace.snapshot_left_s(now, unknown_s=self._policy.answer_s)
        return [*changes, Send(leader, messages.Coming(self._id.fragment, wait_s))]

    def _not_coming(self, reason: str) -> Changes:
        """Tell the leader that waits for this peer's snapshot that there is none."""
        leader, self._coming_to = self._coming_to, None
        return [] if leader is None or leader == self._id.me else [self._pass(leader, reason)]

    def _pass(self, leader: PeerId, reason: str) -> Send:
        return Send(leader, messages.Pass(self._id.fragment, reason))

    def _is_answer(self, sender: PeerId, join: int) -> bool:
        """True if this is the current leader's answer to the current join."""
        attempt = self.attempt
        return attempt is not None and (attempt.leader, attempt.join.join) == (sender, join)

    def noted(
        self, sender: PeerId, message: messages.Noted, situation: Situation, now: float
    ) -> Changes:
        attempt = self.attempt
        if attempt is None or not self._is_answer(sender, message.join):
            return [Count("stale_answer")]
        if situation.phase not in _ANSWERED_IN:
            return []
        longest_s = 2 * self._policy.quorum.wait_s
        until = attempt.until
        if until == math.inf:
            until = now + longest_s + self._policy.margin_s + self._policy.answer_s
        self.attempt = msgspec.structs.replace(attempt, resent=False, asked_at=None, until=until)
        at = now + min(message.wait_s, longest_s) + self._policy.margin_s
        return [Become(Phase.PROMISED), SetTimer(Timer.ANSWER, min(at, max(now, until)))]

    def redirected(
        self, sender: PeerId, message: messages.Redirect, situation: Situation, now: float
    ) -> Changes:
        if not self._is_answer(sender, message.join):
            return [Count("stale_answer")]
        if situation.phase not in _ANSWERED_IN:
            return []
        leader = message.leader
        self._peers.vouch(sender, leader)
        changes: Changes = [Note("redirected", {"by": sender, "to": leader})]
        if leader != self._id.me and not self._peers.may_lead(leader, now):
            changes += self.join_failed(sender, "it sends me to one that may not lead")
            other = self._peers.next_voucher(leader, now)
            if other is not None:
                return changes + self.change_leader(other, now)
            return changes + self._give_up_offer("sent to one that may not lead")
        if leader == sender or self._peers.has_failed(leader):
            reason = "it sends me to one that does not answer me"
            changes += self.join_failed(sender, reason, weight=UNUSUAL_FAILURE)
            return changes + self._give_up_offer("sent to a leader that does not answer me")
        # Others follow it: without this, those that passed it over and those that did not would
        # gather apart for as long as neither are a quorum.
        self._peers.stop_passing_over(leader)
        return changes + self.change_leader(leader, now)

    def turned_away(
        self,
        sender: PeerId,
        message: messages.NoQuorum | messages.Refused,
        situation: Situation,
        now: float,
    ) -> Changes:
        if not self._is_answer(sender, message.join):
            return [Count("stale_answer")]
        if isinstance(message, messages.Refused):
            leads_on = not message.behind
        else:
            leads_on = message.reason != messages.LEAVING
        if not leads_on:
            return self._pass_over(sender, message.reason, situation, now)
        weight = UNUSUAL_FAILURE if isinstance(message, messages.Refused) else 1
        return [
            Note("turned_away", {"by": sender, "reason": message.reason}),
            *self.join_failed(sender, f"it turned me away: {message.reason}", weight=weight),
            *self._give_up_offer(message.reason),
        ]

    def commit_refused(self, commit: Commit, reason: str, situation: Situation) -> Changes:
        """The commit of the leader that this peer is promised to does not hold.

        Whatever is wrong with it, the next one would be as wrong: a leader that ranks first for a
        version would stop the swarm for good.
        """
        attempt, standing = self.attempt, situation.standing
        index = commit.index(self._id.me)
        if attempt is None or standing is None or index is None or commit.leader == self._id.me:
            return []
        entry = commit.members[index]
        is_answer = (commit.leader, entry.join) == (attempt.leader, attempt.join.join)
        if not is_answer or commit.parents[entry.parent].lineage != standing.lineage:
            return []
        failed = self.join_failed(
            commit.leader, f"its commit does not hold: {reason}", weight=UNUSUAL_FAILURE
        )
        return [*failed, *self._give_up_offer(f"I declined the commit: {reason}")]

    def _pass_over(self, behind: PeerId, reason: str, situation: Situation, now: float) -> Changes:
        """A leader is behind this peer, or leaves: join the next in rank, at this version or for
        longer."""
        attempt = self.attempt
        assert attempt is not None and situation.standing is not None
        changes: Changes = [
            Note("turned_away", {"by": behind, "reason": reason}),
            *self.join_failed(behind, f"it turned me away: {reason}"),
        ]
        if behind not in self._peers.passed_over:
            self._peers.pass_over(behind, versions=1)
            changes.append(Note("passed_over", {"leader": behind, "reason": reason}))
        leader = self._peers.leader(situation.standing.head(), (), now)
        if leader in (None, behind) or attempt.leaders_tried >= LEADERS_TRIED_MAX:
            return changes + self._give_up_offer(reason)
        assert leader is not None
        changes.append(Note("next_leader", {"leader": leader}))
        return changes + self._join(self._redirected(attempt, leader), now)

    def too_late(
        self,
        sender: PeerId,
        message: messages.Closed,
        situation: Situation,
        now: float,
        *,
        knows_round: bool,
    ) -> Changes:
        """A roster closed without this peer: the next one is due a cycle from now for all."""
        self._left_out_of = max(self._left_out_of, message.version)
        was_called = self.call is not None and self.call.leader == sender
        if was_called:
            self.call = None
        if self.attempt is None or self.attempt.leader != sender:
            if sender != self._caller or not self._follows(message.version, situation, now):
                return [Count("stale_answer")]
            changes: Changes = []
            if was_called and situation.phase is Phase.WANTED:
                self._coming_to = None
                changes = [
                    Note("too_late", {"leader": sender}),
                    *self.become_idle("the roster closed without me", retry=False),
                ]
            return changes if knows_round else [*changes, _closed_by(message)]
        return [
            Note("too_late", {"leader": sender}),
            *self.join_failed(sender, "its roster closed without me"),
            *self._give_up_offer("the roster closed without me"),
            *([] if knows_round else [_closed_by(message)]),
        ]

    def _follows(self, version: int, situation: Situation, now: float) -> bool:
        """True if a closing of this version is news, and not far from where this peer stands.

        Among several groups it is that of one group: a peer that counted from it, without having
        been on its way there, would come to its own group's round too late.
        """
        standing = situation.standing
        newest = self._peers.closed_version
        if standing is None or self._peers.has_several_groups(now):
            return False
        return newest < version <= standing.version + 1 + self._policy.stale_max

    def abandon(self, reason: str) -> Changes:
        """Take back the offer and the join."""
        changes = self._not_coming(reason)
        attempt = self.attempt
        if attempt is not None:
            if attempt.leader != self._id.me:
                changes.append(Send(attempt.leader, self.withdrawal(attempt.join)))
            else:
                changes.append(TakeBackOwnJoin())
        if self._snapshot_used:
            changes.append(GiveUp(None, reason, False))
        self.attempt = None
        self._offer = None
        self._snapshot_used = False
        return [*changes, StopTimers((Timer.ANSWER, Timer.SNAPSHOT))]

    def take_call(self) -> JoinCaller | None:
        """Forget the call of a leader, and return it."""
        call, self.call = self.call, None
        return call

    def entered(self) -> None:
        """A commit that names this peer holds: the attempt has reached its end."""
        self.attempt = None

    def led_to_version(self, leader: PeerId) -> None:
        """This peer has finished a round of a leader: its earlier failures are forgotten.

        A commit alone is none: a leader that had each of its rounds sealed as void was never passed
        over, and its fragment stood still at the version for which it ranked first.
        """
        self._failed_joins.pop(leader, None)


def _closed_by(message: messages.Closed) -> RosterClosed:
    return RosterClosed(message.version, message.level)

"""Getting into a round of one fragment: from the learner's offer to the leader's commit.

The part of ``averaging.round.machine`` for a peer that wants to be led: when to offer, which leader
to join, what to do when a leader is silent or sends it elsewhere, and folding when no other peer
trains. Whether a commit holds is not decided here (``averaging.round.gathering.objections``).
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from averaging import messages
from averaging.history.standing import Standing, after_folding
from averaging.messages import Commit, Entry, Head, Join
from averaging.round.interface.effects import (
    Discard,
    Fold,
    GiveUp,
    TakeSnapshot,
)
from averaging.round.interface.inputs import Offer
from averaging.round.interface.phase import UNCOMMITTED, Phase
from averaging.round.opinions.fragment import Fragment
from averaging.round.opinions.pacemaker import Claim
from averaging.round.sealing.doubt import Doubting
from dht.identity import PeerId

LEADERS_TRIED_MAX = 6
"""Leaders that one attempt may turn to, redirects included."""
NO_ANSWER = "it does not answer"
NOTHING_COMES = "it notes joins and closes no roster"
LEAVERS_WAIT_S = 2.0
"""Time between two attempts of a peer that leaves, from one version: while the others make a round
without it, further ones are in vain, and nobody tells it of a round that comes to nothing."""


class Attempt(Struct, frozen=True):
    """One attempt to get into a round, from the offer to the commit."""

    join: Join
    leader: PeerId
    leaders_tried: int = 0
    resent: bool = False
    """True if the leader got the join a second time."""
    until: float = math.inf
    """A leader that has noted the join and not closed its roster by then does not lead. It has not
    noted it yet: infinite."""


class Called(Struct, frozen=True):
    """A leader, perhaps this peer itself, wants this peer in its round."""

    leader: PeerId
    attempt: int
    head: Head
    """The leader's standing."""
    until: float
    """How long it waits."""
    hurried: bool
    """A member is about to leave."""


class Joining:
    """One peer as a joiner."""

    def __init__(self, fragment: Fragment, doubting: Doubting) -> None:
        self._fragment = fragment
        self._doubting = doubting
        self._id = identity = fragment.identity
        self._policy = fragment.policy
        self._peers = fragment.peers
        self._pace = fragment.pace
        self._pacemaker = fragment.pacemaker
        self.attempt: Attempt | None = None
        """The join that leaders answer, while the phase is JOINING."""
        self.call: Called | None = None
        """The newest call of a leader. A peer that passed, as it had too few steps, comes when it
        has made them, if the leader waits until then."""
        self._folds = False
        """The offer that was asked for is to be folded."""
        self._folded: Standing | None = None
        """This peer's standing after the fold that is under way."""
        self.leaves = False
        """The peer is about to leave: work that cannot be merged now is lost."""
        self._due_at = -math.inf
        """When the fragment of a peer that leaves was last due from where it stands."""
        self._left_out_of = 0
        """The newest version whose roster closed without this peer."""
        self._joins = identity.first_number

    # The learner

    def due(self, now: float) -> None:
        """Ask the learner, unless something is under way; the fragment stays due."""
        if not self._may_join(now) or self._sits_out(now):
            return
        if self.leaves:
            if now < self._due_at + LEAVERS_WAIT_S:
                return
            self._due_at = now
        self._folds = False
        if self._peers.others_train(now) or (self.leaves and self._peers.keepers(now)):
            # A keeper merges it as a round of one: it gets the work encoded, not as a state.
            self._ask_learner(now, caller=self.call if self.is_called(now) else None)
        elif self.leaves and (lacked := self._lacked_version()) is not None:
            # A version made of its own work would only fork one that others have.
            self._fragment.note("lacks_version", version=lacked)
            self._fragment.attempt_failed()
        elif not self.leaves and now < self.alone_until(now):
            self._fragment.note("alone")
            self._fragment.attempt_failed()
        else:
            self._folds = True
            self._ask_learner(now)

    def alone_until(self, now: float) -> float:
        """When this peer, beside no other that trains, begins to merge its work by itself.

        Those that it does not see any more may go on elsewhere: until the work would be stale there
        it stays pending, and is lost on neither side of a partition. Nobody waits for those that
        have said goodbye. A fold would also replace the very state that a newcomer is fetching. One
        whose trainer makes no steps just now may go on in a moment: were both to fold, each while
        the other stood still, they would have two histories.
        """
        standing = self._fragment.standing
        assert standing is not None
        waits_since = [
            self._peers.unseen_since(standing.merged, now),
            self._fragment.fresh_at if self._peers.others_arrive(now) else None,
        ]
        known = [at for at in waits_since if at is not None]
        until = max(known) + self._policy.alone_s if known else -math.inf
        return max(until, self._peers.may_work_until(now))

    def _may_join(self, now: float) -> bool:
        return (
            self._fragment.phase is Phase.IDLE
            and self._peers.trains
            and self._fragment.standing is not None
            and self._doubting.doubt is None
            and not self._fragment.ending.is_final(now)
            and self._id.book.orders.paused is None
        )

    def _sits_out(self, now: float, *, called: bool = False) -> bool:
        """True if the line does not carry the next version (``averaging.rules.line_levels``)."""
        standing = self._fragment.standing
        stands_on = standing.version if standing is not None else 0
        version = 1 + max(stands_on, self._peers.closed_version)
        return self._pace.sits_out(version, now, called=called or self.is_called(now))

    def _lacked_version(self) -> int | None:
        """The newest version that others certified, or made without this peer, if it lacks it."""
        newest = max(self._fragment.shown_version, self._left_out_of)
        standing = self._fragment.standing
        return newest if standing is not None and standing.version < newest else None

    def is_called(self, now: float) -> bool:
        """True if a leader waits for this peer's join, and there are enough steps for it."""
        call = self.call
        if call is None or now > call.until:
            return False
        return self._pace.answers_call(now, hurried=call.hurried)

    def wants_a_round(self, now: float) -> bool:
        """True if this peer is due, or called, and nothing is under way."""
        wants = self._pace.is_due or self.is_called(now)
        return wants and self._may_join(now) and not self._sits_out(now)

    def _ask_learner(self, now: float, *, caller: Called | None = None) -> None:
        if caller is not None:
            self._come_to(caller.leader)
        self._fragment.goes_to(Phase.WANTED, until=now + self._policy.snapshot_s)
        self._fragment.emit(TakeSnapshot())

    def offered(self, offer: Offer | None, now: float) -> None:
        """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing."""
        phase = self._fragment.phase
        if phase is not Phase.WANTED:
            self._fragment.count("offer_not_wanted")
            if offer is not None and phase in (Phase.IDLE, Phase.CATCHING):
                self._fragment.emit(GiveUp(None, f"{phase}: not wanted any more", False))
        elif offer is None:
            self.become_idle("the learner has nothing to offer", retry=True)
        else:
            self._use(offer, now)

    def leave(self, reason: str, *, retry: bool) -> None:
        """Abandon the attempt, if there is one. The fragment stays due, and a call stays open."""
        if self._fragment.phase in UNCOMMITTED:
            self.abandon(reason)
            self.become_idle(reason, retry=retry)

    def leave_soon(self) -> None:
        """Say in joins from now on that this peer is about to leave.

        A join that did not say it is withdrawn: it has older work, and nobody is called for it.
        """
        if not self.leaves:
            self.leaves = True
            self.stands()
            self.leave("about to leave", retry=False)

    def stands(self) -> None:
        """This peer stands elsewhere now: an attempt that failed may succeed."""
        self._due_at = -math.inf
        self.call = None

    def _use(self, offer: Offer, now: float) -> None:
        """Join a leader with this offer, or fold it, unless it is of no use."""
        fragment = self._fragment
        standing = fragment.standing
        assert standing is not None
        if standing.chain.find(offer.base_version, offer.base_lineage) is None:
            self._give_up_offer("its base is not in my chain")
            return
        if offer.steps < 1 or offer.tokens < 1:
            self._give_up_offer("nothing new since the last merge")
            return
        stale = standing.version - min(fragment.fresh_version, standing.version)
        is_old = now - fragment.fresh_at > self._policy.stale_s
        if stale > self._policy.stale_max and is_old:
            fragment.fresh_version, fragment.fresh_at = standing.version, now
            fragment.note("stale", versions=stale)
            fragment.emit(Discard(f"stale: began {stale} versions ago"))
            self.become_idle(f"began {stale} versions ago", retry=True)
            return
        led, several = fragment.under_way, self._peers.has_several_groups(now)
        if led is not None and led.commit.version > standing.version and not several:
            # A second round beside the one that it leads for others would fork the lineage.
            self._give_up_offer("the roster that I closed is without me")
            return
        if self._folds:
            incarnation, mark = self._id.incarnation, offer.mark
            self._folded = after_folding(
                standing, self._id.me, incarnation=incarnation, mark=mark, tokens=offer.tokens
            )
            fragment.goes_to(Phase.FOLDING, until=now + self._policy.catch_up_s)
            fragment.emit(Fold(self._folded, mark))
            return
        leader = self._first_leader(standing, now)
        self._joins += 1
        if leader is None:
            self._give_up_offer("nobody can lead")
            return
        self._join(Attempt(self._first_join(offer, standing, stale), leader), now)

    def _first_leader(self, standing: Standing, now: float) -> PeerId | None:
        """This peer, if it has a roster open, else the leader that called, or the first in rank."""
        call, self.call = self.call, None
        if self._fragment.open_roster is not None:
            return self._id.me
        head, pacemaker = standing.head(), self._pacemaker
        if call and now <= call.until and not pacemaker.shuns(call.leader, head, now):
            pacemaker.comes_along(call.attempt)
            return call.leader
        return pacemaker.leader(head, now)

    def has_made(self, entry: Entry) -> bool:
        """True if a roster names a join of this machine, and not one that was made before a restart
        of the peer or of its agent alone."""
        is_numbered = self._id.first_number < entry.join <= self._joins
        return is_numbered and entry.incarnation == self._id.incarnation

    def _first_join(self, offer: Offer, standing: Standing, stale: int) -> Join:
        return Join(
            fragment=self._id.fragment,
            topic=self._id.topic,
            incarnation=self._id.incarnation,
            join=self._joins,
            head=standing.head(),
            base_version=offer.base_version,
            staleness=stale,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
            batch_tokens_max=offer.batch_tokens_max,
            bytes_per_s=self._peers.bytes_per_s,
            reachable=self._peers.reachable,
            codecs=self._id.codecs,
            level=self._pace.need.level,
            site=self._id.site,
            leaves=self.leaves,
        )

    def _give_up_offer(self, reason: str) -> None:
        self._fragment.emit(GiveUp(None, reason, False))
        self.become_idle(reason, retry=True)

    def become_idle(self, reason: str, *, retry: bool) -> None:
        """Nothing is under way any more; offered work, if any, is settled already."""
        self.attempt = self._folded = None
        self._folds = False
        self._fragment.goes_to(Phase.IDLE)
        self._fragment.note("idle", reason=reason)
        if retry:
            self.call = None
            self._fragment.attempt_failed()
        self._fragment.leave_own_roster()

    def folded(self) -> None:
        fragment, standing = self._fragment, self._folded
        if standing is None:
            return
        fragment.stand(standing, fresh=True)
        self._pace.start_cycle(fragment.now)
        fragment.note("folded", version=standing.version)
        self.become_idle("folded", retry=False)

    # Finding the leader

    def _join(self, attempt: Attempt, now: float) -> None:
        join = msgspec.structs.replace(attempt.join, attempt=self._pacemaker.attempt)
        attempt = msgspec.structs.replace(
            attempt,
            join=self._id.signed(join, attempt.leader),
            leaders_tried=attempt.leaders_tried + 1,
            until=math.inf,
        )
        self.attempt = attempt
        if attempt.leaders_tried == 1:
            self._fragment.note("joining", leader=attempt.leader)
        self._fragment.goes_to(Phase.JOINING, until=now + self._policy.answer_s)
        self._fragment.send(attempt.leader, attempt.join)

    def link_lost(self, peer: PeerId, now: float) -> None:
        """Ask the leader again soon: it may be the message that was lost."""
        if self.attempt is not None and self.attempt.leader == peer:
            until = self._fragment.phase_until
            self._fragment.phase_until = min(until, now + self._policy.suspect_s)

    def leader_silent(self, now: float) -> None:
        """The leader did not answer in time, or its link broke."""
        attempt = self.attempt
        if attempt is None:
            return
        if not attempt.resent:
            self.attempt = msgspec.structs.replace(attempt, resent=True)
            self._fragment.phase_until = now + self._policy.answer_s
            self._fragment.send(attempt.leader, attempt.join)
        else:
            self._peers.mark_failed(attempt.leader, now)
            phase = str(self._fragment.phase)
            self._fragment.note("leader_silent", leader=attempt.leader, phase=phase)
            has_noted = attempt.until < math.inf
            self.join_failed(attempt.leader, NOTHING_COMES if has_noted else NO_ANSWER)
            self.withdraw(attempt)
            self._join_another("no leader answered", now)

    def _join_another(self, reason: str, now: float) -> None:
        """Join the leader of a later attempt with the same offer: this one has come to nothing."""
        attempt, standing = self.attempt, self._fragment.standing
        assert attempt is not None and standing is not None
        another = self._pacemaker.leader(standing.head(), now)
        if another in (None, attempt.leader) or attempt.leaders_tried >= LEADERS_TRIED_MAX:
            self._give_up_offer(reason)
            return
        self._fragment.note("next_leader", leader=another)
        self._join(self._redirected(attempt, another), now)

    def _redirected(self, attempt: Attempt, leader: PeerId) -> Attempt:
        """The same offer to another leader; the join gets a new number, the old one is void."""
        self._joins += 1
        join = msgspec.structs.replace(attempt.join, join=self._joins)
        return msgspec.structs.replace(attempt, join=join, leader=leader, resent=False)

    def withdraw(self, attempt: Attempt) -> None:
        incarnation = self._id.incarnation
        withdrawal = messages.Withdraw(self._id.fragment, attempt.join.join, incarnation)
        self._fragment.send(attempt.leader, withdrawal)

    def join_failed(self, leader: PeerId, reason: str) -> None:
        """A join with this leader led to no version: the next attempt is another one's."""
        if self._pacemaker.failed(leader, self._fragment.now) > 1:
            self._fragment.note("passed_over", leader=leader, reason=reason)

    def change_leader(self, leader: PeerId, now: float) -> None:
        """Send the join to another leader."""
        attempt = self.attempt
        assert attempt is not None
        if leader == self._id.me or attempt.leaders_tried < LEADERS_TRIED_MAX:
            self._join(self._redirected(attempt, leader), now)
            return
        reason = "sent from one leader to another too often"
        self.join_failed(attempt.leader, reason)
        self._give_up_offer(reason)

    # Messages of leaders

    def answer_call(self, called: Called, now: float) -> None:
        """Join the leader that called, change to it, or pass; this peer has no roster open."""
        attempt, leader = self.attempt, called.leader
        if attempt is None:
            self.join_caller(called, now)
            return
        if attempt.leader == leader:
            if attempt.until < math.inf:
                # A leader that has noted the join and calls has lost it, with its answer.
                self._fragment.send(leader, attempt.join)
            return
        if attempt.leader == self._id.me:
            self.change_leader(leader, now)  # the own roster was handed over to it
            return
        head, to = self._fragment.here.head(), Claim(called.attempt, leader)
        if self._pacemaker.gives_way(attempt.leader, to, leader, head, called.head, now):
            self._fragment.note("changed_leader", to=leader)
            self.withdraw(attempt)
            self.change_leader(leader, now)
        else:
            self.pass_to(leader, "promised to another leader")

    def join_caller(self, called: Called, now: float) -> None:
        """Join the leader that called at once if there are enough steps, else pass."""
        leader, phase = called.leader, self._fragment.phase
        self.call = called
        if phase is Phase.WANTED:
            self._come_to(leader)
            return
        enough = self._pace.answers_call(now, hurried=called.hurried)
        sits_out = self._sits_out(now, called=True) and not called.hurried
        if self._may_join(now) and enough and not sits_out:
            self._folds = False
            self._fragment.note("came_when_called", leader=leader)
            self._ask_learner(now, caller=called)
            return
        if leader == self._id.me:
            roster = self._fragment.open_roster
            if roster is not None and self.attempt is None:
                roster.passed.add(leader)
            return
        if self._id.book.orders.paused is not None:
            # It does not know of the pause, or it knows of its end and answers with that.
            self._fragment.tell_directive(leader)
            reason = self._id.book.orders.paused
        elif self._doubting.doubt is not None:
            reason = "in doubt"
        elif sits_out:
            reason = f"my line carries one version of {self._pace.every.versions}"
        elif not enough:
            reason = "not enough steps"
        elif self._fragment.ending.is_final(now):
            reason = "the run has ended"
        else:
            reason = str(phase)
        self.pass_to(leader, reason)

    def _come_to(self, leader: PeerId) -> None:
        """Tell the leader that called that this peer joins with its snapshot. If it does not, it
        passes when it is called again."""
        self._fragment.send(leader, messages.Coming(self._id.fragment))

    def pass_to(self, leader: PeerId, reason: str) -> None:
        self._fragment.send(leader, messages.Pass(self._id.fragment, reason))

    def _is_answer(self, sender: PeerId, join: int) -> bool:
        """True if this is the current leader's answer to the current join."""
        attempt = self.attempt
        return attempt is not None and (attempt.leader, attempt.join.join) == (sender, join)

    def noted(self, sender: PeerId, message: messages.Noted, now: float) -> None:
        attempt = self.attempt
        if attempt is None or not self._is_answer(sender, message.join):
            self._fragment.count("stale_answer")
            return
        until = min(attempt.until, now + self._policy.quorum.wait_s + self._policy.margin_s)
        if now < until:  # else it notes the same join again and again
            self.attempt = msgspec.structs.replace(attempt, resent=False, until=until)
            self._fragment.phase_until = until

    def redirected(self, sender: PeerId, message: messages.Redirect, now: float) -> None:
        if not self._is_answer(sender, message.join):
            self._fragment.count("stale_answer")
            return
        pacemaker, standing = self._pacemaker, self._fragment.standing
        assert standing is not None
        self._fragment.note("redirected", by=sender, to=message.leader)
        pacemaker.comes_along(message.attempt)
        leader: PeerId | None = message.leader
        if message.leader != self._id.me and pacemaker.shuns(message.leader, standing.head(), now):
            # At a later attempt the same peer may lead.
            self.join_failed(message.leader, "I do not follow it")
            leader = pacemaker.leader(standing.head(), now)
        if leader is None:
            self._give_up_offer("sent to a leader that I do not follow")
        else:
            self.change_leader(leader, now)

    def turned_away(self, sender: PeerId, message: messages.Refused, now: float) -> None:
        if not self._is_answer(sender, message.join):
            self._fragment.count("stale_answer")
            return
        self._fragment.note("turned_away", by=sender, reason=message.reason)
        self.join_failed(sender, f"it turned me away: {message.reason}")
        if message.another_leads:
            self._join_another(message.reason, now)
        else:
            self._give_up_offer(message.reason)

    def commit_refused(self, commit: Commit, reason: str) -> None:
        """The commit of the leader that this peer is promised to does not hold.

        Whatever is wrong with it, the next one would be as wrong: a leader that ranks first for a
        version would stop the swarm for good.
        """
        attempt, standing = self.attempt, self._fragment.standing
        index = commit.index(self._id.me)
        if attempt is None or standing is None or index is None or commit.leader == self._id.me:
            return
        entry = commit.members[index]
        is_answer = (commit.leader, entry.join) == (attempt.leader, attempt.join.join)
        if is_answer and commit.parents[entry.parent].lineage == standing.lineage:
            failure = f"its commit does not hold: {reason}"
            self.join_failed(commit.leader, failure)
            self._give_up_offer(f"I declined the commit: {reason}")

    def too_late(
        self, sender: PeerId, message: messages.Closed, now: float, *, knows_round: bool
    ) -> None:
        """A roster closed without this peer: the next one is due a cycle from now for all."""
        self._left_out_of = max(self._left_out_of, message.version)
        was_called = self.call is not None and self.call.leader == sender
        if was_called:
            self.call = None
        if self.attempt is not None and self.attempt.leader == sender:
            self._fragment.note("too_late", leader=sender)
            self.join_failed(sender, "its roster closed without me")
            self._give_up_offer("the roster closed without me")
        elif not was_called or not self._follows(message.version, now):
            self._fragment.count("stale_answer")
            return
        elif self._fragment.phase is Phase.WANTED:
            self._fragment.note("too_late", leader=sender)
            self.become_idle("the roster closed without me", retry=False)
        if not knows_round:
            self._fragment.roster_closed(message.version, message.level)

    def _follows(self, version: int, now: float) -> bool:
        """True if a closing of this version is news, and not far from where this peer stands.

        Among several groups it is that of one group: a peer that counted from it, without having
        been on its way there, would come to its own group's round too late.
        """
        standing = self._fragment.standing
        newest = self._peers.closed_version
        if standing is None or self._peers.has_several_groups(now):
            return False
        return newest < version <= standing.version + 1 + self._policy.stale_max

    def abandon(self, reason: str) -> None:
        """Take back the offer and the join. The phase is the caller's."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            if attempt.leader != self._id.me:
                self.withdraw(attempt)
            else:
                self._fragment.take_back_own_join()
            self._fragment.emit(GiveUp(None, reason, False))

    def take_call(self) -> Called | None:
        """Forget the call of a leader, and return it."""
        call, self.call = self.call, None
        return call

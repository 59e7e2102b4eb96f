"""Getting into a round of one fragment: from the learner's offer to the leader's commit.

The half of ``averaging.round.machine`` that wants to be led: when to offer, whom to join, whom to
turn to when a leader is silent or somebody else's, and folding when nobody is there. It belongs to
one ``FragmentRounds`` and shares its phase and its voice. Whether a commit holds is not decided
here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from averaging import messages as said
from averaging.history.standing import after_folding
from averaging.messages import Join
from averaging.round.effects import Discard, Fold, GiveUp, Silent, TakeSnapshot
from averaging.round.inputs import Offer
from averaging.round.neighbourhood import Neighbourhood
from averaging.round.phase import Phase
from dht.identity import PeerId

if TYPE_CHECKING:
    from averaging.round.machine import FragmentRounds

ATTEMPTS_MAX = 6
"""Leaders that one attempt may turn to, redirects included."""
BALKS_MAX = 9
"""When so many of my joins with one leader came to nothing, at one version, I pass it over ..."""
STRONG_BALK = 3
"""... where what an honest leader hardly does counts this much: refuse, send round in a circle."""
BALKED_MAX = 64


@dataclass(slots=True)
class Attempt:
    """One try to get into a round, from the offer to the commit."""

    join: Join
    leader: PeerId
    turns: int = 0
    resent: bool = False
    first: PeerId | None = None
    """Whom I turned to first."""
    asked_at: float | None = None
    """When I said to it what it has not answered yet."""
    until: float = math.inf
    """A leader that has noted me and not closed its roster by then does not lead."""


class Joining:
    """One peer as somebody who wants to be led."""

    __slots__ = (
        "_alone_since",
        "_around",
        "_balks",
        "_fold",
        "_joins",
        "_me",
        "_met_anybody",
        "_offer",
        "_peer",
        "_snapshot_used",
        "attempt",
        "called_until",
    )

    def __init__(self, peer: FragmentRounds, around: Neighbourhood) -> None:
        self._peer = peer
        self._me = peer.me
        self._around = around
        self.attempt: Attempt | None = None
        self.called_until: tuple[PeerId, float] | None = None
        """Who called me, and until when it waits."""
        self._offer: Offer | None = None
        self._fold = False
        self._snapshot_used = False
        self._alone_since: float | None = None
        self._met_anybody = False
        self._joins = 0
        self._balks: OrderedDict[PeerId, int] = OrderedDict()

    def __repr__(self) -> str:
        leader = self.attempt.leader if self.attempt is not None else None
        return f"Joining({self._me}, leader={leader})"

    # The learner

    def due(self, now: float) -> None:
        """Ask the learner, unless something is under way; what is due stays due."""
        if not self._may_join():
            return
        self._fold = False
        if self._around.others_train(now):
            self._alone_since = None
            self._met_anybody = True
        else:
            if self._alone_since is None:
                self._alone_since = now
            # A fold would replace the very state that a newcomer is fetching.
            founding = (
                self._peer.founder and not self._met_anybody and not self._around.others_arrive(now)
            )
            if not founding and now - self._alone_since < self._peer.policy.alone_s:
                self._peer.event("alone")
                self._peer.due_time.came_to_nothing(self._peer.step, self._peer.cycle(now))
                return
            self._fold = True
        self._want("alone, so I fold" if self._fold else "due", now)

    def _may_join(self) -> bool:
        return (
            self._peer.phase is Phase.IDLE
            and self._peer.trains
            and self._peer.standing is not None
            and self._peer.doubt is None
            and not self._peer.is_final
        )

    def is_called(self, now: float) -> bool:
        """Whether somebody waits for me to join."""
        return self.called_until is not None and now <= self.called_until[1]

    def wants_a_round(self, now: float) -> bool:
        """Whether I am due, or called, and nothing is under way."""
        is_due = self._peer.due_time.is_due(self._peer.step)
        return self._may_join() and (is_due or self.is_called(now))

    def _want(self, reason: str, now: float) -> None:
        self._peer.to(Phase.WANTED)
        self._peer.timers["snapshot"] = now + self._peer.policy.snapshot_s
        self._peer.emit(TakeSnapshot(reason))

    def answered(self, offer: Offer | None, now: float) -> None:
        """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing."""
        if self._peer.phase is not Phase.WANTED:
            self._peer.counters["offer_not_wanted"] += 1
            if offer is not None and not self._snapshot_used:
                self._peer.emit(GiveUp(None, f"{self._peer.phase}: not wanted any more", False))
        elif offer is None:
            self.idle(now, "the learner has nothing to offer", retry=True)
        else:
            self._peer.timers.pop("snapshot", None)
            self._offered(offer, now)

    def give_way(self, reason: str, now: float) -> None:
        """Leave this turn to another fragment. Whatever I am due, or called for, holds on."""
        if self._peer.phase in (Phase.WANTED, Phase.JOINING, Phase.PROMISED):
            self.leave(reason)
            self.idle(now, reason, retry=False)

    def _offered(self, offer: Offer, now: float) -> None:
        assert self._peer.standing is not None
        standing = self._peer.standing
        known = standing.chain.find(offer.base_version, offer.base_lineage)
        if known is None:
            self._give_up_offer("its base is not in my chain", now)
            return
        if offer.steps < 1 or offer.tokens < 1:
            self._give_up_offer("nothing new since the last merge", now)
            return
        stale = standing.version - min(self._peer.fresh_version, standing.version)
        if stale > self._peer.policy.stale_max:
            self._peer.fresh_version = standing.version
            self._peer.event("stale", versions=stale)
            self._peer.emit(Discard(f"stale: began {stale} versions ago"))
            self.idle(now, f"began {stale} versions ago", retry=True)
            return
        if self._peer.leading.is_under_way(standing.version, now):
            # Beside the round that I lead for others, mine would be another version of the same.
            self._give_up_offer("the roster that I closed is without me", now)
            return
        self._offer = offer
        self._snapshot_used = True
        if self._fold:
            after = after_folding(
                standing,
                self._me,
                incarnation=self._peer.incarnation,
                mark=offer.mark,
                tokens=offer.tokens,
            )
            self._peer.to(Phase.FOLDING)
            self._peer.timers["folding"] = now + self._peer.policy.catch_up_s
            self._peer.emit(Fold(after, offer.mark, "alone"))
            return
        self._joins += 1
        join = Join(
            fragment=self._peer.fragment,
            topic=self._peer.topic,
            incarnation=self._peer.incarnation,
            join=self._joins,
            head=standing.head(),
            merged_tokens=standing.merged.tokens,
            base_version=offer.base_version,
            staleness=stale,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
            batch_tokens_max=offer.batch_tokens_max,
            step_time_s=self._peer.step_time_s,
            bytes_per_s=self._peer.bytes_per_s,
            reachable=self._peer.reachable,
            codecs=self._peer.codecs,
            site=self._peer.site,
        )
        called, self.called_until = self.called_until, None
        if self._peer.gathering is not None:
            leader: PeerId | None = self._me
        elif called is not None and now <= called[1] and not self._around.is_unfit(called[0]):
            leader = called[0]
        else:
            leader = self._around.leader(standing.version, (), now)
        if leader is None:
            self._give_up_offer("nobody can lead", now)
            return
        self._join(Attempt(join, leader), now)

    def _give_up_offer(self, reason: str, now: float) -> None:
        self._offer = None
        self.attempt = None
        self._snapshot_used = False
        self._peer.emit(GiveUp(None, reason, False))
        self.idle(now, reason, retry=True)

    def idle(self, now: float, reason: str, *, retry: bool) -> None:
        """Nothing under way any more; what was offered, if anything, is settled already."""
        for name in ("snapshot", "answer", "catching", "folding"):
            self._peer.timers.pop(name, None)
        self.attempt = None
        self._offer = None
        self._fold = False
        self._snapshot_used = False
        self._peer.to(Phase.IDLE)
        self._peer.event("idle", reason=reason)
        if retry:
            self._peer.due_time.came_to_nothing(self._peer.step, self._peer.cycle(now))
        self._take_back_own_join()
        if self._peer.gathering is not None:
            self._peer.gathering.passed.add(self._me)
            self._peer.leading.consider_closing(now)

    def folding_took_too_long(self, now: float) -> None:
        self._fold = False
        self.idle(now, "folding took too long", retry=True)

    def folded(self, now: float) -> None:
        """``Fold`` is done."""
        if (
            self._peer.phase is Phase.FOLDING
            and self._offer is not None
            and self._peer.standing is not None
        ):
            standing = after_folding(
                self._peer.standing,
                self._me,
                incarnation=self._peer.incarnation,
                mark=self._offer.mark,
                tokens=self._offer.tokens,
            )
            self._peer.stand(standing, fresh=True)
            self._peer.due_time.closed(self._peer.step, self._peer.cycle(now))
            self._peer.event("folded", version=standing.version)
            self.idle(now, "folded", retry=False)

    # Finding the leader

    def _join(self, attempt: Attempt, now: float) -> None:
        self.attempt = attempt
        attempt.turns += 1
        if attempt.turns == 1:
            self._peer.event("joining", leader=attempt.leader)
        self._peer.to(Phase.JOINING)
        self._peer.timers["answer"] = now + self._peer.policy.answer_s
        if attempt.first is None:
            attempt.first = attempt.leader
        attempt.asked_at = now
        attempt.until = math.inf
        attempt.join = _with_failed(attempt.join, self._around.unfit()[-said.FAILED_MAX :])
        self._peer.say(attempt.leader, attempt.join)

    def leader_silent(self, attempt: Attempt, now: float) -> None:
        """My leader did not answer in time, or its link broke."""
        if attempt.leader == self._me:
            if self._peer.gathering is None:
                self._give_up_offer("my gathering came to nothing", now)
            else:
                self._peer.timers["answer"] = (
                    self._peer.gathering.until + self._peer.policy.answer_s
                )
            return
        if now >= attempt.until:
            reason = "it notes joins and closes no roster"
            self.balked(attempt.leader, reason, weight=STRONG_BALK)
        elif not attempt.resent:
            attempt.resent = True
            if attempt.asked_at is None:
                attempt.asked_at = now
            self._peer.timers["answer"] = now + self._peer.policy.answer_s
            self._peer.say(attempt.leader, attempt.join)
            return
        elif attempt.asked_at is not None:
            self._peer.emit(Silent(attempt.leader, attempt.asked_at))
        self._turn_from(attempt, now)

    def silent(self, peer: PeerId, now: float) -> None:
        """It does not answer about another fragment: no use in waiting that long here as well."""
        attempt = self.attempt
        if attempt is not None and attempt.leader == peer != self._me:
            self._turn_from(attempt, now)

    def _turn_from(self, attempt: Attempt, now: float) -> None:
        self._peer.event("leader_silent", leader=attempt.leader, phase=str(self._peer.phase))
        self._around.fail(attempt.leader, now)
        self._peer.say(attempt.leader, self._peer.withdrawal(attempt.join))
        self._next_leader(attempt, now)

    def balked(self, leader: PeerId, reason: str, *, weight: int = 1) -> None:
        """My joining this leader came to nothing. Whoever makes a habit of it is passed over.

        It may be honest, and its view of the swarm poor, or it may lie. Nobody is accused: the
        next in rank leads, until I stand on another version, or until it is I who leads and gets
        no further: then it was not them.
        """
        if leader == self._me:
            self.forgive()
            return
        if leader in self._around.passed_over:
            return
        count = self._balks.pop(leader, 0) + weight
        if count < BALKS_MAX:
            self._balks[leader] = count
            while len(self._balks) > BALKED_MAX:
                self._balks.popitem(last=False)
            return
        self._around.pass_over(leader)
        self._peer.event("passed_over", leader=leader, reason=reason)

    def forgive(self) -> None:
        """Whoever leads next gets a fresh chance."""
        self._balks.clear()
        self._around.passed_over.clear()

    def _next_leader(self, attempt: Attempt, now: float) -> None:
        assert self._peer.standing is not None
        leader = self._around.leader(self._peer.standing.version, (), now)
        if leader is None or attempt.turns >= ATTEMPTS_MAX:
            self._give_up_offer("no leader answered", now)
            return
        attempt.resent = False
        self._joins += 1  # what I told the one before me must not hold any more
        attempt.join = _renumbered(attempt.join, self._joins)
        attempt.leader = leader
        self._peer.event("next_leader", leader=leader)
        self._join(attempt, now)

    def follow(self, attempt: Attempt, leader: PeerId, now: float) -> None:
        """Take my ``Join`` to another leader."""
        if attempt.turns >= ATTEMPTS_MAX:
            reason = "sent from one leader to another too often"
            if attempt.first is not None:
                self.balked(attempt.first, reason, weight=STRONG_BALK)
            self._give_up_offer(reason, now)
            return
        attempt.leader = leader
        attempt.resent = False
        self._joins += 1
        attempt.join = _renumbered(attempt.join, self._joins)
        self._join(attempt, now)

    # What leaders say

    def called(self, sender: PeerId, call: said.Call, now: float) -> None:
        if call.head is not None and self._peer.standing is not None:
            self._peer.catching.compare(sender, call.head, now)
        if sender in self._around.passed_over:
            self._peer.say(sender, said.Pass(self._peer.fragment, "I have joined you in vain"))
            return
        if self._peer.phase is Phase.CATCHING:
            self.called_until = (sender, now + call.wait_s)
            if not self._peer.due_time.eager:  # at the end it is waited for
                self._peer.say(sender, said.Pass(self._peer.fragment, "catching up"))
            return
        if self._peer.gathering is not None:
            if not self._around.outranks(sender, self._me):
                self._peer.leading.called_by_a_lower_one(sender, now)
                return
            self._peer.leading.hand_over(self._peer.gathering, sender, now)
        if self.attempt is not None and self._peer.phase in (Phase.JOINING, Phase.PROMISED):
            if self.attempt.leader == sender:
                return
            if self.attempt.leader == self._me:
                self.follow(self.attempt, sender, now)
            elif self._around.outranks(sender, self.attempt.leader):
                self._peer.event("changed_leader", to=sender)
                self._peer.say(self.attempt.leader, self._peer.withdrawal(self.attempt.join))
                self.follow(self.attempt, sender, now)
            else:
                self._peer.say(sender, said.Pass(self._peer.fragment, "promised to another leader"))
            return
        self.maybe_come(sender, now + call.wait_s, now)

    def maybe_come(self, leader: PeerId, until: float, now: float) -> None:
        """I was called. Who has enough steps joins at once, the others say so."""
        if self._peer.phase is Phase.WANTED:
            self.called_until = (leader, until)
            return
        enough = self._peer.due_time.answers_call(self._peer.step, self._peer.cycle(now))
        if self._may_join() and enough:
            self.called_until = (leader, until)
            self._fold = False
            self._alone_since = None
            self._met_anybody = True
            self._peer.event("came_when_called", leader=leader)
            self._want(f"called by {leader}", now)
            return
        reason = (
            "in doubt"
            if self._peer.doubt
            else "not enough steps"
            if not enough
            else "the run has its tokens"
            if self._peer.is_final
            else self._peer.phase
        )
        if leader == self._me:
            if self._peer.gathering is not None and self._peer.phase not in (
                Phase.JOINING,
                Phase.PROMISED,
            ):
                self._peer.gathering.passed.add(self._me)
        else:
            self._peer.say(leader, said.Pass(self._peer.fragment, str(reason)))

    def _answers_me(self, sender: PeerId, join: int) -> Attempt | None:
        attempt = self.attempt
        if attempt is None or attempt.leader != sender or attempt.join.join != join:
            self._peer.counters["stale_answer"] += 1
            return None
        return attempt

    def noted(self, sender: PeerId, message: said.Noted, now: float) -> None:
        attempt = self._answers_me(sender, message.join)
        if attempt is None or self._peer.phase not in (Phase.JOINING, Phase.PROMISED):
            return
        self._peer.to(Phase.PROMISED)
        attempt.resent = False
        attempt.asked_at = None
        policy = self._peer.policy
        longest_s = 2 * policy.quorum.wait_s
        if attempt.until == math.inf:
            attempt.until = now + longest_s + policy.margin_s + policy.answer_s
        at = now + min(message.wait_s, longest_s) + policy.margin_s
        self._peer.timers["answer"] = min(at, max(now, attempt.until))

    def redirected(self, sender: PeerId, message: said.Redirect, now: float) -> None:
        attempt = self._answers_me(sender, message.join)
        if attempt is None or self._peer.phase not in (Phase.JOINING, Phase.PROMISED):
            return
        self._peer.event("redirected", by=sender, to=message.leader)
        if message.leader == sender or self._around.is_unfit(message.leader):
            reason = "it sends me to one that does not answer me"
            self.balked(sender, reason, weight=STRONG_BALK)
            self._give_up_offer("sent to a leader that does not answer me", now)
            return
        self.follow(attempt, message.leader, now)

    def turned_away(
        self, sender: PeerId, message: said.NoQuorum | said.Refused, now: float
    ) -> None:
        if self._answers_me(sender, message.join) is not None:
            self._peer.event("turned_away", by=sender, reason=message.reason)
            weight = STRONG_BALK if isinstance(message, said.Refused) else 1
            self.balked(sender, f"it turned me away: {message.reason}", weight=weight)
            self._give_up_offer(message.reason, now)

    def too_late(self, sender: PeerId, message: said.Closed, now: float) -> None:
        """A roster closed without me."""
        if self.called_until is not None and self.called_until[0] == sender:
            self.called_until = None
        attempt = self.attempt
        if attempt is not None and attempt.leader == sender:
            self._peer.event("too_late", leader=sender)
            self.balked(sender, "its roster closed without me")
            self._give_up_offer("the roster closed without me", now)
            if message.round not in self._peer.rounds:
                self._peer.anchor(message.version, now)
        else:
            self._peer.counters["stale_answer"] += 1

    def leave(self, reason: str) -> None:
        """Take back what was offered and said; the phase is the caller's."""
        attempt = self.attempt
        if attempt is not None:
            if attempt.leader != self._me:
                self._peer.say(attempt.leader, self._peer.withdrawal(attempt.join))
            else:
                self._take_back_own_join()
        if self._snapshot_used:
            self._peer.emit(GiveUp(None, reason, False))
        self.attempt = None
        self._offer = None
        self._snapshot_used = False
        self._peer.timers.pop("answer", None)
        self._peer.timers.pop("snapshot", None)

    def _take_back_own_join(self) -> None:
        """From the roster that I have open, if any. A roster that nobody is in is closed.

        I would join myself in it whenever I am due, and pass whoever calls.
        """
        gathering = self._peer.gathering
        if gathering is not None:
            gathering.joins.pop(self._me, None)
            if not gathering.joins and not gathering.held:
                self._peer.leading.gathering = None


def _with_failed(join: Join, failed: tuple[PeerId, ...]) -> Join:
    return msgspec.structs.replace(join, failed=failed)


def _renumbered(join: Join, number: int) -> Join:
    return msgspec.structs.replace(join, join=number)

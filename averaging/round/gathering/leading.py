"""Leading the rounds of one fragment, up to the commit: joins in, a roster out.

The part of ``averaging.round.machine`` that answers joiners. From the commit on
``averaging.round.participation`` goes on.

A leader opens no roster beside a round that it leads for others: where two are a quorum that forked
a swarm of twelve nearly every time (seed 7316). While its roster is open it calls every
``resend_s`` those that have not answered, newly visible peers among them. Two peers that both lead,
because their calls were lost with the link between them, so settle it ``resend_s`` after the link
is back; earlier, both waited for the quorum's deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from averaging import messages
from averaging.history.standing import (
    Apart,
    IAmBehind,
    Relation,
    Same,
    TheyAreBehind,
    Unclear,
    relate,
    tokens_of,
)
from averaging.messages import Head, Join
from averaging.round.gathering.catching_up import CatchingUp
from averaging.round.gathering.joining import Called, Joining
from averaging.round.gathering.objections import Parents
from averaging.round.gathering.roster import Leader, agreed_protocol, compose, without_protocol
from averaging.round.interface.effects import CountRefused
from averaging.round.interface.identity import SignedCommit
from averaging.round.interface.phase import Phase
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.fragment import Fragment, OpenRoster
from averaging.round.opinions.pacemaker import Claim
from averaging.round.sealing.doubt import Doubting
from averaging.round.sealing.seals import all_peers_of
from averaging.rules.mixing import meets, shows_final
from averaging.rules.quorum import Close, NoRound, Timings, Turnout, Wait, decide
from averaging.rules.reputation import Deed, Ground
from dht import protocol
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

NO_STATE = "I have no state yet"
LEAVES = "leaving"
CATCHES_UP = "I have yet to catch up with others"
LATE_MAX = 64
"""Peers that came too late for a round and will hear how it ended."""


class Leading:
    """One peer as a leader."""

    def __init__(
        self,
        fragment: Fragment,
        doubting: Doubting,
        joining: Joining,
        catching_up: CatchingUp,
        parents: Parents,
    ) -> None:
        self._fragment = fragment
        self._doubting = doubting
        self._joining = joining
        self._catching_up = catching_up
        self._parents = parents
        self._id = identity = fragment.identity
        self._policy = fragment.policy
        self._peers = peers = fragment.peers
        self._pace = fragment.pace
        self._pacemaker = fragment.pacemaker
        self.timings = Timings()
        self._nonce = identity.first_number
        self._late = BoundedMapping[PeerId, bytes]("late peers", LATE_MAX, worth=peers.worth)
        self._reputation = peers.reputation

    def next_at(self) -> float | None:
        roster = self._fragment.open_roster
        return None if roster is None else min(roster.decide_at, roster.search_at)

    # Joins

    def joined(self, sender: PeerId, join: Join, now: float) -> None:
        """A join has arrived: admit it, hold it, redirect it or refuse it."""
        orders = self._id.book.orders
        if orders.paused is not None and sender != self._id.me:
            # It does not know of the pause, or it knows of its end and answers with that.
            self._fragment.tell_directive(sender)
            self._refuse(sender, join, orders.paused)
        elif join.topic != self._id.topic:
            self._fragment.count("wrong_topic")
            self._refuse_strange(sender, join, self._other_topic(join))
        elif self._fragment.standing is None:
            self._refuse(sender, join, NO_STATE, another_leads=True)
        elif sender == self._id.me:
            attempt = self._joining.attempt
            if attempt is not None and attempt.join == join:  # no earlier one, since abandoned
                self._joined_here(sender, join, now)
        elif (unfit := self._unfit(sender, join, now)) is not None:
            self._fragment.count("bad_join")
            self._refuse_strange(sender, join, unfit)
        elif self._stands_elsewhere(sender, join, now):
            pass
        elif self._fragment.phase is Phase.CATCHING:
            self._refuse(sender, join, CATCHES_UP, another_leads=True)
        else:
            self._joined_here(sender, join, now)

    def _refuse_strange(self, sender: PeerId, join: Join, reason: str) -> None:
        told = {"peer": sender, "reason": reason}
        self._fragment.emit(CountRefused("strange_join", told, "join_refused"))
        self._refuse(sender, join, reason)

    def _other_topic(self, join: Join) -> str:
        mine, theirs = self._id.topic.hex(), join.topic.hex()
        return f"this is run and layout {mine}, the join is for {theirs}"

    def strangers_join(self, sender: PeerId, join: Join) -> None:
        """Answer a peer that this one does not know: one that is new will be known in a moment."""
        if join.topic != self._id.topic:
            self._fragment.count("wrong_topic")
            self._refuse(sender, join, self._other_topic(join))
        else:
            self._refuse(sender, join, "I do not know you yet")

    def _unfit(self, sender: PeerId, join: Join, now: float) -> str | None:
        """The reason why no honest commit can contain this join; ``None``: one may."""
        oldest, newest = self._id.speaks
        usable = [number for number in sorted(join.protocols) if oldest <= number <= newest]
        for number in usable:
            claim = messages.claim_of(join, self._id.me, number)
            if not self._id.verify(sender, claim, join.signed_for(number)):
                return "its signature is not yours, or is for another leader"
        if not usable:
            return "you have signed it for no protocol that I speak"
        mine = self._fragment.here.head()
        says = join.head.version, tokens_of(join.head)
        if join.head.lineage == mine.lineage and says != (mine.version, tokens_of(mine)):
            return "your lineage has another version, or other tokens"
        return self._peers.overstates(sender, join.steps, self._pace.median_step_s(now), now)

    def _joined_here(self, sender: PeerId, join: Join, now: float) -> None:
        """A join from a standing that this peer can be in a round with."""
        if self._answers_in_round(sender, join):
            return
        if sender != self._id.me and self._fragment.open_roster is None:
            attempt, me = self._joining.attempt, self._id.me
            claim = self._leader_for(sender, join, now)
            if attempt is not None and claim.leader == sender:
                self._fragment.count("mutual_join")  # it has this peer's join, or will have it
                return
            if claim.leader != me:
                self._redirect(sender, join, claim)
                return
            if not self._peers.reachable:
                self._refuse(sender, join, "I can only dial out")
                return
            self._pacemaker.comes_along(claim.attempt)
            if attempt is not None and attempt.leader != me:
                self._fragment.note("changed_leader", to=me)
                self._joining.withdraw(attempt)
                self._open(sender, join, now)
                self._joining.change_leader(me, now)
        elif sender != self._id.me:
            self._pacemaker.comes_along(join.attempt)
        self._admit(sender, join, now)

    def _leader_for(self, sender: PeerId, join: Join, now: float) -> Claim:
        """The peer that leads this joiner, which takes this peer for the leader."""
        attempt, pacemaker = self._joining.attempt, self._pacemaker
        if attempt is None or attempt.leader == self._id.me:
            return pacemaker.leader_for(sender, join, now)
        head, mine = self._fragment.here.head(), Claim(join.attempt, self._id.me)
        goes_over = self._peers.reachable and pacemaker.gives_way(
            attempt.leader, mine, sender, head, join.head, now
        )
        return mine if goes_over else Claim(pacemaker.attempt, attempt.leader)

    def _stands_elsewhere(self, sender: PeerId, join: Join, now: float) -> bool:
        """Answer a joiner that stands elsewhere. ``False``: it may join as it is."""
        standing, young = self._fragment.here, self._peers.young_versions
        mine = standing.head()
        relation = relate(mine, standing.chain, join.head, young_versions=young)
        end = self._fragment.ending.end(now)
        match relation:
            case Unclear():
                reason = "I do not know your version"  # it shows all links in its next join
            case Apart(founded_apart=True):
                reason = "our histories were founded apart"
            case Apart() if end is not None and end.settles(mine, join.head):
                reason = "one of us takes the other's final state"
            case _:
                return self._has_to_change(sender, join, relation, now)
        self._catching_up.compare(sender, join.head, now)
        self._refuse(sender, join, reason, another_leads=isinstance(relation, Unclear))
        return True

    def _has_to_change(self, sender: PeerId, join: Join, relation: Relation, now: float) -> bool:
        """Answer a joiner with which this peer can be in a round later, if one of them changes its
        state. ``False``: it may join as it is."""
        mine = self._fragment.here.head()
        as_they_are = self._may_meet_as_they_are(join.head, now)
        splits = as_they_are and meets(relation, mine, join.head)
        if isinstance(relation, Same) or self._parents.may_join(link_of(join.head), now):
            if splits:
                return False
        elif (isinstance(relation, IAmBehind) and splits) or (
            isinstance(relation, Apart) and not relation.they_are_light
        ):
            self._refuse_unproven(sender, join, now)
            return True
        match relation:
            case TheyAreBehind():
                self._fragment.note("told_behind", peer=sender)
                self._fragment.tell_behind(sender, join.head.lineage)
            case Apart() if relation.they_are_light or not self._peers.is_established(sender, now):
                self._fragment.show_standing(sender)
            case IAmBehind() | Apart(i_am_light=True):
                self._go_there(sender, join, now)
            case _:
                return False  # on the same state, or melded with
        return True

    def _refuse_unproven(self, sender: PeerId, join: Join, now: float) -> None:
        """Members would decline a commit with this join. Its sender shows more signatures, or takes
        the state of others."""
        self._catching_up.met_unproven(now)
        self._fragment.note("unproven_join", peer=sender, version=join.head.version)
        self._fragment.show_standing(sender)
        self._refuse(sender, join, messages.UNPROVEN)

    def _answers_in_round(self, sender: PeerId, join: Join) -> bool:
        """Answer a joiner while a round is under way: it is in it, or too late for it."""
        signed = self._fragment.under_way
        if signed is None or sender == self._id.me:
            return False
        commit = signed.commit
        if join.head.version >= commit.version:
            return False
        index = commit.index(sender)
        if index is not None and commit.members[index].join == join.join:
            self._fragment.send(sender, signed.message())
        else:
            self._late[sender] = signed.round
            self._fragment.note("told_closed", peer=sender)
            self._fragment.send(sender, _closed(signed))
        return True

    def _go_there(self, sender: PeerId, join: Join, now: float) -> None:
        """Go to where this joiner stands; it goes on to a later attempt meanwhile.

        A peer that is not followed is shown the certificate under the version that this one stands
        on: it may have to go back to it.
        """
        self._catching_up.compare(sender, join.head, now)
        follows = self._fragment.phase is Phase.CATCHING
        if not follows:
            self._fragment.show_standing(sender)
        reason = CATCHES_UP if follows else messages.UNPROVEN
        self._refuse(sender, join, reason, another_leads=True)

    def _admit(self, sender: PeerId, join: Join, now: float) -> None:
        """Count a join in the open roster; open one if there is none."""
        self._open(sender, join, now)
        roster = self._fragment.open_roster
        assert roster is not None
        if sender not in roster.joins:
            left_out = self._without_room(sender, join, roster, now)
            for peer, late in left_out:
                self._refuse(peer, late, "the group is full")
            if (sender, join) in left_out:
                return
        known = roster.joins.get(sender)
        if known is None or known.join <= join.join:
            roster.joins[sender] = join
            roster.joined_at = now
            self._reputation.forgive(sender, Ground.COMES, fragment=self._id.fragment)
            hurries = not roster.is_hurried and self._is_in_a_hurry(sender, join, now)
            roster.is_hurried |= hurries
            returns = sender in roster.passed and not self._peers.has_several_groups(now)
            roster.passed.discard(sender)
            if hurries or returns:
                self._call_again(roster, now)
        is_first = roster.quorum_at is None and len(roster.joins) >= 2
        if is_first and self._policy.quorum.is_reached(self._turnout(roster, now)):
            roster.quorum_at = now
        self._fragment.send(sender, messages.Noted(self._id.fragment, join.join))
        self.consider_closing(now)

    def _without_room(
        self, sender: PeerId, join: Join, roster: OpenRoster, now: float
    ) -> list[tuple[PeerId, Join]]:
        """The joins for which there is no place if this peer joins too.

        Newcomers have half of the places, and give way to those that count.
        """
        size = self._peers.group_size
        newcomers = sorted(self._peers.newcomers(roster.joins, now))
        full = len(roster.joins) >= size
        if not self._peers.is_established(sender, now):
            full = full or len(newcomers) >= size // 2
            return [(sender, join)] if full else []
        if not full:
            return []
        return [(newcomers[-1], roster.joins.pop(newcomers[-1]))] if newcomers else [(sender, join)]

    def _refuse(
        self, sender: PeerId, join: Join, reason: str, *, another_leads: bool = False
    ) -> None:
        refused = messages.Refused(self._id.fragment, join.join, reason, another_leads)
        self._fragment.send(sender, refused)

    def _redirect(self, sender: PeerId, join: Join, to: Claim) -> None:
        self._fragment.note("redirect", peer=sender, to=to.leader)
        redirect = messages.Redirect(self._id.fragment, join.join, to.leader, to.attempt)
        self._fragment.send(sender, redirect)

    # The open roster

    def _open(self, sender: PeerId, join: Join, now: float) -> None:
        """Open a roster for the group of this joiner and call the others, unless one is open."""
        fragment = self._fragment
        if fragment.open_roster is not None:
            return
        me = self._id.me
        until = now + self._policy.quorum.wait_s
        group = self._peers.group(sender, join.head.version, now)
        roster = fragment.open_roster = OpenRoster(
            (*group, *self._peers.to_call(group, now)),
            decide_at=until,
            search_at=now + self._policy.resend_s,
            now=now,
        )
        if not self._peers.trains or me not in group:
            roster.passed.add(me)
        roster.is_hurried = self._is_in_a_hurry(sender, join, now)
        fragment.note("gathering", group=len(roster.group))
        self._call([peer for peer in roster.group if peer != sender], roster, now)
        if sender != me and me in group:
            self._call_me(roster, now)

    def _call_me(self, roster: OpenRoster, now: float) -> None:
        """Join the own roster if there is enough to offer."""
        until = roster.opened_at + self._policy.quorum.wait_s
        attempt = self._pacemaker.attempt
        head = self._fragment.here.head()
        called = Called(self._id.me, attempt, head, until, roster.is_hurried)
        self._joining.join_caller(called, now)

    def _is_in_a_hurry(self, sender: PeerId, join: Join, now: float) -> bool:
        """True if the others are to come at once, as a peer that counts is about to leave."""
        return join.leaves and (sender == self._id.me or self._peers.is_established(sender, now))

    def _call_again(self, roster: OpenRoster, now: float) -> None:
        """Call those that have passed once more: a member is about to leave, or one that had passed
        has come all the same.

        Homes whose lines carry every second version pass until the same moment. The first of them
        that came closed the roster, and each round was of two of three. (Among several groups a
        peer that passes follows another leader: to call it again left halves of a swarm further
        apart.)
        """
        me = self._id.me
        for peer in roster.passed - {me}:
            roster.passed.remove(peer)
            roster.called[peer] = now  # its answer is waited for once more
        self._call_missing(roster, now)
        if me in roster.group and me not in roster.joins and self._peers.trains:
            self._call_me(roster, now)

    def _call_missing(self, roster: OpenRoster, now: float) -> None:
        """Call the peers of an open roster that have not answered."""
        self._call(set(roster.group) - roster.joins.keys() - roster.passed, roster, now)

    def _call(self, peers: Iterable[PeerId], roster: OpenRoster, now: float) -> None:
        left_s = max(0.0, roster.opened_at + self._policy.quorum.wait_s - now)
        head, attempt = self._fragment.here.head(), self._pacemaker.attempt
        call = messages.Call(self._id.fragment, head, left_s, attempt, roster.is_hurried)
        for peer in sorted(peers):
            if peer != self._id.me:
                roster.called.setdefault(peer, now)
                self._fragment.send(peer, call)

    def _splits_each_round(self, now: float) -> bool:
        """True if lineages part at each round: several groups, and the end is not near."""
        return not self._fragment.ending.closed_ranks and self._peers.has_several_groups(now)

    def _may_meet_as_they_are(self, theirs: Head, now: float) -> bool:
        """True if this peer and a joiner of another lineage may be in one round of several groups,
        also in the meld that ends the run: a final state only is taken, not melded."""
        ending = self._fragment.ending
        goal = ending.goal
        if not ending.closed_ranks or goal is None:
            return self._splits_each_round(now)
        return not ending.is_final(now) and not shows_final(theirs, goal)

    def tick(self, now: float) -> None:
        roster = self._fragment.open_roster
        if roster is None:
            return
        if self._leaves_in_vain(roster, now):
            self._no_quorum(LEAVES, another_leads=True)
            return
        if now >= roster.search_at:
            self.look_round(now)
        if now >= roster.decide_at:
            self.consider_closing(now)

    def _no_quorum(self, reason: str, *, another_leads: bool = False) -> None:
        self._fragment.note("no_quorum", reason=reason)
        self.dissolve(reason, another_leads=another_leads)

    def _leaves_in_vain(self, roster: OpenRoster, now: float) -> bool:
        """True if this peer leaves, and waits for nobody whom its work needs.

        It brings nothing itself, and too few others have joined it so far: one that left after it
        waited for this roster until it was gone, and had no time to have its work merged elsewhere.
        Or all that it waits for have left before it.
        """
        if not self._joining.leaves:
            return False
        if self._id.me in roster.passed:
            return not self._policy.quorum.is_reached(self._turnout(roster, now))
        is_alone = roster.joins.keys() == {self._id.me}
        return is_alone and not self._peers.others_train(now) and not self._peers.keepers(now)

    def look_round(self, now: float) -> None:
        """Call the peers that have come into sight since the roster was opened, and again those
        that have not answered: the call, or the answer, may have been lost with the link.

        In a young swarm peers gather before they know of each other. In a swarm of several groups
        newcomers have other groups.
        """
        roster = self._fragment.open_roster
        if roster is None:
            return
        roster.search_at = now + self._policy.resend_s
        found: list[PeerId] = []
        if not self._splits_each_round(now):
            group = self._group_in_sight(roster, now)
            group = (*group, *self._peers.to_call(group, now))
            found = [peer for peer in group if peer not in roster.group]
            roster.group = tuple(sorted({*roster.group, *found}))
        if found:
            self._fragment.note("found", peers=tuple(found))
        # Where one is in a hurry, who has passed for want of steps may have enough of them by now.
        if roster.is_hurried:
            self._call_again(roster, now)
        else:
            self._call_missing(roster, now)
        if found:
            self.consider_closing(now)

    def _group_in_sight(self, roster: OpenRoster, now: float) -> tuple[PeerId, ...]:
        """This peer's group; without a learner it is in none, and takes that of the first join."""
        if not self._peers.trains:
            first = next(iter(roster.joins.items()), None)
            return () if first is None else self._peers.group(first[0], first[1].head.version, now)
        return self._peers.group(self._id.me, self._fragment.here.version, now)

    # Other leaders

    def called(self, sender: PeerId, call: messages.Call, now: float) -> None:
        """Another leader has called."""
        if self._fragment.standing is None:
            self._joining.pass_to(sender, NO_STATE)
            return
        self._catching_up.compare(sender, call.head, now)
        called = Called(sender, call.attempt, call.head, now + call.wait_s, call.leaves)
        self._answer_call(called, now)

    def _answer_call(self, called: Called, now: float) -> None:
        """Join the leader that called, change to it, or pass; or have it come here."""
        leader, fragment, joining = called.leader, self._fragment, self._joining
        shunned = self._pacemaker.shuns(leader, fragment.here.head(), now)
        if fragment.open_roster is not None:
            self._meet(called, shunned, now)
        elif shunned:
            fragment.count("call_of_no_leader")
            joining.pass_to(leader, "I do not follow you")
        elif fragment.phase is Phase.CATCHING:
            joining.call = called
            # Near the end of the run the leader waits until this peer has caught up.
            if not self._pace.due_time.eager:
                joining.pass_to(leader, "catching up")
        else:
            joining.answer_call(called, now)

    def _meet(self, called: Called, shunned: bool, now: float) -> None:
        """Another leader has called: one of the two goes over to the other.

        It may never have heard of this peer. One that this peer does not follow is outbidden.
        """
        fragment, leader, pacemaker = self._fragment, called.leader, self._pacemaker
        roster, mine = fragment.open_roster, fragment.here.head()
        assert roster is not None
        to, me = Claim(called.attempt, leader), self._id.me
        is_elsewhere = self._peers.has_several_groups(now) and leader not in roster.group
        if not shunned and pacemaker.gives_way(me, to, leader, mine, called.head, now):
            self._go_over(called, now)
        elif is_elsewhere:
            self._joining.pass_to(leader, "I lead a gathering of another group")
        elif not shunned or pacemaker.moves(called.attempt + 1, leader, now):
            self._call([leader], roster, now)
        else:
            self._joining.pass_to(leader, "I do not follow you")

    def _go_over(self, called: Called, now: float) -> None:
        """Another leader goes first: send the members of the open roster there, and go as well."""
        roster, leader = self._fragment.open_roster, called.leader
        assert roster is not None
        joins = self._dropped_joins()
        self._fragment.note("handed_over", to=leader, waited_s=now - roster.opened_at)
        for peer, join in joins:
            if peer != self._id.me:
                self._redirect(peer, join, Claim(called.attempt, leader))
        self._answer_call(called, now)

    # Answers to calls

    def dissolve(self, reason: str, *, another_leads: bool = False) -> None:
        """Drop the open roster, and tell all joiners that there will be no round, or that they are
        to go on to a later attempt."""
        for peer, join in self._dropped_joins():
            self._refuse(peer, join, reason, another_leads=another_leads)

    def _dropped_joins(self) -> list[tuple[PeerId, Join]]:
        """Drop the open roster. Returns its joins."""
        roster, self._fragment.open_roster = self._fragment.open_roster, None
        return sorted(roster.joins.items()) if roster else []

    def coming(self, sender: PeerId, now: float) -> None:
        """A called peer comes when its snapshot is taken: the roster is open as long as it says so.

        It says so again whenever it is called again, until it has joined.
        """
        roster, is_me = self._fragment.open_roster, sender == self._id.me
        if roster is None or not (is_me or sender in roster.called):
            self._fragment.count("stray_coming")
            return
        if sender in roster.joins or self._stays_away(sender, now):
            return
        roster.passed.discard(sender)
        roster.coming[sender] = math.inf if is_me else now + self._policy.answer_s
        self.consider_closing(now)

    def _stays_away(self, peer: PeerId, now: float) -> bool:
        """True if it said that it comes and did not, so nobody waits for it any more."""
        return self._reputation.is_over(peer, Ground.COMES, now, fragment=self._id.fragment)

    def passed(self, sender: PeerId, now: float) -> None:
        """A called peer does not come."""
        roster = self._fragment.open_roster
        if roster is None or sender not in roster.called:
            self._fragment.count("stray_pass")
        elif sender not in roster.joins:
            roster.passed.add(sender)
            roster.coming.pop(sender, None)
            self.consider_closing(now)

    def withdrawn(self, sender: PeerId, message: messages.Withdraw) -> None:
        roster = self._fragment.open_roster
        if roster is None:
            return
        join = roster.joins.get(sender)
        if join is not None and join.join <= message.join:
            del roster.joins[sender]
            self._fragment.note("withdrawn", peer=sender)
        self._fragment.drop_empty_roster()

    def leave_own_roster(self, now: float) -> None:
        """The own attempt is over: take back the join, pass, and see whether the roster closes."""
        self._fragment.take_back_own_join()
        if self._fragment.open_roster is not None:
            self._fragment.open_roster.passed.add(self._id.me)
        self.consider_closing(now)

    # Closing

    def consider_closing(self, now: float) -> None:
        roster = self._fragment.open_roster
        if roster is not None:
            self._follow(self._verdict(roster, now), roster, now)

    def _verdict(self, roster: OpenRoster, now: float) -> Wait | Close | NoRound:
        """Decide by the turnout as it is now whether the roster closes."""
        self._peers.drop_outdated_failures()
        quorum = self._policy.quorum
        grace_s = self.timings.grace_s(quorum, self._pace.median_step_s(now))
        if self._pace.due_time.eager and not roster.is_hurried:
            # Near the end of the run nothing is gained by being quick, while others come.
            grace_s = quorum.wait_s
            if self._fragment.ending.closed_ranks and roster.quorum_at is not None:
                quiet_s = self._policy.answer_s + (self.timings.sync_s or 0.0)
                grace_s = roster.joined_at + quiet_s - roster.quorum_at
        return decide(self._turnout(roster, now), quorum, grace_s=grace_s, now=now)

    def _follow(self, verdict: Wait | Close | NoRound, roster: OpenRoster, now: float) -> None:
        match verdict:
            case Wait():
                roster.decide_at = verdict.until
            case NoRound():
                self._no_quorum(verdict.reason)
            case Close():
                own = roster.joins.get(self._id.me)
                if own is None or (reason := self._own_objection(roster, now)) is None:
                    self._close(roster, verdict.reason, now)
                    return
                self._refuse(self._id.me, own, reason)
                for peer, join in list(roster.joins.items()):
                    self._catching_up.compare(peer, join.head, now)

    def _own_objection(self, roster: OpenRoster, now: float) -> str | None:
        """The reason why this peer's own join has no place in its roster; ``None``: it has one.

        Others have joined that cannot be shown enough signatures under the own state, or whose
        state may have the own work.
        """
        if len({join.head.lineage for join in roster.joins.values()}) < 2:
            return None
        if not self._fragment.certificates.is_proven(now):
            return messages.UNPROVEN
        return self._doubting.objection_to_meld()

    def _turnout(self, roster: OpenRoster, now: float) -> Turnout:
        return roster.turnout(
            lambda peer: self._peers.is_live(peer, now),
            room=self._peers.group_size,
            answer_s=self._policy.suspect_s,
            keeper=not self._peers.trains or bool(self._peers.keepers(now)),
            on_probation=self._peers.newcomers({*roster.group, *roster.joins}, now),
        )

    def _close(self, roster: OpenRoster, reason: str, now: float) -> None:
        fragment = self._fragment
        fragment.open_roster = None
        is_late = now >= roster.opened_at + self._policy.quorum.wait_s
        for peer in roster.coming.keys() - roster.joins.keys() - roster.passed - {self._id.me}:
            if is_late or now >= roster.coming[peer]:
                self._reputation.saw(peer, Deed.STAYS_AWAY, now, fragment=self._id.fragment)
        reached = now if roster.quorum_at is None else roster.quorum_at
        self.timings.quorum_took(reached - roster.opened_at)
        number = agreed_protocol(roster.joins, self._peers.view, self._id.speaks, now)
        others = without_protocol(roster.joins, number)
        signed = self._composed(roster, number, now)
        commit = signed.commit
        fragment.note(
            "closed",
            members=len(commit.members),
            live=self._turnout(roster, now).live,
            kind=commit.kind,
            reason=reason,
            waited_s=now - roster.opened_at,
            protocol=number,
        )
        named = all_peers_of(commit, list(commit.reducers))
        for peer in named:
            if peer != self._id.me:
                fragment.send(peer, signed.message())
        fragment.enter_own_round(signed)
        for peer, join in others.items():
            self._refuse(peer, join, _other_protocol(join, number))
        for peer in dict.fromkeys([*roster.group, *sorted(roster.called)]):
            if peer not in named:
                fragment.send(peer, _closed(signed))
                self._late[peer] = signed.round
        if commit.index(self._id.me) is None:
            fragment.roster_closed(commit.version, commit.level)

    def _composed(self, roster: OpenRoster, number: int, now: float) -> SignedCommit:
        self._nonce += 1
        for peer in without_protocol(roster.joins, number):
            del roster.joins[peer]
        leader = Leader(
            peer=self._id.me,
            incarnation=self._id.incarnation,
            topic=self._id.topic,
            fragment=self._id.fragment,
            nonce=self._nonce,
            directive=self._id.book.orders.stamp,
            protocol=number,
        )
        newcomers = self._peers.on_probation(roster.joins, now)
        version = 1 + max(join.head.version for join in roster.joins.values())
        commit = compose(
            leader,
            sorted(roster.joins.items()),
            self._id.policy_at(version),
            encoded_bytes=self._id.encoded_bytes,
            on_probation=newcomers,
        )
        encoded = messages.encode_commit(commit)
        return SignedCommit(messages.digest(encoded), commit, encoded, self._id.sign(encoded))

    # Peers that came too late

    def tell_late(self, round_id: bytes, head: Head) -> None:
        finished = messages.Finished(self._id.fragment, round_id, head)
        for peer in self.forget_late(round_id):
            self._fragment.send(peer, finished)

    def forget_late(self, round_id: bytes) -> list[PeerId]:
        """Returns those that came too late for a round: it is over, or came to nothing."""
        late = [peer for peer, missed in self._late.items() if missed == round_id]
        for peer in late:
            del self._late[peer]
        return late


def _other_protocol(join: Join, number: int) -> str:
    theirs = min(join.protocols), max(join.protocols)
    advice = protocol.advice((number, number), theirs)
    return f"this round is of protocol {number}, for which you have not signed: {advice}"


def _closed(signed: SignedCommit) -> messages.Closed:
    commit = signed.commit
    return messages.Closed(commit.fragment, commit.version, signed.round, commit.level)

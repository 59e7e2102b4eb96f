"""Leading the rounds of one fragment, up to the commit: joins in, a roster out.

The part of ``averaging.round.machine`` that answers joiners. It needs no state of the model. From
the commit on ``averaging.round.participation`` goes on.

Every method returns changes (``averaging.round.interface.transitions``) for the machine to apply.

A leader that is refused or never succeeds is passed over, not accused: after three refusals members
follow the next in rank. With a leader that refuses every join, five peers made 2 versions in 300 s
before, and 24 with it. A failure that honest leaders have too (no quorum, a void round) counts a
third, and the next version clears it.

A leader opens no roster beside a round that it leads for others: where two are a quorum that forked
a swarm of twelve nearly every time (seed 7316). While its roster is open it calls every
``resend_s`` those that have not answered, newly visible peers among them. Two peers that both lead,
because their calls were lost with the link between them, so settle it ``resend_s`` after the link
is back; earlier, both waited for the quorum's deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

from averaging import messages
from averaging.history.standing import (
    Apart,
    IAmBehind,
    Same,
    TheyAreBehind,
    heaviest,
    relate,
    tokens_of,
)
from averaging.messages import Head, Join
from averaging.round.gathering.catching_up import founded_apart
from averaging.round.gathering.parents import Parents
from averaging.round.gathering.roster import Leader, OpenRoster, compose, without_carrier
from averaging.round.interface.effects import CountRefused, Note, Send
from averaging.round.interface.identity import Identity
from averaging.round.interface.phase import Phase
from averaging.round.interface.signed_commit import SignedCommit
from averaging.round.interface.situation import Situation
from averaging.round.interface.transitions import (
    AdmitJoin,
    AnswerCall,
    ChangeLeader,
    Changes,
    Compare,
    Count,
    EnterOwnRound,
    HandOverRoster,
    HoldJoin,
    JoinCaller,
    ReadmitHeld,
    ReadmitJoin,
    RosterClosed,
    SettleFinalState,
)
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.neighbourhood import Neighbourhood, median
from averaging.round.opinions.pace import Pace
from averaging.round.sealing.seals import all_peers_of
from averaging.rules import final_mix
from averaging.rules.mixing import meets
from averaging.rules.protocols import agreed_protocol, without_protocol
from averaging.rules.quorum import Close, NoRound, Timings, Turnout, decide
from dht import protocol
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

UNPROVEN = "too few that count for me have signed the version that you stand on"
LATE_MAX = 64
"""Peers that came too late for a round and will hear how it ended."""


class Leading:
    """One peer as a leader."""

    def __init__(
        self, identity: Identity, peers: Neighbourhood, pace: Pace, parents: Parents
    ) -> None:
        self._id = identity
        self._policy = identity.policy
        self._peers = peers
        self._pace = pace
        self._parents = parents
        self.roster: OpenRoster | None = None
        """The open roster, if there is one."""
        self.timings = Timings()
        self._nonce = identity.first_number
        self._late = BoundedMapping[PeerId, bytes]("late peers", LATE_MAX, worth=peers.worth)
        self._did_not_come = BoundedMapping[PeerId, None](
            "peers that did not come", LATE_MAX, worth=peers.worth
        )
        """Peers that said that they come and did not: not waited for until they join again."""

    def __repr__(self) -> str:
        joined = len(self.roster.joins) if self.roster is not None else None
        return f"Leading({self._id.me}, joined={joined})"

    def next_at(self) -> float | None:
        roster = self.roster
        return None if roster is None else min(roster.decide_at, roster.search_at)

    # Joins

    def joined(self, sender: PeerId, join: Join, situation: Situation, now: float) -> Changes:
        """A join has arrived: admit it, hold it, redirect it or refuse it."""
        orders = self._id.book.orders
        if orders.paused is not None and sender != self._id.me:
            # It does not know of the pause, or it knows of its end and answers with that.
            return [
                Send(sender, messages.Directed(self._id.fragment, orders.encoded)),
                Send(sender, messages.NoQuorum(self._id.fragment, join.join, orders.paused)),
            ]
        if join.topic != self._id.topic:
            reason = self._other_topic(join)
            return [
                Count("wrong_topic"),
                _strange_join(sender, reason),
                self._refusal(sender, join, reason),
            ]
        if sender == self._id.me:
            attempt = situation.attempt
            if attempt is None or attempt.join != join:
                return []  # an earlier join, since abandoned
        elif (unfit := self._unfit(sender, join, situation, now)) is not None:
            return [
                Count("bad_join"),
                _strange_join(sender, unfit),
                self._refusal(sender, join, unfit),
            ]
        else:
            elsewhere = self.answer_elsewhere(sender, join, situation, now)
            if elsewhere is not None:
                return elsewhere
        return self._joined_here(sender, join, situation, now)

    def _other_topic(self, join: Join) -> str:
        mine, theirs = self._id.topic.hex(), join.topic.hex()
        return f"this is run and layout {mine}, the join is for {theirs}"

    def strangers_join(self, sender: PeerId, join: Join) -> Changes:
        """Answer a peer that this one does not know: one that is new will be known in a moment."""
        if join.topic != self._id.topic:
            return [Count("wrong_topic"), self._refusal(sender, join, self._other_topic(join))]
        no = messages.NoQuorum(self._id.fragment, join.join, "I do not know you yet")
        return [Send(sender, no)]

    def _unfit(self, sender: PeerId, join: Join, situation: Situation, now: float) -> str | None:
        """The reason why no honest commit can contain this join; ``None``: one may."""
        oldest, newest = self._id.speaks
        usable = [number for number in sorted(join.protocols) if oldest <= number <= newest]
        for number in usable:
            claim = messages.claim_of(join, self._id.me, number)
            if not self._id.verify(sender, claim, join.signed_for(number)):
                return "its signature is not yours, or is for another leader"
        if not usable:
            return "you have signed it for no protocol that I speak"
        standing = situation.standing
        if standing is not None and join.head.lineage == standing.lineage:
            mine = standing.head()
            if (join.head.version, tokens_of(join.head)) != (mine.version, tokens_of(mine)):
                return "your lineage has another version, or other tokens"
        return self._peers.overstates(sender, join.steps, self._pace.median_step_s(now), now)

    def _joined_here(self, sender: PeerId, join: Join, situation: Situation, now: float) -> Changes:
        """A join from a standing that this peer can be in a round with."""
        under_way = self._answer_in_round(sender, join, situation)
        if under_way is not None:
            return under_way
        attempt, me = situation.attempt, self._id.me
        if attempt is not None and attempt.leader != me and sender != me:
            if attempt.leader != sender:
                return [self._redirect(sender, join, attempt.leader)]
            # The two have joined each other. The first in rank leads, whatever both see.
            mine = situation.standing.head() if situation.standing is not None else None
            if self._peers.outranks(sender, me, mine, join.head, now):
                return [Count("mutual_join")]
            withdraw = messages.Withdraw(self._id.fragment, attempt.join.join, self._id.incarnation)
            return [
                Note("mutual_join", {"peer": sender}),
                Send(sender, withdraw),
                *self._open(sender, join, situation, now),
                ChangeLeader(me),
                AdmitJoin(sender, join),
            ]
        if self.roster is None and sender != me:
            leader = self._peers.leader_for(sender, join, now)
            if leader is not None and leader != me:
                return [
                    Note("redirect", {"peer": sender, "to": leader}),
                    self._redirect(sender, join, leader),
                ]
            if not self._peers.reachable:
                return [self._refusal(sender, join, "I can only dial out")]
        return self.admit(sender, join, situation, now)

    def answer_elsewhere(
        self, sender: PeerId, join: Join, situation: Situation, now: float
    ) -> Changes | None:
        """The whole answer to a joiner that stands elsewhere; ``None`` if it may join as it is."""
        mine = self._reference(situation)
        if mine is None:
            return None
        standing = situation.standing
        relation = relate(
            mine,
            standing.chain if standing else None,
            join.head,
            young_versions=self._peers.young_versions,
        )
        if isinstance(relation, Apart) and relation.founded_apart:
            return [
                *founded_apart(self._id.fragment, sender, mine, relation, join.head),
                self._refusal(sender, join, "our histories were founded apart"),
            ]
        end = situation.end
        if isinstance(relation, Apart) and end is not None and end.settles(mine, join.head):
            return [
                SettleFinalState(sender, mine, relation, join.head),
                self._refusal(sender, join, "one of us takes the other's final state"),
            ]
        as_they_are = self._may_meet_as_they_are(join.head, situation, now)
        splits = as_they_are and meets(relation, mine, join.head)
        if isinstance(relation, Same) or self._parents.may_join(link_of(join.head), now):
            if splits:
                return None
        elif (isinstance(relation, IAmBehind) and splits) or (
            isinstance(relation, Apart) and not relation.they_are_light
        ):
            return self._unproven(sender, join, mine, now)
        match relation:
            case TheyAreBehind():
                source, found = self._source(mine, situation), join.head.lineage
                behind = messages.Behind(self._id.fragment, mine, source, found)
                return [Note("told_behind", {"peer": sender}), Send(sender, behind)]
            case Apart() if relation.they_are_light or not self._peers.is_established(sender, now):
                return [Send(sender, messages.Compare(self._id.fragment, mine))]
            case IAmBehind() if standing is not None:
                reason = "I am behind you"
            case Apart(i_am_light=True) if standing is not None:
                reason = "I rebase on you"
            case _:
                return None  # on the same state, or mixed with; or this peer can fetch nothing
        return [Compare(sender, join.head), HoldJoin(sender, join, reason)]

    def _unproven(self, sender: PeerId, join: Join, mine: Head, now: float) -> Changes:
        """Members would decline a commit with this join. Its sender shows more signatures, or takes
        the state of others."""
        self._parents.refused(now)
        return [
            Note("unproven_join", {"peer": sender, "version": join.head.version}),
            Send(sender, messages.Compare(self._id.fragment, mine)),
            self._refusal(sender, join, UNPROVEN),
        ]

    def _reference(self, situation: Situation) -> Head | None:
        """The head to compare a joiner with: the own one, or the heaviest join's without state."""
        if situation.standing is not None:
            return situation.standing.head()
        if self.roster is not None and self.roster.joins:
            return heaviest(join.head for join in self.roster.joins.values())
        return None

    def _source(self, head: Head, situation: Situation) -> PeerId:
        """A peer that has the state of this head."""
        if situation.standing is None and self.roster is not None:
            for peer, join in sorted(self.roster.joins.items()):
                if join.head.lineage == head.lineage:
                    return peer
        return self._id.me

    def _answer_in_round(self, sender: PeerId, join: Join, situation: Situation) -> Changes | None:
        """The answer to a joiner while a round is under way: it is in it, or too late for it."""
        signed = situation.under_way
        if signed is None or sender == self._id.me:
            return None
        commit = signed.commit
        if join.head.version >= commit.version:
            return None
        index = commit.index(sender)
        if index is not None and commit.members[index].join == join.join:
            return [Send(sender, signed.message())]
        self._late[sender] = signed.round
        closed = _closed(signed)
        return [Note("told_closed", {"peer": sender}), Send(sender, closed)]

    def hold(self, held: HoldJoin, situation: Situation, now: float) -> Changes:
        """Count this join once this peer has caught up with it, if it leads.

        A peer that is not followed is shown the certificate under the version that this one stands
        on: it may have to go back to it.
        """
        sender, join = held.sender, held.join
        stays = situation.phase is not Phase.CATCHING
        since = situation.catching_since
        takes_long = since is not None and now - since >= self._policy.answer_s
        if stays or takes_long or not self._leads(sender, join, now):
            changes: Changes = [self._refusal(sender, join, held.reason, behind=True)]
            if stays and situation.standing is not None:
                mine = situation.standing.head()
                changes.insert(0, Send(sender, messages.Compare(self._id.fragment, mine)))
            return changes
        changes = self._open(sender, join, situation, now)
        assert self.roster is not None
        if len(self.roster.held) < messages.ROSTER_MAX:
            self.roster.held[sender] = join
            changes += [Note("held", {"peer": sender}), self._noted(sender, join, now)]
        return changes

    def _leads(self, sender: PeerId, join: Join, now: float) -> bool:
        """True if this peer leads the group of this joiner."""
        leads = self.roster is not None
        return leads or self._peers.leader_for(sender, join, now) == self._id.me

    def admit(self, sender: PeerId, join: Join, situation: Situation, now: float) -> Changes:
        """Count a join in the open roster; open one if there is none."""
        roster = self.roster
        if roster is None:
            return [*self._open(sender, join, situation, now), AdmitJoin(sender, join)]
        changes: Changes = []
        if sender not in roster.joins:
            left_out = self._without_room(sender, join, roster, now)
            changes = [self._refusal(*late, "the group is full") for late in left_out]
            if (sender, join) in left_out:
                return changes
        known = roster.joins.get(sender)
        if known is None or known.join <= join.join:
            roster.joins[sender] = join
            roster.joined_at = now
            roster.held.pop(sender, None)
            self._did_not_come.pop(sender, None)
            hurries = not roster.is_hurried and self._is_in_a_hurry(sender, join, now)
            roster.is_hurried |= hurries
            returns = sender in roster.passed and not self._peers.has_several_groups(now)
            roster.passed.discard(sender)
            if hurries or returns:
                changes += self._call_again(roster, situation, now)
        noted = self._noted(sender, join, now)
        is_first = roster.quorum_at is None and len(roster.joins) >= 2
        if is_first and self._policy.quorum.is_reached(self._turnout(roster, now)):
            roster.quorum_at = now
        return [*changes, noted, *self.consider_closing(situation, now)]

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

    def _noted(self, sender: PeerId, join: Join, now: float) -> Send:
        assert self.roster is not None
        left_s = max(0.0, self.roster.opened_at + self._policy.quorum.wait_s - now)
        wait_s = left_s + self._policy.margin_s
        return Send(sender, messages.Noted(self._id.fragment, join.join, wait_s))

    def _refusal(self, sender: PeerId, join: Join, reason: str, *, behind: bool = False) -> Send:
        return Send(sender, messages.Refused(self._id.fragment, join.join, reason, behind))

    def _redirect(self, sender: PeerId, join: Join, leader: PeerId) -> Send:
        return Send(sender, messages.Redirect(self._id.fragment, join.join, leader))

    # The open roster

    def _open(self, sender: PeerId, join: Join, situation: Situation, now: float) -> Changes:
        """Open a roster for the group of this joiner and call the others, unless one is open."""
        if self.roster is not None:
            return []
        me = self._id.me
        until = now + self._policy.quorum.wait_s
        group = self._peers.group(sender, join.head.version, now)
        search_at = now + self._policy.resend_s
        self.roster = OpenRoster(
            (*group, *self._peers.to_call(group, now)),
            decide_at=until,
            search_at=search_at,
            now=now,
        )
        if not self._peers.trains or situation.standing is None or me not in group:
            self.roster.passed.add(me)
        self.roster.is_hurried = self._is_in_a_hurry(sender, join, now)
        others = [peer for peer in self.roster.group if peer != sender]
        changes: Changes = [
            Note("gathering", {"group": len(self.roster.group)}),
            *self._call(others, self.roster, join.head, situation, now),
        ]
        if sender != me and me in group:
            changes.append(JoinCaller(me, until, self.roster.is_hurried))
        return changes

    def _is_in_a_hurry(self, sender: PeerId, join: Join, now: float) -> bool:
        """True if the others are to come at once, as a peer that counts is about to leave."""
        return join.leaves and (sender == self._id.me or self._peers.is_established(sender, now))

    def _call_again(self, roster: OpenRoster, situation: Situation, now: float) -> Changes:
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
        changes = self._call_missing(roster, situation, now)
        is_missing = me in roster.group and me not in roster.joins
        if is_missing and self._peers.trains and situation.standing is not None:
            until = roster.opened_at + self._policy.quorum.wait_s
            changes.append(JoinCaller(me, until, roster.is_hurried))
        return changes

    def _call_missing(self, roster: OpenRoster, situation: Situation, now: float) -> Changes:
        """Call the peers of an open roster that have not answered."""
        missing = [peer for peer in roster.group if not roster.has_answered(peer, now)]
        return self._call(missing, roster, self._reference(situation), situation, now)

    def _call(
        self,
        peers: Iterable[PeerId],
        roster: OpenRoster,
        head: Head | None,
        situation: Situation,
        now: float,
    ) -> Changes:
        left_s = max(0.0, roster.opened_at + self._policy.quorum.wait_s - now)
        where = situation.standing.head() if situation.standing else head
        call = messages.Call(self._id.fragment, where, left_s, roster.is_hurried)
        called = [peer for peer in peers if peer != self._id.me]
        for peer in called:
            roster.called.setdefault(peer, now)
        return [Send(peer, call) for peer in called]

    def splits_each_round(self, situation: Situation, now: float) -> bool:
        """True if lineages part at each round: several groups, and the end is not near."""
        return not situation.closed_ranks and self._peers.has_several_groups(now)

    def _may_meet_as_they_are(self, theirs: Head, situation: Situation, now: float) -> bool:
        """True if this peer and a joiner of another lineage may be in one round of several groups,
        also in the mix that ends the run: a final state only is taken, not mixed."""
        goal = situation.goal
        if not situation.closed_ranks or goal is None:
            return self.splits_each_round(situation, now)
        return not situation.is_final and not final_mix.shows_final(theirs, goal)

    def tick(self, situation: Situation, now: float) -> Changes:
        roster = self.roster
        if roster is None:
            return []
        changes: Changes = []
        if self._is_last_to_leave(roster, now):
            reason = "nobody else trains here any more"
            return [Note("no_quorum", {"reason": reason}), *self.dissolve(reason)]
        if now >= roster.search_at:
            changes += self._release_held_when_slow(roster, situation, now)
            changes += self.look_round(situation, now)
        if now >= roster.decide_at:
            changes += self.consider_closing(situation, now)
        return changes

    def _is_last_to_leave(self, roster: OpenRoster, now: float) -> bool:
        """True if this peer leaves, and all that it waits for have left before it."""
        own = roster.joins.get(self._id.me)
        if own is None or not own.leaves or len(roster.joins) > 1 or roster.held:
            return False
        return not self._peers.others_train(now) and not self._peers.keepers(now)

    def _release_held_when_slow(
        self, roster: OpenRoster, situation: Situation, now: float
    ) -> Changes:
        """On a slow line a fetch takes longer than the quorum's deadline, version after version."""
        if situation.phase is not Phase.CATCHING:
            return []
        if now - roster.opened_at < self._policy.answer_s:
            return []
        return self.release_held("I am behind you, and still catching up")

    def release_held(self, reason: str) -> Changes:
        """Send those that wait for this peer to catch up with them to the next in rank."""
        roster = self.roster
        if roster is None:
            return []
        held, roster.held = roster.held, {}
        self._drop_if_empty(roster)
        return [self._refusal(peer, join, reason, behind=True) for peer, join in held.items()]

    def look_round(self, situation: Situation, now: float) -> Changes:
        """Call the peers that have come into sight since the roster was opened, and again those
        that have not answered: the call, or the answer, may have been lost with the link.

        In a young swarm peers gather before they know of each other. In a swarm of several groups
        newcomers have other groups.
        """
        roster = self.roster
        if roster is None:
            return []
        roster.search_at = now + self._policy.resend_s
        found: list[PeerId] = []
        if not self.splits_each_round(situation, now):
            group = self._group_in_sight(roster, situation, now)
            group = (*group, *self._peers.to_call(group, now))
            found = [peer for peer in group if peer not in roster.group]
            roster.group = tuple(sorted({*roster.group, *found}))
        # Where one is in a hurry, who has passed for want of steps may have enough of them by now.
        call = self._call_again if roster.is_hurried else self._call_missing
        called = call(roster, situation, now)
        if not found:
            return called
        noted = Note("found", {"peers": tuple(found)})
        return [noted, *called, *self.consider_closing(situation, now)]

    def _group_in_sight(
        self, roster: OpenRoster, situation: Situation, now: float
    ) -> tuple[PeerId, ...]:
        """This peer's group; without a learner it is in none, and takes that of the first join."""
        if not self._peers.trains:
            first = next(iter({**roster.joins, **roster.held}.items()), None)
            return () if first is None else self._peers.group(first[0], first[1].head.version, now)
        standing = situation.standing
        version = standing.version if standing is not None else self._peers.closed_version
        return self._peers.group(self._id.me, version, now)

    def call_leader(self, answer: AnswerCall, situation: Situation, now: float) -> Changes:
        """A leader of lower rank has called: call it, so that it sends its members here.

        This peer may never have heard of it. One that has passed all the same, as it has joined
        this peer in vain or does not see that it may lead, would wait for this peer as this peer
        does for it: whom nobody has joined yet goes over.
        """
        roster, leader = self.roster, answer.leader
        if roster is None:
            return []
        if self._peers.has_several_groups(now) and leader not in roster.group:
            reason = "I lead a gathering of another group"
            return [Send(leader, messages.Pass(self._id.fragment, reason))]
        if leader in roster.passed:
            if roster.held or roster.joins.keys() - {self._id.me}:
                return []
            self._peers.stop_passing_over(leader)
            return [HandOverRoster(leader), answer]
        return self._call([leader], roster, self._reference(situation), situation, now)

    def hand_over(self, leader: PeerId, now: float) -> Changes:
        """Another leader goes first: send the members of the open roster there."""
        waited_s = 0.0 if self.roster is None else now - self.roster.opened_at
        joins = self._dropped_joins()
        return [
            Note("handed_over", {"to": leader, "waited_s": waited_s}),
            *(self._redirect(peer, join, leader) for peer, join in joins if peer != self._id.me),
        ]

    def dissolve(self, reason: str) -> Changes:
        """Drop the open roster, and tell all joiners that there will be no round."""
        return [
            Send(peer, messages.NoQuorum(self._id.fragment, join.join, reason))
            for peer, join in self._dropped_joins()
        ]

    def _dropped_joins(self) -> list[tuple[PeerId, Join]]:
        """Drop the open roster. Returns its joins."""
        roster, self.roster = self.roster, None
        return sorted({**roster.held, **roster.joins}.items()) if roster else []

    def coming(
        self, sender: PeerId, message: messages.Coming, situation: Situation, now: float
    ) -> Changes:
        """A called peer comes when its snapshot is taken: the roster is open until then.

        Only its first message counts, or it could keep all others waiting by repeating it.
        """
        roster = self.roster
        if roster is None or (sender != self._id.me and sender not in roster.called):
            return [Count("stray_coming")]
        if sender in roster.joins or sender in self._did_not_come:
            return []
        roster.passed.discard(sender)
        wait_s = min(message.wait_s, self._policy.quorum.wait_s)
        until = now + wait_s + self._policy.suspect_s
        roster.coming[sender] = min(until, roster.coming.get(sender, until))
        return self.consider_closing(situation, now)

    def passed(self, sender: PeerId, situation: Situation, now: float) -> Changes:
        """A called peer does not come."""
        roster = self.roster
        if roster is None or sender not in roster.called:
            return [Count("stray_pass")]
        if sender in roster.joins:
            return []
        roster.passed.add(sender)
        roster.coming.pop(sender, None)
        return self.consider_closing(situation, now)

    def withdrawn(self, sender: PeerId, message: messages.Withdraw) -> Changes:
        roster = self.roster
        changes: Changes = []
        if roster is None:
            return changes
        for joins in (roster.joins, roster.held):
            join = joins.get(sender)
            if join is not None and join.join <= message.join:
                del joins[sender]
                changes.append(Note("withdrawn", {"peer": sender}))
        self._drop_if_empty(roster)
        return changes

    def take_back_own_join(self) -> None:
        """Remove the own join. A roster without joins is dropped: this peer would join itself in
        it whenever it is due, and pass when others call."""
        if self.roster is not None:
            self.roster.joins.pop(self._id.me, None)
            self._drop_if_empty(self.roster)

    def pass_own_roster(self) -> None:
        if self.roster is not None:
            self.roster.passed.add(self._id.me)

    def leave_own_roster(self, situation: Situation, now: float) -> Changes:
        """The own attempt is over: take back the join, pass, and see whether the roster closes."""
        self.take_back_own_join()
        self.pass_own_roster()
        return self.consider_closing(situation, now)

    def _drop_if_empty(self, roster: OpenRoster) -> None:
        if not roster.joins and not roster.held:
            self.roster = None

    def review(self, situation: Situation, now: float) -> Changes:
        """This peer has caught up while others had joined: judge their joins again.

        A member that joined from where this peer was is behind it now, not apart: it is told so,
        and not mixed with.
        """
        roster = self.roster
        if roster is None:
            return []
        # It says next whether it comes. The joins that waited may fill the roster before that.
        roster.passed.discard(self._id.me)
        roster.coming[self._id.me] = now + self._policy.suspect_s
        changes: Changes = []
        for peer, join in sorted(roster.joins.items()):
            if peer != self._id.me:
                answer = self.answer_elsewhere(peer, join, situation, now)
                if answer is not None:
                    changes += answer
                    del roster.joins[peer]
        return [*changes, ReadmitHeld()]

    def readmit_held(self) -> Changes:
        """Joins that waited until this peer had caught up are judged again."""
        roster = self.roster
        if roster is None:
            return []
        if len(roster.joins) < 2:
            roster.quorum_at = None
        return [ReadmitJoin(peer, join) for peer, join in sorted(roster.held.items())]

    def readmit(self, sender: PeerId, join: Join, situation: Situation, now: float) -> Changes:
        if self.roster is not None:
            self.roster.held.pop(sender, None)
        return self.joined(sender, join, situation, now)

    # Closing

    def consider_closing(self, situation: Situation, now: float) -> Changes:
        roster = self.roster
        if roster is None:
            return []
        self._peers.drop_outdated_failures()
        quorum = self._policy.quorum
        grace_s = self.timings.grace_s(quorum, self._median_step_s(roster))
        if self._pace.due_time.eager and not roster.is_hurried:
            # Near the end of the run nothing is gained by being quick, while others come.
            grace_s = quorum.wait_s
            if situation.closed_ranks and roster.quorum_at is not None:
                quiet_s = self._policy.answer_s + (self.timings.sync_s or 0.0)
                grace_s = roster.joined_at + quiet_s - roster.quorum_at
        verdict = decide(self._turnout(roster, now), quorum, grace_s=grace_s, now=now)
        if isinstance(verdict, NoRound):
            reason = verdict.reason
            return [Note("no_quorum", {"reason": reason}), *self.dissolve(reason)]
        if isinstance(verdict, Close):
            own = roster.joins.get(self._id.me)
            if own is not None and self._is_unproven(roster, now):
                compare = [Compare(peer, join.head) for peer, join in roster.joins.items()]
                return [self._refusal(self._id.me, own, UNPROVEN), *compare]
            return self._close(roster, verdict.reason, situation, now)
        roster.decide_at = verdict.until
        return []

    def _is_unproven(self, roster: OpenRoster, now: float) -> bool:
        """True if others have joined that cannot be shown enough signatures under the own state."""
        lineages = {join.head.lineage for join in roster.joins.values()}
        return len(lineages) > 1 and not self._parents.is_proven(now)

    def _turnout(self, roster: OpenRoster, now: float) -> Turnout:
        return roster.turnout(
            lambda peer: self._peers.is_live(peer, now),
            room=self._peers.group_size,
            answer_s=self._policy.suspect_s,
            keeper=not self._peers.trains or bool(self._peers.keepers(now)),
            on_probation=self._peers.newcomers({*roster.group, *roster.joins}, now),
        )

    def _median_step_s(self, roster: OpenRoster) -> float:
        """Median step time of the members and of peers that may still come."""
        times = [join.step_time_s for join in roster.joins.values()]
        for peer in roster.group:
            seen = self._peers.view.get(peer)
            if peer not in roster.joins and seen is not None and seen.step_time_s:
                times.append(seen.step_time_s)
        return median([time_s for time_s in times if time_s > 0.0])

    def _close(self, roster: OpenRoster, reason: str, situation: Situation, now: float) -> Changes:
        self.roster = None
        for peer, until in roster.coming.items():
            if now >= until and peer not in roster.joins and peer not in roster.passed:
                self._did_not_come[peer] = None
        reached = now if roster.quorum_at is None else roster.quorum_at
        self.timings.quorum_took(reached - roster.opened_at)
        number = agreed_protocol(roster.joins, self._peers.view, self._id.speaks, now)
        others = without_protocol(roster.joins, number)
        signed = self._composed(roster, situation, number, now)
        commit = signed.commit
        live = self._turnout(roster, now).live
        named = all_peers_of(commit, list(commit.reducers))
        changes: Changes = [
            Note(
                "closed",
                {
                    "members": len(commit.members),
                    "live": live,
                    "kind": commit.kind,
                    "reason": reason,
                    "waited_s": now - roster.opened_at,
                    "protocol": number,
                },
            ),
            *(Send(peer, signed.message()) for peer in named if peer != self._id.me),
            EnterOwnRound(signed),
            *(Send(peer, self._of_other_protocol(join, number)) for peer, join in others.items()),
        ]
        closed = _closed(signed)
        for peer in dict.fromkeys([*roster.group, *sorted(roster.called), *roster.held]):
            if peer not in named:
                changes.append(Send(peer, closed))
                self._late[peer] = signed.round
        if commit.index(self._id.me) is None:
            changes.append(RosterClosed(commit.version, commit.level))
        return changes

    def _of_other_protocol(self, join: Join, number: int) -> messages.NoQuorum:
        reason = f"this round is of protocol {number}, for which you have not signed: "
        theirs = min(join.protocols), max(join.protocols)
        reason += protocol.advice((number, number), theirs)
        return messages.NoQuorum(self._id.fragment, join.join, reason)

    def _composed(
        self, roster: OpenRoster, situation: Situation, number: int, now: float
    ) -> SignedCommit:
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
        apart = self._kind_of_lineages_apart(roster, situation, now)
        newcomers = self._peers.on_probation(roster.joins, number, now)
        if apart == "mix":
            for peer in without_carrier(roster.joins, newcomers):
                del roster.joins[peer]
        version = 1 + max(join.head.version for join in roster.joins.values())
        commit = compose(
            leader,
            sorted(roster.joins.items()),
            self._id.policy_at(version),
            encoded_bytes=self._id.encoded_bytes,
            apart=apart,
            on_probation=newcomers,
        )
        encoded = messages.encode_commit(commit)
        return SignedCommit(messages.digest(encoded), commit, encoded, self._id.sign(encoded))

    def _kind_of_lineages_apart(self, roster: OpenRoster, situation: Situation, now: float) -> str:
        """The kind of round for several lineages: of a healed fork, or of groups that change."""
        if not self._peers.has_several_groups(now):
            return "mix"
        goal = situation.goal
        heads = [join.head for join in roster.joins.values()]
        if goal is not None and any(goal.is_reached_by(head) for head in heads):
            return "mix"
        version = 1 + max(head.version for head in heads)
        return "meld" if self._policy.mixing.melds(version, situation.measured) else "merge"

    # Peers that came too late

    def tell_late(self, round_id: bytes, head: Head) -> Changes:
        finished = messages.Finished(self._id.fragment, round_id, head)
        return [Send(peer, finished) for peer in self.forget_late(round_id)]

    def forget_late(self, round_id: bytes) -> list[PeerId]:
        """Returns those that came too late for a round: it is over, or came to nothing."""
        late = [peer for peer, missed in self._late.items() if missed == round_id]
        for peer in late:
            del self._late[peer]
        return late


def _strange_join(sender: PeerId, reason: str) -> CountRefused:
    return CountRefused("strange_join", {"peer": sender, "reason": reason}, "join_refused")


def _closed(signed: SignedCommit) -> messages.Closed:
    commit = signed.commit
    return messages.Closed(commit.fragment, commit.version, signed.round, commit.level)

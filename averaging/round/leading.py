"""Leading the rounds of one fragment, up to the commit: joins in, a roster out.

The half of ``averaging.round.machine`` that answers those who want to be led. It belongs to one
``FragmentRounds`` and shares its standing and its voice; from the commit on a
``Participation`` carries on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from averaging import messages as said
from averaging.history.standing import Apart, IAmBehind, Same, TheyAreBehind, heaviest, relate
from averaging.messages import Head, Join
from averaging.round.neighbourhood import Neighbourhood, median
from averaging.round.paxos import everybody
from averaging.round.phase import Phase
from averaging.round.roster import Gathering, Leader, compose
from averaging.rules.final_mix import has_reached
from averaging.rules.mixing import meets
from averaging.rules.quorum import Close, NoRound, Timings, Turnout, decide
from dht.identity import PeerId

if TYPE_CHECKING:
    from averaging.round.machine import FragmentRounds

LATE_MAX = 64
"""Peers who came too late and will be told how the round ended."""


class Leading:
    """One peer as a leader. It needs no state of the model for it."""

    __slots__ = ("_around", "_late", "_me", "_nonce", "_peer", "gathering", "timings")

    def __init__(self, peer: FragmentRounds, around: Neighbourhood) -> None:
        self._peer = peer
        self._me = peer.me
        self._around = around
        self.gathering: Gathering | None = None
        """The open roster, if there is one."""
        self.timings = Timings()
        self._nonce = 0
        self._late: OrderedDict[PeerId, bytes] = OrderedDict()

    def __repr__(self) -> str:
        joined = len(self.gathering.joins) if self.gathering is not None else None
        return f"Leading({self._me}, joined={joined})"

    def dissolve(self, reason: str) -> None:
        """Send everybody home: there will be no round."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            for peer, join in sorted({**gathering.held, **gathering.joins}.items()):
                self._peer.say(peer, said.NoQuorum(self._peer.fragment, join.join, reason))

    def joined(self, sender: PeerId, join: Join, now: float) -> None:
        if join.topic != self._peer.topic:
            self._peer.counters["wrong_topic"] += 1
            mine, theirs = self._peer.topic.hex(), join.topic.hex()
            reason = f"this is run and layout {mine}, the join is for {theirs}"
            self._peer.event("strange_join", peer=sender, reason=reason)
            self._peer.say(sender, said.Refused(self._peer.fragment, join.join, reason))
            return
        if sender == self._me and (
            self._peer.joining.attempt is None or self._peer.joining.attempt.join != join
        ):
            return  # I have changed my mind since I said it
        if sender != self._me and not self._joinable(sender, join, now):
            return
        if self._told_of_round(sender, join):
            return
        attempt = self._peer.joining.attempt
        if attempt is not None and attempt.leader != self._me and sender != self._me:
            if attempt.leader != sender:
                self._peer.say(
                    sender, said.Redirect(self._peer.fragment, join.join, attempt.leader)
                )
                return
            # We have joined each other. The first by name-rank leads, whatever our views say.
            if self._around.outranks(sender, self._me):
                self._peer.counters["mutual_join"] += 1
                return
            self._peer.event("mutual_join", peer=sender)
            self._peer.say(sender, self._peer.withdrawal(attempt.join))
            self._open(sender, join, now)
            self._peer.joining.follow(attempt, self._me, now)
        elif self.gathering is None and sender != self._me:
            leader = self._around.leader_for(sender, join, now)
            if leader != self._me and leader is not None:
                self._peer.event("redirect", peer=sender, to=leader)
                self._peer.say(sender, said.Redirect(self._peer.fragment, join.join, leader))
                return
            if not self._around.reachable:
                self._peer.say(
                    sender, said.Refused(self._peer.fragment, join.join, "I can only dial out")
                )
                return
        self._admit(sender, join, now)

    def is_under_way(self, version: int, now: float) -> bool:
        """Whether I lead a round of this version that I am not in. Other groups have others."""
        return not self._around.is_dealt(now) and any(
            part.leads and part.is_open and part.entry is None and part.commit.version > version
            for part in self._peer.rounds.values()
        )

    def stand_elsewhere(self, gathering: Gathering, now: float) -> None:
        """I have caught up while others had joined: judge them from where I stand now.

        Who joined from where I was is behind me, not apart: it hears so, and is not mixed with.
        """
        for peer, join in sorted(gathering.joins.items()):
            if peer != self._me and not self._joinable(peer, join, now):
                gathering.joins.pop(peer, None)
        if len(gathering.joins) < 2:
            gathering.quorum_at = None
        for peer, join in sorted(gathering.held.items()):
            gathering.held.pop(peer)
            self.joined(peer, join, now)

    def _joinable(self, sender: PeerId, join: Join, now: float) -> bool:
        """Settle where we stand to one another. ``False`` when that was the whole answer."""
        mine = self._reference()
        if mine is None:
            return True
        chain = self._peer.standing.chain if self._peer.standing else None
        relation = relate(mine, chain, join.head)
        if isinstance(relation, Apart) and self._peer.catching.ends_with_one(
            sender, mine, relation, join.head, now
        ):
            reason = "one of us takes the other's final state"
            self._peer.say(sender, said.Refused(self._peer.fragment, join.join, reason))
            return False
        if self._peer.parts_at_each_round(now) and meets(relation, mine, join.head):
            return True
        match relation:
            case Same():
                return True
            case TheyAreBehind():
                self._peer.event("told_behind", peer=sender)
                self._peer.say(sender, said.Behind(self._peer.fragment, mine, self._source(mine)))
                return False
            case IAmBehind():
                self._peer.catching.compare(sender, join.head, now)
                if self._peer.phase is Phase.CATCHING and self._leads_now(sender, join, now):
                    self._hold(sender, join, now)
                    return False
                if self._peer.standing is None:
                    return True  # an auxiliary has nothing to fetch
                self._peer.say(
                    sender, said.Refused(self._peer.fragment, join.join, "I am behind you")
                )
                return False
            case Apart() as apart:
                if apart.they_are_light:
                    self._peer.say(sender, said.Compare(self._peer.fragment, mine))
                    return False
                if apart.i_am_light and self._peer.standing is not None:
                    self._peer.catching.compare(sender, join.head, now)
                    if self._leads_now(sender, join, now):
                        self._hold(sender, join, now)
                    else:
                        self._peer.say(
                            sender, said.Refused(self._peer.fragment, join.join, "I rebase on you")
                        )
                    return False
                return True  # comparable: we mix
        raise AssertionError("a relation without a case")

    def _reference(self) -> Head | None:
        """What I compare a joiner with: my standing, or the heaviest join if I have no state."""
        if self._peer.standing is not None:
            return self._peer.standing.head()
        if self.gathering is not None and self.gathering.joins:
            return heaviest(join.head for join in self.gathering.joins.values())
        return None

    def _source(self, head: Head) -> PeerId:
        if self._peer.standing is None and self.gathering is not None:
            for peer, join in sorted(self.gathering.joins.items()):
                if join.head.lineage == head.lineage:
                    return peer
        return self._me

    def _leads_now(self, sender: PeerId, join: Join, now: float) -> bool:
        return self.gathering is not None or self._around.leader_for(sender, join, now) == self._me

    def _told_of_round(self, sender: PeerId, join: Join) -> bool:
        """A joiner while I am in a round: it is in it, or too late for it."""
        part = self._peer.mine
        if part is None:
            part = next((p for p in self._peer.rounds.values() if p.leads and p.is_open), None)
            if part is None or (
                self._peer.standing is None and part.entry is None and not part.leads
            ):
                return False
        if not part.is_open or sender == self._me or join.head.version >= part.commit.version:
            return False
        index = part.commit.index(sender)
        if index is not None and part.commit.members[index].join == join.join:
            self._peer.say(sender, self._peer.commit_message(part))
        else:
            self._peer.event("told_closed", peer=sender)
            self._peer.say(sender, said.Closed(self._peer.fragment, part.commit.version, part.id))
            self._remember_late(sender, part.id)
        return True

    def _hold(self, sender: PeerId, join: Join, now: float) -> None:
        """Count this join once I have caught up with it."""
        self._open(sender, join, now)
        assert self.gathering is not None
        if len(self.gathering.held) < said.ROSTER_MAX:
            self.gathering.held[sender] = join
            self._peer.event("held", peer=sender)
            self._note_join(sender, join, now)

    def _open(self, sender: PeerId, join: Join, now: float) -> None:
        if self.gathering is not None:
            return
        until = now + self._peer.policy.quorum.wait_s
        group = self._around.group(sender, join.head.version, now)
        look_at = now + self._peer.policy.resend_s
        self.gathering = Gathering(group, until=until, look_at=look_at, now=now)
        self._peer.event("gathering", group=len(group))
        if not self._around.trains or self._peer.standing is None or self._me not in group:
            self.gathering.passed.add(self._me)
        self._call([peer for peer in group if peer != sender], self.gathering, join.head, now)
        if sender != self._me and self._me in group:
            self._peer.joining.maybe_come(self._me, now + self._peer.policy.quorum.wait_s, now)

    def _call(
        self, peers: Iterable[PeerId], gathering: Gathering, head: Head | None, now: float
    ) -> None:
        left_s = max(0.0, gathering.opened_at + self._peer.policy.quorum.wait_s - now)
        where = self._peer.standing.head() if self._peer.standing else head
        call = said.Call(self._peer.fragment, where, left_s)
        for peer in peers:
            if peer != self._me:
                gathering.called.add(peer)
                self._peer.say(peer, call)

    def tick(self, now: float) -> None:
        gathering = self.gathering
        if gathering is None:
            return
        if now >= gathering.look_at:
            self.look_round(now)
        if now >= gathering.until:
            self.consider_closing(now)

    def look_round(self, now: float) -> None:
        """Call whoever has come into sight since the roster was opened.

        In a young swarm peers gather before they know of one another. One that is dealt into
        groups has other groups for them.
        """
        gathering = self.gathering
        if gathering is None:
            return
        gathering.look_at = now + self._peer.policy.resend_s
        if self._peer.parts_at_each_round(now):
            return
        group = self._group_to_look_for(gathering, now)
        found = [peer for peer in group if peer not in gathering.group]
        if found:
            self._peer.event("found", peers=tuple(found))
            gathering.group = tuple(sorted({*gathering.group, *found}))
            strangers = [peer for peer in found if peer not in gathering.joins]
            self._call(strangers, gathering, self._reference(), now)
            self.consider_closing(now)

    def _group_to_look_for(self, gathering: Gathering, now: float) -> tuple[PeerId, ...]:
        """Mine; without a learner I am in none, and look for that of the first who came."""
        if not self._around.trains:
            first = next(iter({**gathering.joins, **gathering.held}.items()), None)
            return () if first is None else self._around.group(first[0], first[1].head.version, now)
        standing = self._peer.standing
        version = standing.version if standing is not None else self._around.closed_version
        return self._around.group(self._me, version, now)

    def called_by_a_lower_one(self, sender: PeerId, now: float) -> None:
        """Somebody gathers beside me. I rank before it: I call it, and it sends its members on.

        It may be that I have never heard of it.
        """
        gathering = self.gathering
        assert gathering is not None
        if self._around.is_dealt(now) and sender not in gathering.group:
            reason = "I lead a gathering of another group"
            self._peer.say(sender, said.Pass(self._peer.fragment, reason))
        else:
            self._call([sender], gathering, self._reference(), now)

    def _admit(self, sender: PeerId, join: Join, now: float) -> None:
        self._open(sender, join, now)
        gathering = self.gathering
        assert gathering is not None
        if sender not in gathering.joins and len(gathering.joins) >= self._around.group_size:
            self._peer.say(
                sender, said.Refused(self._peer.fragment, join.join, "the group is full")
            )
            return
        known = gathering.joins.get(sender)
        if known is None or known.join <= join.join:
            gathering.joins[sender] = join
            gathering.held.pop(sender, None)
            gathering.passed.discard(sender)
        self._note_join(sender, join, now)
        if gathering.quorum_at is None and len(gathering.joins) >= 2:
            turnout = self._turnout(gathering, now)
            if turnout.joined >= self._peer.policy.quorum.needed(max(turnout.live, turnout.joined)):
                gathering.quorum_at = now
        self.consider_closing(now)

    def _note_join(self, sender: PeerId, join: Join, now: float) -> None:
        assert self.gathering is not None
        left_s = max(0.0, self.gathering.opened_at + self._peer.policy.quorum.wait_s - now)
        self._peer.say(
            sender, said.Noted(self._peer.fragment, join.join, left_s + self._peer.policy.margin_s)
        )

    def consider_closing(self, now: float) -> None:
        gathering = self.gathering
        if gathering is None:
            return
        self._around.forgive()
        turnout = self._turnout(gathering, now)
        quorum = self._peer.policy.quorum
        grace_s = self.timings.grace_s(quorum, self._median_step_s(gathering))
        if self._peer.due_time.eager:
            grace_s = quorum.wait_s  # the end is near: nothing is gained by being quick any more
        verdict = decide(turnout, quorum, grace_s=grace_s, now=now)
        if isinstance(verdict, NoRound):
            self._peer.event("no_quorum", reason=verdict.reason)
            self.gathering = None
            for peer, join in sorted({**gathering.held, **gathering.joins}.items()):
                self._peer.say(peer, said.NoQuorum(self._peer.fragment, join.join, verdict.reason))
        elif isinstance(verdict, Close):
            self._close(gathering, verdict.reason, now)
        else:
            gathering.until = verdict.until

    def _turnout(self, gathering: Gathering, now: float) -> Turnout:
        room = self._around.group_size
        return gathering.turnout(lambda peer: self._around.is_live(peer, now), room=room)

    def _median_step_s(self, gathering: Gathering) -> float:
        """Of those who are here or may come: it is the median peer whose slack counts."""
        times = [join.step_time_s for join in gathering.joins.values()]
        for peer in gathering.group:
            seen = self._around.view.get(peer)
            if peer not in gathering.joins and seen is not None and seen.step_time_s:
                times.append(seen.step_time_s)
        return median([time_s for time_s in times if time_s > 0.0])

    def _close(self, gathering: Gathering, reason: str, now: float) -> None:
        self.gathering = None
        reached = now if gathering.quorum_at is None else gathering.quorum_at
        self.timings.quorum_took(reached - gathering.opened_at)
        self._nonce += 1
        leader = Leader(
            peer=self._me,
            incarnation=self._peer.incarnation,
            topic=self._peer.topic,
            fragment=self._peer.fragment,
            nonce=self._nonce,
        )
        commit = compose(
            leader,
            sorted(gathering.joins.items()),
            self._peer.policy,
            encoded_bytes=self._peer.encoded_bytes,
            apart=self._kind_of_lineages_apart(gathering, now),
        )
        encoded = said.encode_commit(commit)
        round_id = said.digest(encoded)
        message = said.Committed(self._peer.fragment, encoded, self._peer.sign(encoded))
        roster = everybody(commit, list(commit.reducers))
        self._peer.event(
            "closed",
            members=len(commit.members),
            live=self._turnout(gathering, now).live,
            kind=commit.kind,
            reason=reason,
            waited_s=now - gathering.opened_at,
        )
        for peer in roster:
            if peer != self._me:
                self._peer.say(peer, message)
        self._peer.enter(round_id, commit, encoded, message.signature, leads=True, now=now)
        outside = dict.fromkeys([*gathering.group, *gathering.called, *gathering.held])
        for peer in outside:
            if peer not in roster:
                self._peer.say(peer, said.Closed(self._peer.fragment, commit.version, round_id))
                self._remember_late(peer, round_id)
        if commit.index(self._me) is None:
            self._peer.anchor(commit.version, now)

    def _kind_of_lineages_apart(self, gathering: Gathering, now: float) -> str:
        """What to do about members on several lineages: a healed fork, or groups that change."""
        if not self._around.is_dealt(now):
            return "mix"
        tokens_end = self._peer.policy.tokens_end
        heads = [join.head for join in gathering.joins.values()]
        if tokens_end is not None and any(has_reached(head, tokens_end) for head in heads):
            return "mix"
        version = 1 + max(head.version for head in heads)
        mixing = self._peer.policy.mixing
        return "meld" if mixing.melds(version, self._peer.measured) else "merge"

    def hand_over(self, gathering: Gathering, leader: PeerId, now: float) -> None:
        """Two leaders have met, and I am the lower in rank: send my members to the other."""
        self._peer.event("handed_over", to=leader)
        self.gathering = None
        for peer, join in sorted({**gathering.held, **gathering.joins}.items()):
            if peer != self._me:
                self._peer.say(peer, said.Redirect(self._peer.fragment, join.join, leader))

    def passed_by(self, sender: PeerId, now: float) -> None:
        if self.gathering is None or sender not in self.gathering.called:
            self._peer.counters["stray_pass"] += 1
            return
        if sender not in self.gathering.joins:
            self.gathering.passed.add(sender)
            self.consider_closing(now)

    def withdrawn(self, sender: PeerId, message: said.Withdraw, now: float) -> None:
        for part in list(self._peer.rounds.values()):
            part.withdrawn(sender, message, now)
        if self.gathering is None:
            return
        for joins in (self.gathering.joins, self.gathering.held):
            join = joins.get(sender)
            if join is not None and join.join <= message.join:
                del joins[sender]
                self._peer.event("withdrawn", peer=sender)
        if not self.gathering.joins and not self.gathering.held:
            self.gathering = None

    def tell_late(self, round_id: bytes, head: Head) -> None:
        for peer in [peer for peer, late in self._late.items() if late == round_id]:
            del self._late[peer]
            self._peer.say(peer, said.Finished(self._peer.fragment, round_id, head))

    def _remember_late(self, peer: PeerId, round_id: bytes) -> None:
        self._late[peer] = round_id
        while len(self._late) > LATE_MAX:
            self._late.popitem(last=False)

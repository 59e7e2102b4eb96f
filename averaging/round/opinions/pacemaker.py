"""The pacemaker: whose turn it is to lead the next version of one fragment, as one peer sees it.

Each version has attempts, numbered from 0, and each attempt a first in rank
(``averaging.rules.succession``). The attempt stands in every join, call and redirect. There are
four rules.

1. A peer joins the leader that calls it, or, when it is due before anybody calls, the first in
   rank of its attempt. It goes one attempt on when that one does not answer, finds no quorum, is
   behind, leaves, or leads to no version.
2. Of two leaders that hear of each other the one of the higher attempt leads, and of one attempt
   the first in rank; the other goes over with all that have joined it, and so does whoever is
   promised to it. Where the two stand on different versions names decide alone.
3. A peer that nobody should follow, as far as this one sees, ends no attempt: this peer goes on to
   an attempt that another one leads, and as it says so, the others come there as well.
4. One other peer that counts moves this one, while it has a leader or leads, at most ``MOVES_MAX``
   times in a version: those that lie cannot keep a swarm between two leaders.

So the peers need not agree on who is there, or who can be trusted: a leader that suits one of them
less costs an attempt. A leader with which joins fail again and again is passed over for longer and
longer (``averaging.rules.reputation``), as it would waste the first attempts of many versions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from averaging.messages import Head, Join
from averaging.round.interface.identity import Identity
from averaging.round.opinions.neighbourhood import FAILED_MAX, Neighbourhood
from averaging.rules.peer_view import PeerView
from averaging.rules.reputation import Ground
from averaging.rules.succession import NO_LINEAGE, leaders, succession
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

MOVES_MAX = 3
"""A leader dies, and the next, and the link to the third breaks: an honest peer needs no more."""
AHEAD_MAX = 32
"""Attempts by which another peer may be ahead: who fails is one of many."""


class Claim(NamedTuple):
    """A leader, and the attempt that it leads."""

    attempt: int
    leader: PeerId


class Pacemaker:
    """The attempts at the next version, and their leaders."""

    def __init__(self, identity: Identity, peers: Neighbourhood) -> None:
        self._id = identity
        self._peers = peers
        self.attempt = 0
        self._moved_by = BoundedMapping[PeerId, int](
            "moved by", FAILED_MAX, worth=lambda peer, _: peers.worth(peer)
        )
        self._versions = 0
        """Number of versions that this peer has stood on."""

    # Attempts

    def next_version(self) -> None:
        """This peer stands on another version. Some leaders were passed over for long enough."""
        self.attempt = 0
        self._moved_by.clear()
        self._versions += 1

    def comes_along(self, attempt: int) -> None:
        """Go to the attempt of another peer, having no leader."""
        if attempt <= self.attempt + AHEAD_MAX:
            self.attempt = max(self.attempt, attempt)

    def moves(self, attempt: int, by: PeerId, now: float) -> bool:
        """Go to the attempt of another peer, having a leader. ``False``: it does not count, or has
        had this peer go as often as it may."""
        times = self._moved_by.get(by, 0)
        if attempt > self.attempt + AHEAD_MAX or times >= MOVES_MAX:
            return False
        if not self._peers.is_established(by, now):
            return False
        self._moved_by[by] = times + 1
        self.attempt = max(self.attempt, attempt)
        return True

    # Leaders that come to nothing

    def failed(self, leader: PeerId, now: float) -> int:
        """A join with this leader led to no version: the next attempt is another one's.

        It may be honest and see little of the swarm, or it may lie; it is not accused. When this
        peer leads itself and gets no further either, the others were not the reason. Returns at how
        many versions the leader is passed over.
        """
        self.attempt += 1
        reputation, fragment = self._peers.reputation, self._id.fragment
        if leader == self._id.me:
            reputation.forgive_leaders(fragment)
            return 0
        return reputation.led_nowhere(leader, now, fragment=fragment, version=self._versions)

    def led_to_version(self, leader: PeerId) -> None:
        """This peer has finished a round of a leader: its earlier failures are forgotten.

        A commit alone is none: a leader that had each of its rounds sealed as void was never passed
        over, and its fragment stood still at the version for which it ranked first.
        """
        self._peers.reputation.forgive(leader, Ground.LEAD, fragment=self._id.fragment)

    # Leaders

    def leader(self, head: Head, now: float) -> PeerId | None:
        """The leader of this peer's group, at its attempt or the first one after it that has one.

        ``head``: where this peer stands. ``None``: nobody can lead.
        """
        group = self._group(head, now)
        # A group in which nobody can be dialled: another one's leader knows where the run is.
        known = tuple(sorted(self._peers.view)) if group else ()
        for peers in (group, known):
            found = self._turn(peers, head, self.attempt, now)
            if found is not None:
                self.attempt, leader = found
                return leader
        return None

    def _group(self, head: Head, now: float) -> tuple[PeerId, ...]:
        peers = self._peers
        return peers.group(self._id.me, head.version, now) if peers.trains else ()

    def leader_for(self, sender: PeerId, join: Join, now: float) -> Claim:
        """The leader of this joiner's group and its attempt, as far as this peer sees, which has
        none itself."""
        peers = self._peers
        group = peers.group(sender, join.head.version, now)
        attempt = max(join.attempt, self.attempt)
        if peers.trains and self._id.me in group:
            found = self._turn(group, join.head, attempt, now)
            return found or Claim(attempt, self._id.me)
        found = self._turn(group, join.head, attempt, now)
        if found is None or not (peers.trains or peers.view[found.leader].trains):
            return Claim(attempt, self._id.me)  # a keeper leads where no trainer can
        return found

    def shuns(self, peer: PeerId, head: Head, now: float) -> bool:
        """True if that peer is no leader for this one."""
        if not self._peers.may_lead(peer, now) or self._peers.has_failed(peer):
            return True
        return peer in self._left_out(self._group(head, now), now)

    def outranks(self, one: Claim, other: Claim, mine: Head, theirs: Head, now: float) -> bool:
        """True if the first of two leaders leads.

        Where the two stand on different versions (``mine``, ``theirs``) the rank goes by name
        alone: each could take itself for the first, again and again.
        """
        if mine.version != theirs.version:
            topic, fragment = self._id.topic, self._id.fragment
            both = one.leader, other.leader
            return succession(both, topic=topic, fragment=fragment, version=0)[0] == one.leader
        if one.attempt != other.attempt:
            return one.attempt > other.attempt
        shared = mine.lineage == theirs.lineage
        ranked = self._ranked((one.leader, other.leader), mine, one.attempt, now, shared=shared)
        return ranked[0] == one.leader

    def gives_way(
        self,
        leader: PeerId,
        to: Claim,
        by: PeerId,
        mine: Head,
        theirs: Head,
        now: float,
    ) -> bool:
        """Go over from a leader, perhaps this peer itself, to another one of which ``by`` has told;
        ``False``: stay."""
        own = Claim(self.attempt, leader)
        return self.outranks(to, own, mine, theirs, now) and self.moves(to.attempt, by, now)

    def _turn(
        self, group: tuple[PeerId, ...], head: Head, attempt: int, now: float
    ) -> Claim | None:
        """The first attempt from this one on that somebody leads whom this peer would follow."""
        self._peers.drop_outdated_failures()
        left_out = self._left_out(group, now)
        able = self._able(group, left_out, now)
        if not able:
            return None
        candidates = {*self._able(group, (), now), *able}
        for number in range(attempt, attempt + AHEAD_MAX):
            first = self._ranked(candidates, head, number, now)[0]
            if first in able:
                return Claim(number, first)
        return Claim(attempt, self._ranked(able, head, attempt, now)[0])

    def _left_out(self, group: tuple[PeerId, ...], now: float) -> set[PeerId]:
        """The peers that do not lead this one. Who is passed over is among them only where another
        that counts can lead instead, beside this peer itself: of two neither could do without the
        other."""
        failed = set(self._peers.failed)
        over = self._peers.reputation.passed_over(self._id.fragment, self._versions)
        if not over:
            return failed
        others = {*self._able(group, failed | over, now)} - {self._id.me}
        return failed | over if others - self._peers.newcomers(others, now) else failed

    def _able(
        self, group: tuple[PeerId, ...], left_out: Collection[PeerId], now: float
    ) -> tuple[PeerId, ...]:
        """The peers that can lead a group, without some.

        Where this peer sees others that are established, they have seen it for as long.
        """
        peers = self._peers
        own = PeerView(
            first_seen=-math.inf,
            heard_at=now,
            reachable=peers.reachable,
            bytes_per_s=peers.bytes_per_s,
        )
        newcomers = peers.newcomers(group, now)
        me, view = self._id.me, peers.view
        return leaders(group, view, me=me, own=own, left_out=left_out, newcomers=newcomers, now=now)

    def _ranked(
        self,
        able: Iterable[PeerId],
        head: Head,
        attempt: int,
        now: float,
        *,
        shared: bool = True,
    ) -> tuple[PeerId, ...]:
        return succession(
            able,
            topic=self._id.topic,
            fragment=self._id.fragment,
            version=self._peers.epoch(head.version, now),
            lineage=head.lineage if shared and not self._peers.lineages_part(now) else NO_LINEAGE,
            attempt=attempt,
        )

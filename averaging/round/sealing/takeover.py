"""The coordinator of a round, and the time at which one of its voters takes that over.

A coordinator has its time: before it is over, no voter follows a higher ballot of another. Whoever
votes may begin one, and a single voter that did so in every round stopped its fragment for good.
"""

from __future__ import annotations

import math

from averaging.messages import Commit
from averaging.round.interface.identity import Identity
from averaging.round.interface.phase import Stage
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.sealing.seals import ballot_of, owner_of
from dht.identity import PeerId

WAITS_MAX = 3
"""Time in which a coordinator that is heard must have sealed the round, in usual waits: it gathers
again for each slice that it reassigns. One that only showed that it lives kept all others in the
round until its deadline."""


class Takeover:
    """The highest ballot of one round, and the time at which one peer begins the next one.

    Voters take over in the order of the roster, after the one that coordinates.
    """

    def __init__(
        self, identity: Identity, commit: Commit, peers: Neighbourhood, *, now: float
    ) -> None:
        self._commit = commit
        self._peers = peers
        self._policy = identity.policy
        entry, voters = commit.index(identity.me), commit.voters
        can_coordinate = entry in voters and commit.members[entry].reachable
        self._entry = entry if can_coordinate else None
        self._began_at = now
        self.ballot = 0
        """The highest ballot known to be in use; its owner is the coordinator."""
        self.at = math.inf  # also of a peer that cannot coordinate
        """Time at which this peer takes over, unless the coordinator is heard before."""
        self._due_at = math.inf
        """Time at which the coordinator has had its time, unless it is heard before."""
        self._left_ballot: int | None = None
        """The highest ballot whose owner has said that it is out of the round."""
        self.plan(self._usual_wait_s, now)

    @property
    def coordinating_peer(self) -> PeerId:
        return owner_of(self.ballot, self._commit)

    @property
    def _usual_wait_s(self) -> float:
        return self._commit.upload_s + 2 * self._policy.margin_s

    def is_due(self, now: float) -> bool:
        """True if the coordinator may be replaced: it has had its time, is dead or out of it."""
        left = self._left_ballot == self.ballot
        return left or now >= self._due_at or self._peers.is_down(self.coordinating_peer, now)

    def all_follow(self, now: float) -> bool:
        """True if every voter that does not know the seal follows a later ballot by now."""
        return now >= self._began_at + WAITS_MAX * self._usual_wait_s

    def plan(self, wait_s: float, now: float, *, sooner: bool = False) -> None:
        """Take over after ``wait_s``, and later for each voter whose turn comes before.

        ``sooner``: never later than planned.
        """
        due_at = now + wait_s
        self._due_at = min(due_at, self._due_at) if sooner else due_at
        if self._entry is None:
            return
        members, voters = self._commit.members, self._commit.voters
        start = self._commit.index(self.coordinating_peer)
        ahead = 0
        for step in range(1, len(members) + 1):
            index = ((-1 if start is None else start) + step) % len(members)
            if index == self._entry:
                break
            entry = members[index]
            able = index in voters and entry.reachable
            if able and not self._peers.is_down(entry.peer, now):
                ahead += 1
        at = due_at + ahead * self._policy.margin_s
        self.at = min(at, self.at) if sooner else at

    def heard(self, peer: PeerId, stage: Stage, now: float) -> None:
        """The coordinator is alive: put off the takeover, though not for ever."""
        coordinates = peer == self.coordinating_peer and self._left_ballot != self.ballot
        is_over = self._entry is not None and self.at == math.inf
        if self.all_follow(now) and stage is Stage.UPLOADING:
            return
        if coordinates and not is_over:
            wait_s = self._usual_wait_s * (2 if stage is Stage.SEALED else 1)
            since = self._began_at if stage is Stage.UPLOADING else now
            self.plan(max(self._policy.margin_s, since + wait_s - now), now)

    def left(self, now: float) -> None:
        """The coordinator is another incarnation, or has given up: nobody seals the round.

        One that gave up a sealed round coordinates on.
        """
        if self._left_ballot != self.ballot:
            self._left_ballot = self.ballot
            self.plan(self._policy.suspect_s, now, sooner=True)

    def follow(self, ballot: int, now: float) -> None:
        """Another peer coordinates with a higher ballot."""
        self.ballot = ballot
        self.plan(self._usual_wait_s, now)

    def cancel(self) -> None:
        self.at = math.inf

    def own_ballot(self, *, above: int) -> int:
        """An own ballot, higher than all known ones and than ``above``."""
        voters = self._commit.voters
        assert self._entry is not None
        place = voters.index(self._entry)
        return ballot_of(place, voters=len(voters), above=max(self.ballot, above))

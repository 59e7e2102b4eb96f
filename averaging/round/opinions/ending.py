"""The end of a run, as the machine of one fragment sees it.

With a version of one group that has the run's tokens, or that the owner has ordered to be the last,
nothing more is offered. Several groups close ranks first (all peers form one group), and meld all
of their lineages once (``averaging.rules.mixing``). Two sides of a partition may each come to an
end, also after the last round of a run that ends by date. A peer that has ended joins no round any
more, so they would never hear of each other: it goes on to show others where it stands, until they
have shown the same (``Lingering``). A peer that is told compares
(``averaging.round.gathering.catching_up``): the lighter side takes the state of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from averaging import messages
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.messages import Link, Message
from averaging.round.interface.identity import Identity
from averaging.round.opinions.certificates import Certificates
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.opinions.pace import Pace
from averaging.rules.mixing import Goal, RunsEnd, grew_from
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId


@dataclass(slots=True, eq=False, repr=False)
class Ending:
    """The end of the run, as far as one peer knows."""

    identity: Identity
    peers: Neighbourhood
    pace: Pace
    certificates: Certificates
    """The certificates, which know where the peer stands."""
    next_version: Callable[[], int]
    """The version of the round that would follow."""
    is_near: bool = False
    """The run is about to end: every call is answered, whether this peer leaves or stays."""
    is_over: bool = False
    """The run has reached its date, and this peer has made its last round."""
    closed_ranks: bool = False
    """True if all peers form one group now, because the run is at its goal."""

    @property
    def goal(self) -> Goal | None:
        """The state with which the fragment is done, as of the round that would follow.

        Any state is after the last round of a run that ends by date.
        """
        if self.is_over:
            return Goal(tokens=0)
        tokens = self.identity.policy_at(self.next_version()).tokens_end
        last = self.identity.book.orders.last_version
        return None if tokens is None and last is None else Goal(tokens, last)

    def is_reached_by(self, standing: Standing) -> bool:
        """True if a standing is at the goal; it may have to be melded with others."""
        goal = self.goal
        return goal is not None and goal.is_reached(standing.version, standing.merged.tokens)

    def is_final(self, now: float) -> bool:
        """True if the run is at its goal, and nothing more is merged into this peer's standing."""
        standing, goal = self.certificates.standing, self.goal
        if goal is None or standing is None or not self.is_reached_by(standing):
            return False
        several_lineages = self.closed_ranks or self.peers.has_several_groups(now)
        return not several_lineages or grew_from(standing.chain, goal)

    def end(self, now: float) -> RunsEnd | None:
        """The end of the run, once this peer may have to settle which state it ends on."""
        goal = self.goal
        if goal is None:
            return None
        is_dealt = self.peers.has_several_groups(now) and not self.closed_ranks
        if is_dealt and not self.is_final(now):
            return None
        return RunsEnd(goal, melds=self.closed_ranks)

    def closes_ranks(self, link: Link, now: float) -> bool:
        """Close ranks if a peer is at the goal on one of several lineages. True: they just were."""
        goal = self.goal
        if goal is None or self.closed_ranks:
            return False
        if not (goal.is_reached(link.version, link.tokens) and self.peers.has_several_groups(now)):
            return False
        self.closed_ranks = True
        self.comes_near()
        return True

    def comes_near(self) -> None:
        """All peers form one group from now on, and answer every call."""
        self.is_near = self.pace.due_time.eager = True
        self.peers.group_size = messages.ROSTER_MAX


TELL_EVERY_S = 1.0
"""One peer after the other is told: a head with its signatures has two or three kilobytes."""

TELL_AGAIN_S = 30.0
"""A peer that has not answered is told again: it was cut off, or it was in a round."""

PEERS_MAX = 1024
"""Peers that are remembered; those whose work was merged the least are forgotten first."""


class Lingering:
    """One peer as one that has ended."""

    __slots__ = ("_agree", "_at", "_certificates", "_id", "_lineage", "_peers", "_send", "_told")

    def __init__(
        self,
        identity: Identity,
        peers: Neighbourhood,
        certificates: Certificates,
        send: Callable[[PeerId, Message], None],
    ) -> None:
        self._id = identity
        self._peers = peers
        self._certificates = certificates
        self._send = send
        self._lineage: Lineage | None = None
        """The final state; ``None``: this peer has not ended."""
        self._at = math.inf
        self._agree = BoundedMapping[PeerId, None](
            "peers that agree on the end", PEERS_MAX, worth=peers.worth
        )
        """Peers that have shown that they stand there."""
        self._told = BoundedMapping[PeerId, float](
            "peers told of the end", PEERS_MAX, worth=peers.worth
        )

    def next_at(self) -> float | None:
        return None if self._lineage is None else self._at

    def ends_on(self, final: Standing | None, now: float) -> None:
        """``final``: this peer's standing if nothing follows on it, else ``None``."""
        lineage = None if final is None else final.lineage
        if lineage == self._lineage:
            return
        self._lineage, self._at = lineage, now + TELL_EVERY_S
        self._agree.clear()
        self._told.clear()

    def heard(self, peer: PeerId, theirs: messages.Head) -> None:
        if self._lineage is not None and theirs.lineage == self._lineage:
            self._agree[peer] = None

    def tick(self, now: float) -> None:
        standing = self._certificates.standing
        if self._lineage is None or standing is None or now < self._at:
            return
        silent = [peer for peer in self._peers.trainers(now) if peer not in self._agree]
        # From the own name on, so that not all tell the same one.
        for peer in sorted(silent, key=lambda peer: (peer < self._id.me, peer)):
            if peer != self._id.me and now >= self._told.get(peer, -math.inf) + TELL_AGAIN_S:
                self._told.renew(peer, now)
                self._at = now + TELL_EVERY_S
                compare = messages.Compare(self._id.fragment, standing.head())
                self._send(peer, compare)
                return
        self._at = now + TELL_AGAIN_S

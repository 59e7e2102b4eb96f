"""A peer in its final state: it shows the others where it stands, until they have shown the same.

A peer that has come to the run's end joins no round any more, so two sides of a partition that have
both ended would never hear of each other, and stay on two final states for good. A peer that is
told compares (``averaging.round.gathering.catching_up``): the lighter side takes the state of the
other.
"""

from __future__ import annotations

import math

from averaging import messages
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.round.opinions.fragment import Fragment
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

TELL_EVERY_S = 1.0
"""One peer after the other is told: a head with its signatures has two or three kilobytes."""

TELL_AGAIN_S = 30.0
"""A peer that has not answered is told again: it was cut off, or it was in a round."""

PEERS_MAX = 1024
"""Peers that are remembered; those whose work was merged the least are forgotten first."""


class Lingering:
    """One peer as one that has ended."""

    __slots__ = ("_agree", "_at", "_fragment", "_id", "_lineage", "_peers", "_told")

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._id = fragment.identity
        self._peers = peers = fragment.peers
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
        standing = self._fragment.standing
        if self._lineage is None or standing is None or now < self._at:
            return
        silent = [peer for peer in self._peers.trainers(now) if peer not in self._agree]
        # From the own name on, so that not all tell the same one.
        for peer in sorted(silent, key=lambda peer: (peer < self._id.me, peer)):
            if peer != self._id.me and now >= self._told.get(peer, -math.inf) + TELL_AGAIN_S:
                self._told.renew(peer, now)
                self._at = now + TELL_EVERY_S
                compare = messages.Compare(self._id.fragment, standing.head())
                self._fragment.send(peer, compare)
                return
        self._at = now + TELL_AGAIN_S

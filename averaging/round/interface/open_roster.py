"""The roster of the next round at its leader, while it is open.

``averaging.rules.quorum`` decides when it closes, ``averaging.rules.grouping`` who may be in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from averaging.messages import Join
from averaging.rules.quorum import Turnout
from dht.identity import PeerId


class OpenRoster:
    """The peers that have been called, have joined, wait or pass."""

    def __init__(
        self, group: tuple[PeerId, ...], *, decide_at: float, search_at: float, now: float
    ) -> None:
        self.group = group
        """The peers that are expected."""
        self.joins: dict[PeerId, Join] = {}
        self.passed: set[PeerId] = set()
        self.promised: dict[PeerId, PeerId | None] = {}
        """The other leaders that some of these are promised to; ``None``: it has come here."""
        self.called: dict[PeerId, float] = {}
        """Time at which each of the others was called first, or again after it had passed."""
        self.coming: dict[PeerId, float] = {}
        """Time by which each peer should be here that said that it comes."""
        self.is_hurried = False
        """A peer that joined is about to leave: the others are called to come at once."""
        self.opened_at = self.joined_at = now
        """``joined_at``: when the last of them joined."""
        self.quorum_at: float | None = None
        self.decide_at = decide_at
        """Time of the next decision whether to close."""
        self.search_at = search_at
        """Time of the next search for peers that have come into sight."""

    def has_answered(self, peer: PeerId, now: float) -> bool:
        """True if a peer has joined or passed, or comes by a time that is not over yet."""
        comes = now < self.coming.get(peer, -math.inf)
        return comes or peer in self.joins or peer in self.passed

    def turnout(
        self,
        live: Callable[[PeerId], bool],
        *,
        room: int,
        answer_s: float,
        keeper: bool = False,
        on_probation: Collection[PeerId] = (),
    ) -> Turnout:
        """The facts by which a roster closes.

        ``room``: number of members that fit. With members from other groups among them, not all of
        the group fit. ``answer_s``: time that a peer has to answer a call. ``keeper``: there is
        one. ``on_probation``: peers that do not count.
        """
        newcomers = self.joins.keys() & on_probation
        joined = self.joins.keys() - newcomers
        in_sight = {peer for peer in self.group if peer in joined or live(peer)} | joined
        expected = {
            peer: self.coming[peer] if peer in self.coming else self.called[peer] + answer_s
            for peer in in_sight - joined - newcomers - self.passed
            if peer in self.coming or peer in self.called
        }
        late = expected.keys() & on_probation
        in_sight -= set(on_probation)
        return Turnout(
            live=min(len(in_sight), max(room, len(joined))),
            joined=len(joined),
            passed=len((self.passed & in_sight) - joined),
            opened_at=self.opened_at,
            quorum_at=self.quorum_at,
            expected_until=max((expected[peer] for peer in expected.keys() - late), default=None),
            newcomers=len(newcomers),
            newcomers_until=(self.quorum_at or 0.0) + answer_s if late else None,
            to_keeper=keeper and all(join.leaves for join in self.joins.values()),
        )

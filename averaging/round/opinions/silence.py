"""Peers that are silent while others answer: one observation for all fragments of a peer.

Each fragment waits for its own leader. But a peer that is frozen answers about no fragment, so a
silence that one fragment has found holds for all of them; unless this peer itself was asleep or cut
off, for then it has heard no peer at all.

A stopped process keeps its links for 16 s. The first fragment whose leader does not answer for 10 s
tells the others, unless nobody else was heard either: then this peer may be the one that slept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

HEARD_MAX = 1024
"""Peers that are remembered. One that is forgotten counts as silent."""


class LastHeard:
    """The times at which peers were last heard, about any fragment."""

    __slots__ = ("_heard_at", "_latest_at")

    def __init__(self, worth: Callable[[PeerId], float] = lambda peer: 0.0) -> None:
        """``worth``: how much the work of a peer counts here."""
        self._heard_at = BoundedMapping[PeerId, float](
            "last heard", HEARD_MAX, worth=lambda peer, _: worth(peer)
        )
        self._latest_at = -math.inf

    def __len__(self) -> int:
        """Number of peers that are remembered."""
        return len(self._heard_at)

    def heard(self, peer: PeerId, now: float) -> None:
        self._heard_at.renew(peer, now)
        self._latest_at = now

    def is_silent(self, peer: PeerId, *, since: float) -> bool:
        """True if this peer has not been heard since then, and another one has."""
        return self._heard_at.get(peer, since) <= since < self._latest_at

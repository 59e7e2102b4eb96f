"""Choice of the peer that measures the held-out loss, and its newest measurement.

The peer with the smallest hash of (run, version, peer) measures, without a message. Peers that see
different members may both measure, which costs a little time and does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import blake3

from dht.identity import PeerId, RunId
from peer.status import HeldOut


@dataclass(slots=True)
class HeldOutLoss:
    """The held-out loss of a run, as known to one peer."""

    run: RunId
    me: PeerId
    every_versions: int
    newest: HeldOut | None = None
    _asked: int = -1

    def is_my_turn(self, version: int, able: Iterable[PeerId]) -> bool:
        """``True`` if this peer, and none of ``able``, is to measure at this version.

        Asked of every version that this peer makes, in a round or alone.
        """
        if version % self.every_versions or version <= self._asked:
            return False

        def rank(peer: PeerId) -> bytes:
            return blake3.blake3(f"{self.run}/{version}/{peer}".encode()).digest()

        if min([self.me, *able], key=rank) != self.me:
            return False
        self._asked = version
        return True

    def heard(self, measured: HeldOut | None) -> bool:
        """Take note of a measurement. Returns whether it is newer than the known one.

        By its tokens: the heavier of two histories may have the smaller versions.
        """
        if measured is None or not math.isfinite(measured.loss):
            return False  # a status with such a loss would be refused by every reader
        if self.newest is not None and measured.tokens <= self.newest.tokens:
            return False
        self.newest = measured
        return True

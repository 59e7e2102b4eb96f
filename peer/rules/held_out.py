"""Whose turn it is to measure the held-out loss, and which measurement is the newest.

Nobody asks and nobody assigns: the peer with the least hash of (run, version, peer) measures. Two
peers that see different others may both do so, which costs a little time and harms nothing.
Pure.
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
    """What one peer knows about the run's held-out loss."""

    run: RunId
    me: PeerId
    every_versions: int
    newest: HeldOut | None = None
    _asked: int = -1

    def is_my_turn(self, version: int, able: Iterable[PeerId]) -> bool:
        """Whether to measure at this version of the first fragment. ``able``: others who could."""
        if version % self.every_versions or version <= self._asked:
            return False

        def rank(peer: PeerId) -> bytes:
            return blake3.blake3(f"{self.run}/{version}/{peer}".encode()).digest()

        if min([self.me, *able], key=rank) != self.me:
            return False
        self._asked = version
        return True

    def heard(self, measured: HeldOut | None) -> bool:
        """Somebody measured, or heard of it. Says whether that is news."""
        if measured is None or not math.isfinite(measured.loss):
            return False  # a message that tells of no number is refused by all who read it
        if self.newest is not None and measured.version <= self.newest.version:
            return False
        self.newest = measured
        return True

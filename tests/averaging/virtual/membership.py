"""The members of a test's swarm see all others by themselves, and hear from them in each beat."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from averaging.virtual.membership import LONG_AGO_S, is_old, shown
from averaging.virtual.swarm import Absent, Membership, Peer, Swarm, View
from dht.identity import PeerId


class Everybody(Membership):
    """Everybody sees everybody at once, and hears from all that can be reached in each beat."""

    def __init__(
        self,
        *,
        beat_s: float = 4.0,
        young: bool = False,
        sees: Callable[[Peer, Peer], bool] = lambda one, other: True,
    ) -> None:
        """``young``: those that are there from the beginning are new to each other as well."""
        self.beat_s = beat_s
        self.young = young
        self.sees = sees

    def begin(self, swarm: Swarm) -> None:
        swarm.call_in(0.0, self._beat, swarm)

    def is_old(self, peer: Peer) -> bool:
        return not self.young and is_old(peer)

    def known_to(self, peer: PeerId) -> tuple[View, Absent]:
        return {}, {}

    def came(self, peer: Peer) -> None:
        since = -LONG_AGO_S if self.is_old(peer) else 0.0
        for other in _others(peer):
            other.view.pop(peer.name, None)  # a restarted peer is a new one
            self.look(peer, other, since)
            self.look(other, peer, since)

    def _beat(self, swarm: Swarm) -> None:
        """The peers that are awake hear from each other."""
        awake = [peer for peer in _alive(swarm) if not peer.sleeps]
        for peer in awake:
            for other in awake:
                if other is not peer and swarm.network.connected(peer.name, other.name):
                    self.look(peer, other)
        swarm.call_in(self.beat_s, self._beat, swarm)

    def look(self, peer: Peer, other: Peer, since: float = 0.0) -> None:
        if not self.sees(peer, other) or other.name in peer.averager.guard.convicted:
            return
        speaks = peer.plan.speaks
        peer.view[other.name] = shown(other, peer.view, now=peer.now(), since=since, to=speaks)

    def heard(self, peer: Peer, sender: PeerId) -> None:
        """A peer has had a message from another one."""
        seen = peer.view.get(sender)
        if seen is not None:
            peer.view[sender] = msgspec.structs.replace(seen, heard_at=peer.now())

    def convicted(self, peer: Peer, guilty: PeerId) -> None:
        peer.view.pop(guilty, None)

    def left(self, peer: Peer) -> None:
        for other in _others(peer):
            other.view.pop(peer.name, None)
            other.absent[peer.name] = None


def _others(peer: Peer) -> list[Peer]:
    return [other for other in _alive(peer.swarm) if other is not peer]


def _alive(swarm: Swarm) -> list[Peer]:
    """All of them, also those that a test does not count as its own because they lie."""
    return [peer for peer in swarm.nodes.values() if peer.alive]

"""Who sees whom in a virtual swarm, as if the membership of ``dht`` had done its work."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from averaging.rules.peer_view import PeerView
from averaging.virtual.peer import Peer
from dht.identity import PeerId
from dht.memory.network import SimulatedNetwork
from dht.protocol import OLDEST, common

LONG_AGO_S = 1e6
"""Peers of an old swarm have seen each other for so long when it begins."""


class Membership:
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

    def is_old(self, peer: Peer) -> bool:
        """True if a peer has been here for long when the swarm begins."""
        return not self.young and peer.plan.starts_at == 0.0 and peer.incarnation == 1

    def came(self, peer: Peer, others: list[Peer]) -> None:
        """A peer has started."""
        since = -LONG_AGO_S if self.is_old(peer) else 0.0
        for other in others:
            self.look(peer, other, since)
            self.look(other, peer, since)

    def beat(self, up: list[Peer], network: SimulatedNetwork) -> None:
        """The peers that are awake hear from each other."""
        for peer in up:
            for other in up:
                if other is not peer and network.connected(peer.name, other.name):
                    self.look(peer, other)

    def look(self, peer: Peer, other: Peer, since: float = 0.0) -> None:
        if not self.sees(peer, other) or other.name in peer.averager.audits.convicted:
            return
        known = peer.view.get(other.name)
        if known is not None and known.incarnation != other.incarnation:
            known = None  # a restarted peer is a new one
        now = peer.now()
        peer.view[other.name] = PeerView(
            first_seen=known.first_seen if known else now + since,
            heard_at=now,
            failed_at=None,
            reachable=not other.plan.dial_out_only,
            trains=other.plan.trains,
            step_time_s=other.plan.step_time_s,
            protocol=common(other.plan.speaks, peer.plan.speaks) or OLDEST,
            incarnation=other.incarnation,
        )

    def heard(self, peer: Peer, sender: PeerId) -> None:
        """A peer has had a message from another one."""
        seen = peer.view.get(sender)
        if seen is not None:
            peer.view[sender] = msgspec.structs.replace(seen, heard_at=peer.now())

    def left(self, peer: Peer, others: list[Peer]) -> None:
        """A peer has said goodbye to everybody."""
        for other in others:
            other.view.pop(peer.name, None)
            other.absent[peer.name] = None

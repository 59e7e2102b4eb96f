"""The views of the peers of a virtual swarm, as if the membership of ``dht`` had done its work.

Views of its own for each peer need memory, and time, quadratic in the number of peers. So
``Observers`` keep a few for a whole swarm, which are late as those of a real one are. Tests derive
from them what they want to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from statistics import median

import msgspec

from averaging.rules.grouping import Names
from averaging.rules.peer_view import ESTABLISHED_AFTER_S, SILENCE_MAX_S, PeerView
from averaging.rules.sites import site_pass
from averaging.virtual.swarm import Absent, Membership, Peer, Swarm, View
from dht.identity import PeerId
from dht.protocol import OLDEST, common

LONG_AGO_S = 1e6
"""Peers of an old swarm have seen each other for so long when it begins."""
HEARTBEAT_S = 10.0
"""Time between two heartbeats of a peer of a real run."""


def shown(
    peer: Peer,
    view: Mapping[PeerId, PeerView],
    *,
    now: float,
    since: float = 0.0,
    to: tuple[int, int],
) -> PeerView:
    """The view that a peer gives of itself, to observers that had this view and speak ``to``."""
    known, plan, name = view.get(peer.name), peer.plan, peer.name
    return PeerView(
        first_seen=known.first_seen if known else now + since,
        heard_at=now,
        failed_at=None,
        reachable=not plan.dial_out_only,
        trains=plan.trains and peer.is_complete,
        arrives=plan.trains and not peer.is_complete,
        step_time_s=plan.step_time_s,
        bytes_per_s=peer.averager.bytes_per_s or None,
        protocol=common(plan.speaks, to) or OLDEST,
        site=site_pass(plan.site, name),
    )


def is_old(peer: Peer) -> bool:
    """True if a peer has been here for long when the swarm begins."""
    return peer.plan.starts_at == 0.0 and peer.incarnation == 1


class Table(dict[PeerId, PeerView]):
    """An observer's view, which many peers share. As a ``Crowd`` it computes totals once per
    change, for all of them."""

    def __init__(self, place: PeerId, *, clock_s: float, speaks: tuple[int, int]) -> None:
        """``place``: one of those that share it, on whose side of a partition it is."""
        super().__init__()
        self.place = place
        self.clock_s = clock_s
        self.speaks = speaks
        self.absent: dict[PeerId, float | None] = {}
        self.banned: set[PeerId] = set()
        self._until = -math.inf
        self._trainers = Names(())
        self._electorate: frozenset[PeerId] = frozenset()
        self._sites: dict[PeerId, str] = {}
        self._median_s = 0.0

    def changed(self) -> None:
        self._until = -math.inf

    def drop(self, peer: PeerId) -> None:
        if self.pop(peer, None) is not None:
            self.changed()

    def trainers(self, now: float) -> Names:
        self._look(now)
        return self._trainers

    def electorate(self, now: float) -> frozenset[PeerId]:
        self._look(now)
        return self._electorate

    def median_step_s(self, now: float) -> float:
        self._look(now)
        return self._median_s

    def sites(self, now: float) -> Mapping[PeerId, str]:
        self._look(now)
        return self._sites

    def _look(self, now: float) -> None:
        """Recompute the totals, unless they still hold: until the first live peer would expire, or
        has been here for a while."""
        if now < self._until:
            return
        live = {peer: seen for peer, seen in self.items() if seen.trains and seen.is_live(now)}
        self._trainers = _one_for_all(Names(live))
        self._electorate = frozenset(p for p, seen in live.items() if seen.is_established(now))
        self._sites = {peer: seen.site for peer, seen in live.items() if seen.site is not None}
        times = [seen.step_time_s for seen in live.values() if seen.step_time_s]
        self._median_s = median(times) if times else 0.0
        ends = [seen.heard_at + SILENCE_MAX_S for seen in live.values()]
        begins = [
            seen.first_seen + ESTABLISHED_AFTER_S
            for peer, seen in live.items()
            if peer not in self._electorate
        ]
        self._until = min([*ends, *begins], default=math.inf)


@lru_cache(maxsize=64)
def _one_for_all(names: Names) -> Names:
    """One shared object for equal names, so that tables compare quickly."""
    return names


class Observers(Membership):
    """A few observers, whose heartbeats come at different moments. Each peer has the view of one.

    Peers on different sides of a partition, on different clocks, or of different releases share
    none.
    """

    def __init__(self, count: int, *, apart: Callable[[PeerId], Hashable] = lambda peer: 0) -> None:
        """``apart``: differs for peers between which a partition may come."""
        self._count = count
        self._apart = apart
        self._tables: dict[Hashable, Table] = {}
        self._table_of: dict[PeerId, Table] = {}

    def begin(self, swarm: Swarm) -> None:
        for number, (name, plan) in enumerate(swarm.plans.items()):
            turn = number % self._count
            key = turn, plan.clock_offset_s, plan.speaks, self._apart(name)
            if key not in self._tables:
                table = Table(name, clock_s=plan.clock_offset_s, speaks=plan.speaks)
                self._tables[key] = table
                swarm.call_in(HEARTBEAT_S * turn / self._count, self._hear, swarm, table)
            self._table_of[name] = self._tables[key]

    def known_to(self, peer: PeerId) -> tuple[View, Absent]:
        table = self._table_of[peer]
        return table, table.absent

    def came(self, peer: Peer) -> None:
        table = self._table_of[peer.name]
        policy = peer.averager.terms.policy
        if not (policy.probation.rounds or policy.spot_checks or policy.audit_rate):
            # Otherwise peers differ in who counts.
            for machine in peer.machines.values():
                machine.peers.crowd = table
        for other in self._tables.values():
            now, known = peer.swarm.now + other.clock_s, other.get(peer.name)
            if is_old(peer):
                other[peer.name] = shown(peer, other, now=now, since=-LONG_AGO_S, to=other.speaks)
                other.changed()
            elif known is not None:  # a restarted peer is a new one
                other[peer.name] = msgspec.structs.replace(known, first_seen=now)
                other.changed()

    def _hear(self, swarm: Swarm, table: Table) -> None:
        now = swarm.now + table.clock_s
        for peer in swarm.alive:
            heard = not peer.sleeps and swarm.network.connected(table.place, peer.name)
            if heard and peer.name not in table.banned:
                table[peer.name] = shown(peer, table, now=now, to=table.speaks)
                table.absent.pop(peer.name, None)
        gone = [name for name, seen in table.items() if now - seen.heard_at > 2 * SILENCE_MAX_S]
        for name in gone:
            table.absent[name] = table.pop(name).heard_at
        table.changed()
        swarm.call_in(HEARTBEAT_S, self._hear, swarm, table)

    def convicted(self, peer: Peer, guilty: PeerId) -> None:
        """Those that share a view hear of it at once, as they do soon from each other."""
        table = self._table_of[peer.name]
        table.banned.add(guilty)
        table.drop(guilty)

    def left(self, peer: Peer) -> None:
        for table in self._tables.values():
            table.drop(peer.name)
            table.absent[peer.name] = None

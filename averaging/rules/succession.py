"""The peers of a group that may lead a round, and the order in which they follow one another.

Leadership is a function of names, versions, attempts and the lineage that the round continues:
peers with the same view agree on the leader without a message. What peers with other views do says
``averaging.round.opinions.pacemaker``. Nobody knows a lineage before its last round is merged, so
no identity can be made beforehand that ranks first. Where peers share no lineage (several groups,
two sides of a fork) names and versions decide alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final

from averaging.history.lineage import Lineage
from averaging.rules.grouping import Names, hashed
from averaging.rules.line_speed import slow_lines
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId

NO_LINEAGE: Final[Lineage] = b""
"""The lineage of peers that share none."""


def succession(
    candidates: Iterable[PeerId],
    *,
    topic: bytes,
    fragment: int,
    version: int,
    lineage: Lineage = NO_LINEAGE,
    attempt: int = 0,
) -> tuple[PeerId, ...]:
    """Return the candidates by rank: the first leads.

    Rendezvous hashing: when a candidate leaves, the others keep their order. Each ``attempt`` at a
    version has an order of its own.
    """
    return _ranked(Names(candidates), topic, fragment, version, lineage, attempt)


def leaders(
    group: Iterable[PeerId],
    view: Mapping[PeerId, PeerView],
    *,
    me: PeerId,
    own: PeerView,
    left_out: Collection[PeerId],
    newcomers: Collection[PeerId] = (),
    now: float,
) -> tuple[PeerId, ...]:
    """Return the peers of a group that may lead now: those that count (no ``newcomers``) and are
    established, else any reachable.

    ``own``: this peer as the others see it. If no peer of the group can be dialled, live peers
    without a learner are borrowed from outside of it; if there are none of those either, no peer
    leads. Those on slow lines, as their records say, do not lead others: all joins, calls and votes
    of a round pass the leader's line, beside its own slices. The result has no order;
    ``succession`` ranks it.
    """
    members = {peer: own if peer == me else view.get(peer) for peer in group}
    able = {
        peer: seen
        for peer, seen in members.items()
        if seen is not None and peer not in left_out and seen.reachable and seen.is_live(now)
    }
    able = {peer: seen for peer, seen in able.items() if peer not in newcomers} or able
    if any(seen.is_established(now) for peer, seen in able.items() if peer != me):
        able = {peer: seen for peer, seen in able.items() if seen.is_established(now)}
    able = able or {
        peer: seen
        for peer, seen in sorted(view.items())
        if not seen.trains and seen.reachable and seen.is_live(now) and peer not in left_out
    }
    slow = slow_lines({peer: seen.bytes_per_s for peer, seen in able.items()})
    return tuple(peer for peer in able if peer not in slow)


@lru_cache(maxsize=2048)
def _ranked(
    candidates: Names, topic: bytes, fragment: int, version: int, lineage: Lineage, attempt: int
) -> tuple[PeerId, ...]:
    prefix = b"lead/" + topic + f"/{fragment}/{version}/{attempt}/".encode() + lineage
    return tuple(peer for _, peer in sorted((-hashed(prefix, peer), peer) for peer in candidates))

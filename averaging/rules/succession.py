"""The peers of a group that may lead a round, and the order in which they follow one another.

Leadership is a function of names, versions and the lineage that the round continues: peers with the
same view agree on the leader without a message, and a peer with another view is redirected by the
round. Nobody knows a lineage before its last round is merged, so no identity can be made
beforehand that ranks first. Where peers share no lineage (several groups, two sides of a fork)
names and versions decide alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
) -> tuple[PeerId, ...]:
    """Return the candidates by rank: the first leads, and the next takes over when it is dead.

    Rendezvous hashing: when a candidate leaves, the others keep their order.
    """
    return _ranked(Names(candidates), topic, fragment, version, lineage)


def leaders(
    group: Iterable[PeerId],
    view: Mapping[PeerId, PeerView],
    *,
    me: PeerId,
    me_reachable: bool,
    me_established: bool,
    failed: Iterable[PeerId],
    now: float,
) -> tuple[PeerId, ...]:
    """Return the peers of a group that may lead now: established ones, else any reachable.

    If no peer of the group can be dialled, live peers without a learner are borrowed from outside
    of it; if there are none of those either, no peer leads. The result has no order; ``succession``
    ranks it.
    """
    down = set(failed)
    members = [peer for peer in group if peer != me and peer not in down]
    usable = [
        peer
        for peer in members
        if peer in view and view[peer].reachable and view[peer].is_live(now)
    ]
    established = [peer for peer in usable if view[peer].is_established(now)]
    if established and me in set(group) and me_reachable and me_established:
        return (*established, me)
    if established:
        return tuple(established)
    if me in set(group) and me_reachable:
        return (*usable, me)
    if usable:
        return tuple(usable)
    return tuple(
        peer
        for peer, seen in sorted(view.items())
        if not seen.trains and seen.reachable and seen.is_live(now) and peer not in down
    )


def on_usual_lines(
    candidates: Iterable[PeerId],
    view: Mapping[PeerId, PeerView],
    *,
    me: PeerId,
    me_bytes_per_s: float | None,
) -> tuple[PeerId, ...]:
    """Return the candidates without those on slow lines, as their records say; never nobody.

    All joins, calls and votes of a round pass the leader's line, beside its own slices.
    """
    able = tuple(candidates)
    slow = slow_lines(
        {peer: me_bytes_per_s if peer == me else view[peer].bytes_per_s for peer in able}
    )
    return tuple(peer for peer in able if peer not in slow)


@lru_cache(maxsize=2048)
def _ranked(
    candidates: Names, topic: bytes, fragment: int, version: int, lineage: Lineage
) -> tuple[PeerId, ...]:
    prefix = b"lead/" + topic + f"/{fragment}/{version}/".encode() + lineage
    return tuple(peer for _, peer in sorted((-hashed(prefix, peer), peer) for peer in candidates))

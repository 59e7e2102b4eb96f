"""The orders in which peers follow one another: as leaders of a group, and as sources of a state.

**Leadership** is a function of names, versions, attempts and the lineage that the round continues:
peers with the same view agree on the leader without a message. What peers with other views do says
``averaging.round.opinions.pacemaker``. Nobody knows a lineage before its last round is merged, so
no identity can be made beforehand that ranks first. Where peers share no lineage (several groups,
two sides of a fork) names and versions decide alone.

**Sources.** Established peers are asked first: a newcomer's state may be refused, and a download
that waits for it is lost time. Among equals those come first that others can dial; the rest may be
connected all the same. Beyond that every peer has an order of its own for each fragment, so that
the swarm's downloads are spread over all who serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final

import blake3

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


def sources_in_turn(
    me: PeerId,
    fragment: int,
    live: Mapping[PeerId, PeerView],
    is_established: Callable[[PeerId], bool],
) -> list[PeerId]:
    """The peers to ask, first to last."""
    key = blake3.blake3(me.encode() + bytes([fragment % 256])).digest()

    def rank(peer: PeerId) -> tuple[bool, bool, bytes]:
        order = blake3.blake3(key + peer.encode()).digest()
        return not is_established(peer), not live[peer].reachable, order

    return sorted((peer for peer in live if peer != me), key=rank)


def with_first(
    in_turn: list[PeerId],
    first: PeerId,
    is_established: Callable[[PeerId], bool],
    *,
    asked_max: int,
) -> list[PeerId]:
    """The same with a peer in front that is said to have the state.

    One that is not established comes after those that are, but is among the ``asked_max`` that are
    asked at once.
    """
    others = [peer for peer in in_turn if peer != first]
    if is_established(first):
        return [first, *others]
    before = min(sum(map(is_established, others)), asked_max - 1)
    return [*others[:before], first, *others[before:]]

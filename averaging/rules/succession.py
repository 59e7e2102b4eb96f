"""TODO"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from averaging.rules.grouping import Names, hashed
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId


def succession(
    candidates: Iterable[PeerId], *, topic: bytes, fragment: int, version: int
) -> tuple[PeerId, ...]:
    """Candidates by rank: the first leads, the next follows when it is dead.

    Rendezvous hashing: when a candidate leaves, the others keep their order.
    """
    return _ranked(Names(candidates), topic, fragment, version)


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
    """Who of a group may lead now, unordered: the established, else whoever can be reached.

    If nobody of the group can be reached, live peers without a learner are
    borrowed from outside of it; if there are none of those either, nobody leads.
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


@lru_cache(maxsize=2048)
def _ranked(candidates: Names, topic: bytes, fragment: int, version: int) -> tuple[PeerId, ...]:
    prefix = b"lead/" + topic + f"/{fragment}/{version}/".encode()
    return tuple(peer for _, peer in sorted((-hashed(prefix, peer), peer) for peer in candidates))

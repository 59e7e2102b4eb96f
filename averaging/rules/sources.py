"""The order in which a peer asks others for a state. Pure.

Established peers come first: a newcomer's state may be refused, and a download that waits for it is
lost time. Among equals those come first that others can dial; the rest may be connected all the
same. Beyond that every peer has an order of its own for each fragment, so that the swarm's
downloads are spread over all who serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import blake3

from averaging.rules.peer_view import PeerView
from dht.identity import PeerId


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

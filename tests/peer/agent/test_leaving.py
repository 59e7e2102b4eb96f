"""Peers that take over the work of one that leaves."""

from __future__ import annotations

from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from peer.agent.leaving import takers

ANNA, BORIS, CLARA, DORA = map(PeerId, ("anna", "boris", "clara", "dora"))


def line(bytes_per_s: float | None) -> PeerView:
    return PeerView(first_seen=0.0, heard_at=0.0, bytes_per_s=bytes_per_s)


def test_the_keeper_with_the_fastest_line_takes_over_first() -> None:
    view = {ANNA: line(1e6), BORIS: line(3e6), CLARA: line(None), DORA: line(9e6)}
    keepers, followers = [ANNA, BORIS, CLARA], [ANNA, BORIS, CLARA, DORA]
    assert takers(keepers, followers, view) == [BORIS, ANNA, CLARA]
    assert takers([], followers, view) == [DORA, BORIS, ANNA, CLARA]
    assert takers([PeerId("gone")], [DORA], view) == [DORA]

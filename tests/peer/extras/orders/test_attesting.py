"""The states that the owner of a run attests."""

from __future__ import annotations

from peer.calls import Kept
from peer.extras.orders.attesting import chosen


def kept(fragment: int, version: int, bits: bytes = b"a") -> Kept:
    return Kept(fragment, version, bytes(32), bytes(32), bits * 32, 100 * version)


def test_the_newest_state_that_most_hold_alike_is_chosen() -> None:
    anna = [kept(0, 8), kept(0, 16), kept(1, 8)]
    boris = [kept(0, 8), kept(0, 16), kept(1, 8)]
    clara = [kept(0, 8), kept(0, 24), kept(1, 8, b"x")]
    assert chosen([anna, boris, clara], 2) == ((kept(0, 16), 2), (kept(1, 8), 2))


def test_a_state_that_one_of_several_peers_reports_is_not_attested() -> None:
    assert chosen([[kept(0, 8)], [kept(0, 8, b"x")]], 1) is None
    assert chosen([[kept(0, 8)] * 5, [kept(0, 16)]], 1) is None, "said five times by one"
    assert chosen([[kept(0, 8)]], 1) == ((kept(0, 8), 1),)
    assert chosen([], 1) is None
    assert chosen([[kept(0, 8)]], 2) is None, "no state of fragment 1"

"""The states that peers keep for the owner to attest, and those that the owner attests."""

from __future__ import annotations

import pytest

from averaging.history.attested import numbers_digest
from peer.attestable import CALL, STATES_MAX, Kept, chosen
from tests.averaging.live.served_states import state_of


def kept(fragment: int, version: int, bits: bytes = b"a") -> Kept:
    return Kept(fragment, version, bytes(32), bytes(32), bits * 32, 100 * version)


def test_a_kept_state_tells_its_lineage() -> None:
    state = state_of(1, 100)
    told = Kept(
        0, 0, state.history, state.merged.digest(), numbers_digest(state), state.merged.tokens
    )
    assert CALL.decode(CALL.encode((told,))) == (told,)
    assert told.lineage == state.lineage


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


def test_an_answer_is_bounded_and_anything_else_is_refused() -> None:
    assert len(CALL.encode((kept(2**16 - 1, 2**53 - 1),) * STATES_MAX)) <= CALL.answer_max_bytes
    for wrong in (
        b"",
        b"\xc1",
        bytes(CALL.answer_max_bytes + 1),
        CALL.encode(())[:-1] + b"\x91\x90",
    ):
        with pytest.raises(ValueError):
            CALL.decode(wrong)

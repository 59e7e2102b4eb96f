"""The states that peers keep for the owner to attest."""

from __future__ import annotations

import pytest

from averaging.history.manifest import numbers_digest
from peer.attestable import CALL, STATES_MAX, Kept
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

"""Questions between peers, from both sides."""

from __future__ import annotations

import pytest

from averaging.history.manifest import numbers_digest
from dht.identity import RunId
from peer.calls import ATTESTABLE, STATES_MAX, Call, Kept
from tests.averaging.live.served_states import state_of

OURS, OTHER = RunId("ab" * 32), RunId("cd" * 32)


def test_a_request_names_the_run_and_perhaps_something_in_it() -> None:
    call: Call[str, int] = Call("/x/1", int, "a number", 5)
    assert call.asked(call.request(OURS, ""), OURS) == ""
    assert call.asked(call.request(OURS, "a peer"), OURS) == "a peer"
    for wrong, words in (
        (call.request(OTHER, ""), "this peer is in run abab"),
        (call.request(OURS, "x" * 300), "a question of 3[0-9]+ bytes; at most 256"),
        (b"", "not a question"),
    ):
        with pytest.raises(ValueError, match=words):
            call.asked(wrong, OURS)


def test_an_answer_of_another_type_or_size_or_against_the_check_is_refused() -> None:
    def check(number: int) -> None:
        if number % 2:
            raise ValueError("it is odd")

    call: Call[str, int] = Call("/x/1", int, "a number", 5, check)
    assert call.decode(call.encode(4)) == 4
    for data, words in (
        (call.encode(3), "odd"),
        (b"\xa1x", "not a number: "),
        (bytes(6), "a number of 6 bytes; at most 5"),
    ):
        with pytest.raises(ValueError, match=words):
            call.decode(data)


def kept(fragment: int, version: int, bits: bytes = b"a") -> Kept:
    return Kept(fragment, version, bytes(32), bytes(32), bits * 32, 100 * version)


def test_a_kept_state_tells_its_lineage() -> None:
    state = state_of(1, 100)
    told = Kept(
        0, 0, state.history, state.merged.digest(), numbers_digest(state), state.merged.tokens
    )
    assert ATTESTABLE.decode(ATTESTABLE.encode((told,))) == (told,)
    assert told.lineage == state.lineage


def test_an_answer_is_bounded_and_anything_else_is_refused() -> None:
    assert (
        len(ATTESTABLE.encode((kept(2**16 - 1, 2**53 - 1),) * STATES_MAX))
        <= ATTESTABLE.answer_max_bytes
    )
    for wrong in (
        b"",
        b"\xc1",
        bytes(ATTESTABLE.answer_max_bytes + 1),
        ATTESTABLE.encode(())[:-1] + b"\x91\x90",
    ):
        with pytest.raises(ValueError):
            ATTESTABLE.decode(wrong)

"""Questions between peers, from both sides."""

from __future__ import annotations

import pytest

from dht.identity import RunId
from peer.calls import Call

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

"""Wire format of direct messages between peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import Identity, PeerId, RunId
from dht.membership import hello as wire
from dht.membership.hello import PASSED_MAX, SAMPLES_MAX, ClockOffsets, ClockSample, sample
from dht.records import (
    CREDENTIAL_MAX_BYTES,
    DIRECTIVE_MAX_BYTES,
    DIRECTIVES_MAX,
    PEER_RECORD_MAX_BYTES,
)

ANNA = Identity.from_seed(b"a" * 32)
RUN = RunId("5f" * 32)


MESSAGES: list[Any] = [
    wire.Hello(
        run=RUN,
        record=bytes(PEER_RECORD_MAX_BYTES),
        passed=tuple(wire.Passed(bytes(PEER_RECORD_MAX_BYTES), 1e9 / 3) for _ in range(PASSED_MAX)),
    ),
    wire.HelloReply(
        run=RUN,
        record=bytes(PEER_RECORD_MAX_BYTES),
        passed=tuple(wire.Passed(bytes(PEER_RECORD_MAX_BYTES), 1e9 / 3) for _ in range(PASSED_MAX)),
        yours=bytes(PEER_RECORD_MAX_BYTES),
        received_at=1.5e9,
        sent_at=1.5e9 + 0.1,
    ),
    wire.DialBack(
        peer=ANNA.peer_id,
        nonce=bytes(16),
        addresses=(bytes(128),) * 6,
        relay=True,
    ),
    wire.DialBackReply(verdict="not reached"),
]
MESSAGES.append(
    wire.Papers(
        run="r" * 64,
        credential=bytes(CREDENTIAL_MAX_BYTES),
        digest=bytes(16),
        directives=(bytes(DIRECTIVE_MAX_BYTES),) * DIRECTIVES_MAX,
        not_admitted="ü" * wire.REASON_MAX,
        not_taken="ü" * wire.REASON_MAX,
    )
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_the_largest_message_fits_and_comes_back(message: Any) -> None:
    data = wire.write(message)
    limits: dict[type, int] = {
        wire.DialBack: wire.DIAL_BACK_MAX_BYTES,
        wire.Papers: wire.PAPERS_MAX_BYTES,
    }
    limit = limits.get(type(message), wire.HELLO_MAX_BYTES)
    assert wire.read(type(message), data, max_bytes=limit) == message


@pytest.mark.parametrize(
    "write",
    [
        lambda: wire.write(wire.Hello(run="r" * 65)),
        lambda: wire.write(wire.Hello(run="", record=bytes(1025))),
        lambda: wire.write(wire.Hello(run="", passed=(wire.Passed(b"", 0.0),) * (PASSED_MAX + 1))),
        lambda: msgspec.msgpack.encode(["", b"", [[b"", float("nan")]]]),
        lambda: msgspec.msgpack.encode(["", b"", [[b"", -1.0]]]),
        lambda: msgspec.msgpack.encode([1, b"", []]),
        lambda: b"",
        lambda: bytes(wire.HELLO_MAX_BYTES + 1),
    ],
)
def test_a_hello_that_breaks_a_limit_is_a_value_error(write: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match="Hello"):
        wire.read(wire.Hello, write())


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300])
def test_a_clock_that_is_no_clock_is_refused(at: float) -> None:
    data = msgspec.msgpack.encode(["", b"", [], b"", at, 0.0])
    with pytest.raises(ValueError):
        wire.read(wire.HelloReply, data)


def test_papers_with_a_reason_that_a_terminal_would_obey_are_refused() -> None:
    data = msgspec.msgpack.encode([RUN, b"", b"", [], "", "\x1b[2J"])
    with pytest.raises(ValueError, match="cannot be printed"):
        wire.read(wire.Papers, data, max_bytes=wire.PAPERS_MAX_BYTES)


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


@given(st.floats(-1e6, 1e6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_an_offset_is_right_to_within_half_the_round_trip(
    offset_s: float, there_s: float, back_s: float, thinking_s: float
) -> None:
    sent_at = 1_000.0
    received_at = sent_at + there_s + offset_s
    measured = sample(
        sent_at=sent_at,
        received_at=received_at,
        replied_at=received_at + thinking_s,
        returned_at=sent_at + there_s + thinking_s + back_s,
        now=0.0,
    )
    assert abs(measured.offset_s - offset_s) <= (there_s + back_s) / 2 + 1e-6
    assert measured.round_trip_s == pytest.approx(there_s + back_s, abs=1e-6)


def exchange(offset_s: float, now: float, round_trip_s: float = 0.1) -> ClockSample:
    return sample(
        sent_at=0.0,
        received_at=round_trip_s / 2 + offset_s,
        replied_at=round_trip_s / 2 + offset_s,
        returned_at=round_trip_s,
        now=now,
    )


def test_a_minority_with_wrong_clocks_does_not_move_the_estimate() -> None:
    offsets = ClockOffsets()
    assert offsets.estimate(0.0) is None
    for number, offset_s in enumerate([0.1, 0.1, 0.1, 9999.0, -9999.0]):
        offsets.add(peer(number), exchange(offset_s, 0.0))
    estimate = offsets.estimate(0.0)
    assert estimate is not None
    assert estimate.offset_s == pytest.approx(0.1)
    assert estimate.error_s == pytest.approx(0.05)
    assert estimate.peers == 5


def test_only_those_that_count_are_counted() -> None:
    offsets = ClockOffsets()
    for number in range(5):
        offsets.add(PeerId(f"stranger{number}"), ClockSample(1e9, 0.1, 0.0))
    assert offsets.estimate(0.0, lambda peer: peer == "anna") is None
    offsets.add(PeerId("anna"), ClockSample(0.5, 0.1, 0.0))
    found = offsets.estimate(0.0, lambda peer: peer == "anna")
    assert found is not None and (found.offset_s, found.peers) == (0.5, 1)


def test_slow_old_and_too_many_samples_do_not_count() -> None:
    offsets = ClockOffsets()
    offsets.add(peer(0), exchange(5.0, 0.0, round_trip_s=3.0))
    assert offsets.estimate(0.0) is None
    for number in range(SAMPLES_MAX + 5):
        offsets.add(peer(number), exchange(1.0, 0.0))
    estimate = offsets.estimate(900.0)
    assert estimate is not None and estimate.peers == SAMPLES_MAX
    assert offsets.estimate(900.1) is None

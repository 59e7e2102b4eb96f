"""Wire format of direct messages between peers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dht.identity import Identity, RunId
from dht.membership import hello as wire
from dht.membership.hello import PASSED_MAX
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
    wire.DialBackReply(verdict="not reached", reason="r" * 200),
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

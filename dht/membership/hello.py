"""Wire format of direct messages between peers: hello, papers, dial-back and run file.

Each message is a msgpack array with a maximum size, and the name of its protocol ends with the
number of its form. ``read`` is the only decoder: untrusted bytes become a message or a
``ValueError``. ``dht.presence`` sends them.

A hello also tells the difference between two wall clocks. No record is judged by it (see
``dht.records``). A wrong clock is reported because it confuses people who read logs, and breaks TLS
certificates and dates of runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec

from dht.bounded_mapping import BoundedMapping, by_age
from dht.decoding import decoded
from dht.identity import PeerId
from dht.records import (
    ADDRESS_MAX_BYTES,
    ADDRESSES_MAX,
    CREDENTIAL_MAX_BYTES,
    DIRECTIVE_MAX_BYTES,
    DIRECTIVES_MAX,
    PEER_RECORD_MAX_BYTES,
)

HELLO_PROTOCOL = "/shoal/hello/1"
DIAL_BACK_PROTOCOL = "/shoal/dial-back/1"
CONFIRM_PROTOCOL = "/shoal/dial-back-confirm/1"
RUN_FILE_PROTOCOL = "/shoal/run-file/1"
PAPERS_PROTOCOL = "/shoal/papers/1"

PASSED_MAX = 12
"""Limit of other peers' records in one hello."""

HELLO_MAX_BYTES = (PASSED_MAX + 2) * (PEER_RECORD_MAX_BYTES + 32) + 512
DIAL_BACK_MAX_BYTES = ADDRESSES_MAX * (ADDRESS_MAX_BYTES + 8) + 256
NONCE_BYTES = 16
RUN_ID_MAX = 64
REASON_MAX = 200
PAPERS_MAX_BYTES = CREDENTIAL_MAX_BYTES + DIRECTIVES_MAX * (DIRECTIVE_MAX_BYTES + 8) + 1024

SealedPeerRecord = Annotated[bytes, msgspec.Meta(max_length=PEER_RECORD_MAX_BYTES)]
PackedAddress = Annotated[bytes, msgspec.Meta(max_length=ADDRESS_MAX_BYTES)]
RunText = Annotated[str, msgspec.Meta(max_length=RUN_ID_MAX)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
TIME_MAX_S = 1e12
WallTime = Annotated[float, msgspec.Meta(ge=-TIME_MAX_S, le=TIME_MAX_S)]
ReasonText = Annotated[str, msgspec.Meta(max_length=REASON_MAX)]


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """Another peer's record, with the time since the sender first saw it."""

    sealed: SealedPeerRecord
    age_s: Annotated[float, msgspec.Meta(ge=0, le=TIME_MAX_S)]


PassedRecords = Annotated[tuple[Passed, ...], msgspec.Meta(max_length=PASSED_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A peer introduces itself. ``run`` and ``record`` are empty in that of a bootstrap peer."""

    run: RunText
    record: SealedPeerRecord = b""
    passed: PassedRecords = ()


class HelloReply(Hello, frozen=True, array_like=True, kw_only=True):
    """The answer to a hello, with the same content about the answering peer."""

    yours: SealedPeerRecord = b""
    """A newer record of the caller than the one it sent: its clock was set back since."""

    received_at: WallTime
    sent_at: WallTime
    """Wall clock of the answering peer when the hello arrived and when this reply was sent."""


class DialBack(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Request for a fresh connection to ``peer`` at these addresses, with the nonce as proof.

    ``relay`` asks the helper to find a third peer that is not connected to the caller; without it,
    the asked peer dials.
    """

    peer: Annotated[str, msgspec.Meta(max_length=64)]
    nonce: Nonce
    addresses: Annotated[tuple[PackedAddress, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
    relay: bool


DialBackVerdict = Literal["reached", "not reached", "cannot help"]


class DialBackReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The result of a dial-back; ``cannot help``: none was made, which says nothing about it.

    A reason would reveal other programs at the address.
    """

    verdict: DialBackVerdict


class Papers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Credential of the sender and the directives that it knows: both request and reply.

    A peer calls with it to ask another one for its credential, or to exchange directives.
    """

    run: RunText
    credential: Annotated[bytes, msgspec.Meta(max_length=CREDENTIAL_MAX_BYTES)] = b""
    digest: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Digest of all directives in force at the sender."""

    directives: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=DIRECTIVE_MAX_BYTES)], ...],
        msgspec.Meta(max_length=DIRECTIVES_MAX),
    ] = ()
    """Directives in force, in a reply to a request with another digest."""

    not_admitted: ReasonText = ""
    """Reason why the run does not admit the caller, in a reply."""

    not_taken: ReasonText = ""
    """Reason why a directive of the request was refused, in the reply."""

    def __post_init__(self) -> None:
        if not (self.not_admitted + self.not_taken).isprintable():  # they are shown on terminals
            raise ValueError("a reason contains characters that cannot be printed")


Message = TypeVar("Message", Hello, HelloReply, DialBack, DialBackReply, Papers)


def write(message: Hello | HelloReply | DialBack | DialBackReply | Papers) -> bytes:
    return msgspec.msgpack.encode(message)


def read(kind: type[Message], data: bytes, *, max_bytes: int = HELLO_MAX_BYTES) -> Message:
    """Decode an untrusted message. Raises ``ValueError``."""
    return decoded(
        data,
        lambda data: msgspec.msgpack.decode(data, type=kind),
        kind.__name__,
        max_bytes=max_bytes,
    )


# --- clocks ----------------------------------------------------------------------------------

SAMPLES_MAX = 128
SAMPLE_LIFE_S = 900.0
ROUND_TRIP_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class ClockSample:
    """Result of one exchange: the own clock plus ``offset_s`` is the other peer's clock."""

    offset_s: float
    round_trip_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """Estimate from all recent exchanges."""

    offset_s: float
    """The own clock plus this is the clock of the swarm."""

    error_s: float
    """Half the median round trip, the accuracy of an exchange."""

    peers: int


def sample(
    *, sent_at: float, received_at: float, replied_at: float, returned_at: float, now: float
) -> ClockSample:
    """Evaluate one exchange like NTP (RFC 5905, section 8), which assumes equal delays both ways.

    ``sent_at`` and ``returned_at`` are times of the own wall clock, ``received_at`` and
    ``replied_at`` of the other peer's.
    """
    offset_s = ((received_at - sent_at) + (replied_at - returned_at)) / 2
    round_trip_s = (returned_at - sent_at) - (replied_at - received_at)
    return ClockSample(offset_s, max(0.0, round_trip_s), now)


class ClockOffsets:
    """The last exchange with each peer, and the median of their offsets.

    A minority of the peers cannot move the median beyond the values of the others.
    """

    def __init__(self) -> None:
        self._samples = BoundedMapping[PeerId, ClockSample](
            "clock samples", SAMPLES_MAX, worth=by_age
        )

    def add(self, peer: PeerId, measured: ClockSample) -> None:
        if measured.round_trip_s <= ROUND_TRIP_MAX_S:
            self._samples.renew(peer, measured)

    def estimate(
        self, now: float, counts: Callable[[PeerId], bool] = lambda peer: True
    ) -> ClockEstimate | None:
        """The estimate by the peers that count; ``None`` without a recent exchange."""
        recent = [
            each
            for peer, each in self._samples.items()
            if now - each.at <= SAMPLE_LIFE_S and counts(peer)
        ]
        if not recent:
            return None
        return ClockEstimate(
            offset_s=statistics.median(s.offset_s for s in recent),
            error_s=statistics.median(s.round_trip_s for s in recent) / 2,
            peers=len(recent),
        )

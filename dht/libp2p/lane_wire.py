"""Messages of the direct lane: offers of a port and keys, meetings, and the preambles of streams.

Each message is a msgpack array. Only ``decode`` reads what another peer sent.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, TypeVar

import msgspec

from dht.libp2p.sealing import KEY_BYTES, NUMBER_BYTES

LANE_PROTOCOL = "/shoal/lane/1"
"""Unary call over libp2p that is answered with an ``Offer``."""

PUNCH_PROTOCOL = "/shoal/punch/1"
"""Unary call over libp2p with a ``Punch``, answered with a ``PunchOffer``."""

SEEN_PROTOCOL = "/shoal/seen/1"
"""Unary call over libp2p without content, answered with the asking peer's IP address as text."""

PUNCH_MAX_BYTES = 64
PREAMBLE_MAX_BYTES = 512
PROTOCOL_MAX = 256
REASON_MAX = 200

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_IP_MAX = 45
_IP = Annotated[str, msgspec.Meta(max_length=_IP_MAX)]
_Number = Annotated[bytes, msgspec.Meta(min_length=NUMBER_BYTES, max_length=NUMBER_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The answer over libp2p: the port of the lane, and a ticket for one connection."""

    port: _Port
    number: _Number
    dialler_key: _Key
    """Key for the frames of the dialling side."""

    listener_key: _Key
    """Key for the frames of the listening side."""


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """Request to begin a stream of this protocol.

    The first one on a connection names no protocol: it proves that both sides have the keys.
    """

    protocol: Annotated[str, msgspec.Meta(max_length=PROTOCOL_MAX)] = ""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ``Begin``: accepted if the reason is empty."""

    refused: Annotated[str, msgspec.Meta(max_length=REASON_MAX)] = ""
    seen_ip: _IP = ""
    seen_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Address of the dialling side as the listening side sees it; in the first answer only."""


class Punch(msgspec.Struct, frozen=True, array_like=True):
    """Request to dial this address now, and to be dialled from it."""

    ip: _IP
    port: _Port


class PunchOffer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ``Punch``: the address to dial, and a ticket for the connection."""

    ip: _IP
    port: _Port
    number: _Number
    dialler_key: _Key
    listener_key: _Key


def is_outer(ip: str) -> bool:
    """Say whether this is a public IPv4 address. Nobody is sent to dial any other one."""
    try:
        return IPv4Address(ip).is_global
    except ValueError:
        return False


_M = TypeVar("_M", Offer, Begin, Answer, Punch, PunchOffer)


def decode(kind: type[_M], message: bytes) -> _M:
    """Decode a message of another peer. Raises ``ValueError``."""
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error


def encode(message: Offer | Begin | Answer | Punch | PunchOffer) -> bytes:
    return msgspec.msgpack.encode(message)

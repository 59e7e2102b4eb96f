"""Messages of the direct lane: the offer of a port and keys, and the preambles of streams.

Each message is a msgpack array. Only ``decode`` reads what another peer sent.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from dht.libp2p.sealing import KEY_BYTES, NUMBER_BYTES

LANE_PROTOCOL = "/shoal/lane/1"
"""Unary call over libp2p that is answered with an ``Offer``."""

PREAMBLE_MAX_BYTES = 512
PROTOCOL_MAX = 256
REASON_MAX = 200

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
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


_M = TypeVar("_M", Offer, Begin, Answer)


def decode(kind: type[_M], message: bytes) -> _M:
    """Decode a message of another peer. Raises ``ValueError``."""
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error


def encode(message: Offer | Begin | Answer) -> bytes:
    return msgspec.msgpack.encode(message)

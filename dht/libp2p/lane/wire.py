"""Messages of the lane: offers of a port and keys, meetings, relaying, and preambles of streams.

Each message is a msgpack array. Only ``decode`` reads what another peer sent.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from dht.decoding import decoded
from dht.libp2p.framing.sealing import Number, Ticket
from dht.public_ip import ipv4_within, is_public

LANE_PROTOCOL = "/shoal/lane/1"
"""Unary call over libp2p that is answered with a ``LaneOffer``."""

PUNCH_PROTOCOL = "/shoal/punch/1"
"""Unary call over libp2p with a ``Punch``, answered with a ``PunchOffer``."""

SEEN_PROTOCOL = "/shoal/seen/1"
"""Unary call over libp2p without content, answered with the asking peer's IP address as text."""

CIRCUIT_PROTOCOL = "/shoal/circuit/1"
"""Unary call over libp2p to a relay with a ``Circuit``, answered with a ``Leg``."""

VIA_PROTOCOL = "/shoal/via/1"
"""Unary call over libp2p with a ``Via``, answered with a ``Ticket``."""

PUNCH_MAX_BYTES = 80
CIRCUIT_MAX_BYTES = 160
PREAMBLE_MAX_BYTES = 512
PROTOCOL_MAX = 256
REASON_MAX = 200

PEER_MAX = 64

_Peer = Annotated[str, msgspec.Meta(min_length=1, max_length=PEER_MAX)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
OUTER_PORT_MIN = 1024
_OuterPort = Annotated[int, msgspec.Meta(ge=OUTER_PORT_MIN, le=65535)]
"""Port that others are asked to dial at any address: routers give no lower one to a connection from
a high port (RFC 4787, 4.2.1), and services of third parties listen there."""

_IP_MAX = 45
_IP = Annotated[str, msgspec.Meta(max_length=_IP_MAX)]
_OuterAddresses = Annotated[
    tuple[tuple[_IP, _OuterPort], ...], msgspec.Meta(min_length=1, max_length=2)
]
"""The outer address of IPv4, of IPv6, or both."""


class LaneOffer(msgspec.Struct, frozen=True, array_like=True):
    """A ticket, and the port of the lane."""

    ticket: Ticket
    port: _Port


class PunchOffer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ``Punch``: a ticket, and the addresses to dial."""

    ticket: Ticket
    addresses: _OuterAddresses


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
    """Request to dial these addresses now, and to be dialled from them."""

    addresses: _OuterAddresses


class Circuit(msgspec.Struct, frozen=True, array_like=True):
    """Request to a relay to join the asking peer's connection to that of another peer."""

    other: _Peer
    number: Number
    """Chosen by the dialling side; both sides name it."""


class Leg(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ``Circuit``: the relay's port, and the number to show there."""

    port: _Port
    number: Number


class Via(msgspec.Struct, frozen=True, array_like=True):
    """Request to come to a relay, and to ask it for the other leg of a circuit."""

    relay: _Peer
    circuit: Number


def is_outer(ip: str) -> bool:
    """Say whether this is a public address. Nobody is sent to dial any other one.

    Addresses of IPv6 that stand for one of IPv4 are not: it would be dialled by another name.
    """
    return is_public(ip) and ipv4_within(ip_address(ip)) is None


Message: TypeAlias = Ticket | LaneOffer | PunchOffer | Begin | Answer | Punch | Circuit | Leg | Via
_M = TypeVar("_M", bound=Message)


def decode(kind: type[_M], message: bytes) -> _M:
    """Decode a message of another peer. Raises ``ValueError``."""
    return decoded(message, lambda data: msgspec.msgpack.decode(data, type=kind), kind.__name__)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)

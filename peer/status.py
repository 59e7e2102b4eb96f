"""What a peer says of itself when anybody asks: one unary call, one small message.

A claim like a peer's record: shown to people, never relied upon. ``shoal status`` asks
every peer; agents ask a few now and then, which is also how a held-out loss gets around.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dht.host import Host
from dht.identity import PeerId, RunId

VERSION = 1
PROTOCOL = "/shoal/status/1"
STATUS_MAX_BYTES = 64 << 10

TEXT_MAX = 64
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]


class HeldOut(Struct, frozen=True, array_like=True):
    """A held-out loss, and the version of the first fragment that it was measured at."""

    version: Count
    loss: Number
    peer: Annotated[str, Meta(max_length=64)]


class Status(Struct, frozen=True, array_like=True, kw_only=True):
    """How one peer is doing."""

    version: Annotated[int, Meta(ge=0, le=2**31)] = VERSION
    peer: Text
    name: Text
    role: Text
    phase: Text
    steps: Count
    tokens: Count
    """Both of this incarnation."""
    step_time_s: Annotated[float, Meta(ge=0, le=1e9)]
    loss: Number | None
    held_out: HeldOut | None
    global_tokens: Count
    """Merged, of all peers."""
    versions: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    """Of the fragments' states; empty before there are any."""
    staleness: Count
    """By how many versions the trainer's parameters are behind the states, at most."""
    peers: Count
    fates: Annotated[dict[Text, Number], Meta(max_length=32)]
    rounds: Count
    rounds_missed: Count
    bytes_sent: Count
    bytes_received: Count
    blocked_s: Annotated[float, Meta(ge=0, le=1e18)]
    up_s: Annotated[float, Meta(ge=0, le=1e18)]
    reachable: bool | None
    layout: Text = ""
    """The layout's hash, in hex: who has another one cannot take part with this peer."""
    model: Text = ""
    """``peer.storage.outer_state.model_name`` of its states.

    At equal versions others may have others.
    """
    rest: Text | None = None
    """Why it makes no steps for now."""
    limits: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    """What its machine's owner allows."""


_decoder = msgspec.msgpack.Decoder(Status)


def encode(status: Status) -> bytes:
    return msgspec.msgpack.encode(status)


def decode(data: bytes) -> Status:
    """A stranger's bytes become a status, or a ``ValueError``."""
    if len(data) > STATUS_MAX_BYTES:
        raise ValueError(f"a status of {len(data)} bytes; at most {STATUS_MAX_BYTES}")
    try:
        status = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a status: {error}") from error
    shown = (status.peer, status.name, status.role, status.phase, status.rest or "")
    for text in (*shown, *status.fates, *status.limits):
        if not text.isprintable():  # it ends up on terminals
            raise ValueError("a status contains characters that cannot be printed")
    return status


async def ask(host: Host, peer: PeerId, run: RunId, *, timeout_s: float) -> Status:
    """Ask one peer. Raises ``DhtError``, or ``ValueError`` for an answer that is none."""
    return decode(await host.call(peer, PROTOCOL, run.encode(), timeout_s=timeout_s))

"""Streams on which one peer asks and the other answers: for those who catch up, and for auditors.

A request is one frame. Its answer is frames that begin with ``DATA``, or one refusal with the
reason (``dht.wrapped_host.refuse``), after which the stream ends. One request follows another.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from averaging.messages import BadMessage, unpacked
from averaging.numbers.arrays import uninitialised
from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.host import Messaging, Stream
from dht.identity import PeerId
from dht.wrapped_host import REASON_MAX_BYTES, REFUSED, refuse

logger = logging.getLogger(__name__)

DATA = b"\x01"
BUSY = b"\x03"
"""The peer that is asked has no place for another question just now: it may be asked again."""
FRAME_BYTES = 512 << 10
REQUEST_MAX_BYTES = 256
OPEN_TIMEOUT_S = 10.0
REFUSE_WITHIN_S = 5.0
END_WITHIN_S = 5.0
STALL_MAX_S = 20.0
"""A side that moves nothing for so long is left."""

RELAYED = "the connection is relayed, and relays carry no bulk"
"""Refusal of requests over a relay."""


class Busy(Exception):
    """The peer that is asked has no place for another question just now."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.peer = peer

    def __str__(self) -> str:
        return f"peer {self.peer} answers as many questions as it can just now"


WORLD = (PeerUnreachable, StreamBroken, HostClosed, TimeoutError, Busy)
"""The failures that the network, or other peers, can cause: nobody is blamed for them."""

Request = TypeVar("Request")


class NotHere(Exception):
    """The peer that is asked does not have it, or does not show it; the message is its reason."""


# The side that answers


async def answer_requests(
    stream: Stream,
    requests: msgspec.msgpack.Decoder[Request],
    answer: Callable[[Request], Awaitable[None]],
) -> None:
    """Answer one request after the other until the other side ends.

    ``answer`` may raise ``NotHere``, ``BadMessage`` or ``Busy``, which is told, and the failures of
    the network, which end it.
    """
    try:
        while (frame := await stream.receive(timeout_s=STALL_MAX_S)) is not None:
            await answer(read_request(frame, requests))
    except (NotHere, BadMessage) as error:
        await refuse(stream, str(error), timeout_s=REFUSE_WITHIN_S)
    except Busy:
        await tell_busy(stream)
    except (StreamBroken, HostClosed) as error:
        logger.debug("answers_broken peer=%s reason=%s", stream.remote, error)


async def tell_busy(stream: Stream) -> None:
    """Answer that there is no place for the other side just now."""
    with suppress(StreamBroken, HostClosed):
        await stream.send(BUSY, timeout_s=REFUSE_WITHIN_S)
        await stream.finish(timeout_s=REFUSE_WITHIN_S)


def read_request(frame: bytes, requests: msgspec.msgpack.Decoder[Request]) -> Request:
    """Decode a request. Raises ``BadMessage``, whatever the bytes are."""
    return unpacked(frame, requests, "a request", max_bytes=REQUEST_MAX_BYTES)


def in_frames(data: memoryview) -> Iterator[memoryview]:
    """The data in parts that fit a frame."""
    return (data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))


# The side that asks


@asynccontextmanager
async def stream_to(host: Messaging, peer: PeerId, protocol: str) -> AsyncIterator[Stream]:
    """Open a stream for questions, and end it once they are answered.

    Its connection then carries the next stream: one that is dropped takes the connection with it.
    """
    stream = await host.open_stream(peer, protocol, timeout_s=OPEN_TIMEOUT_S, bulk=True)
    try:
        yield stream
        with suppress(*WORLD):  # all that was asked for is here
            await stream.finish(timeout_s=END_WITHIN_S)
    finally:
        stream.abort()


async def ask(stream: Stream, request: msgspec.Struct) -> None:
    await stream.send(msgspec.msgpack.encode(request), timeout_s=STALL_MAX_S)


async def next_data(stream: Stream, *, timeout_s: float = STALL_MAX_S) -> memoryview:
    """The data of the next frame. Raises ``NotHere``, ``BadMessage`` or ``StreamBroken``."""
    frame = await stream.receive(timeout_s=timeout_s)
    if frame is None:
        raise StreamBroken(stream.remote, "it ended in the middle")
    if frame[:1] == REFUSED:
        raise NotHere(frame[1 : 1 + REASON_MAX_BYTES].decode("utf-8", "replace"))
    if frame[:1] == BUSY:
        raise Busy(stream.remote)
    if frame[:1] != DATA:
        raise BadMessage("a frame that is neither data nor a refusal")
    return memoryview(frame)[1:]


async def read_exactly(stream: Stream, size: int) -> memoryview:
    """Data of a known size, in any number of frames. Raises what ``next_data`` raises."""
    data, filled = uninitialised(size), 0
    while filled < size:
        frame = await next_data(stream)
        if not 0 < len(frame) <= size - filled:
            raise BadMessage("another number of bytes than the layout says")
        data[filled : filled + len(frame)] = frame
        filled += len(frame)
    return data

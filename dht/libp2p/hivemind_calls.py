"""Unary calls of all protocols over one connection with the libp2p daemon, in both directions.

hivemind has a client of its own for this connection. It hangs when the connection ends, ends
silently at a reply to a call that was just given up, and lets one peer's calls delay all others.
So this one replaces it, and the daemon's messages are all that both have in common.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

from dht.errors import BUSY
from dht.libp2p.hivemind_imports import P2PDaemonError, P2PHandlerError, PeerID, p2pd_pb2
from dht.limits import FairQueue, Place, Places, Rate

ERROR_TEXT_MAX_BYTES = 512
MESSAGE_MAX_BYTES = 4 << 20
"""Limit of a message to our own daemon, and of its answers: a list of a thousand connections is
200 kB. One with a call of another peer may be a little larger, as the daemon has the same limit for
the call."""

_LOST = "the connection to the daemon is lost"

_logger = logging.getLogger("dht.hivemind")

Handler: TypeAlias = Callable[[bytes, Any], Awaitable[bytes]]
"""Answers a request of a peer."""


class RefusedByHandler(Exception):  # an answer, not an error of ours
    """Raised by a unary handler to send its text back to the caller."""


class MalformedCall(RefusedByHandler):
    """A request that no program of ours sends: it counts as many calls of its peer."""


_Call = tuple[UUID, Any, Place[bytes]]
"""A call that waits: its number, its request and its place."""


class UnaryCalls:
    """The connection. When it ends, every pending call fails at once, and so does each later one.

    The tasks of one remote peer are limited, and so are its calls and replies by time. Calls that
    wait are begun by peer in turns, those of peers that ask little first, so that a flood delays
    mostly itself.
    """

    CALLS_PER_PEER_MAX = 64
    CALLS_MAX = 1024
    CALLS_PER_S = 100.0
    CALLS_BURST = 2000.0
    REPLY_BYTES_PER_CALL = 4096
    """A reply counts as a further call for so many bytes each."""

    CALLS_PER_MALFORMED = 20.0
    """A peer that goes on sending malformed requests is refused before they are parsed. Its
    connection stays: to refuse a call costs less than the handshake of the next connection."""

    BEGUN_AT_ONCE = 8
    """Calls of frugal peers begun in one turn of the event loop, which the others wait for."""

    def __init__(self) -> None:
        # At most a second of debt: who goes on calling beyond his rate is not heard meanwhile.
        self._rate = Rate[bytes](self.CALLS_PER_S, self.CALLS_BURST, debt=self.CALLS_PER_S)
        self._frugal, self._others = FairQueue[bytes, _Call](), FairQueue[bytes, _Call]()
        """Calls that wait: of peers with half of what they may spend at once, and of others."""

        self.lost = asyncio.Event()
        """Set when the connection to the daemon has ended."""
        self._places = Places[Place[bytes]](self.CALLS_MAX, self.CALLS_PER_PEER_MAX)
        """Those that wait or are under way; only those under way make room."""

        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._handlers: dict[str, Handler] = {}
        self._pending: dict[UUID, asyncio.Future[Any]] = {}
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        """Calls of other peers that are under way."""

    async def open(self, path: Path) -> None:
        """Connect to the daemon's socket. Raises ``OSError`` and ``P2PDaemonError``."""
        reader, self._writer = await asyncio.open_unix_connection(str(path))
        upgrade = p2pd_pb2.Request(type=p2pd_pb2.Request.PERSISTENT_CONN_UPGRADE)
        self._writer.write(delimited(upgrade))
        await read_response(reader)
        self._reading = asyncio.create_task(self._read(reader), name="calls of the daemon")
        self._reading.add_done_callback(lambda task: self.close())

    def close(self) -> None:
        """End the connection, and every call with it."""
        if self.lost.is_set():
            return
        self.lost.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(P2PDaemonError(_LOST))
        for task in list(self._tasks.values()):
            task.cancel()
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = p2pd_pb2.PersistentConnectionResponse()
            try:
                message.ParseFromString(await read_delimited(reader, 2 * MESSAGE_MAX_BYTES))
            except (asyncio.IncompleteReadError, ConnectionError, P2PDaemonError):
                return
            call_id = UUID(bytes=message.callId)
            if message.HasField("requestHandling"):
                self._begin_request(call_id, message.requestHandling)
            elif message.HasField("cancel"):
                if (task := self._tasks.get(call_id)) is not None:
                    task.cancel()
            else:
                self._settle(call_id, message)

    def _settle(self, call_id: UUID, message: Any) -> None:
        future = self._pending.get(call_id)
        if future is None or future.done():
            return  # the caller has just given up
        if message.HasField("daemonError"):
            future.set_exception(P2PDaemonError(message.daemonError.message))
        elif not message.HasField("callUnaryResponse"):
            future.set_result(None)
        elif message.callUnaryResponse.HasField("error"):
            text = message.callUnaryResponse.error[:ERROR_TEXT_MAX_BYTES].decode(errors="replace")
            future.set_exception(P2PHandlerError(text))
        else:
            future.set_result(message.callUnaryResponse.response)

    # --- calls of other peers --------------------------------------------------------------

    def _begin_request(self, call_id: UUID, request: Any) -> None:
        peer: bytes = request.peer
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._rate.spend(peer, now):
            self._reply(call_id, error=f"{BUSY} of yours: over {self.CALLS_PER_S:g} in a second")
            return
        if self._places.held(peer) >= self._places.of_each:
            self._reply(call_id, error=f"{BUSY} of yours: over {self._places.of_each} at once")
            return
        place = Place(peer)
        if not self._places.take(place):
            self._reply(call_id, error=f"{BUSY} at once")
            return
        if not self._frugal and not self._others:
            loop.call_soon(self._begin_some)
        is_frugal = self._rate.left(peer, now) >= self.CALLS_BURST / 2
        (self._frugal if is_frugal else self._others).push(peer, (call_id, request, place))

    def _begin_some(self) -> None:
        """Begin the next calls: some of frugal peers, and one of the others.

        So a peer that asks little waits for one call of the others, however many identities they
        have and whatever their calls cost.
        """
        calls = [self._frugal.pop() for _ in range(self.BEGUN_AT_ONCE) if self._frugal]
        if self._others:
            calls.append(self._others.pop())
        for _, (call_id, request, place), _ in calls:
            if self.lost.is_set():
                self._places.leave(place)
                continue
            task = self._tasks[call_id] = asyncio.ensure_future(self._answer(call_id, request))
            place.end = partial(self._give_up, call_id)
            task.add_done_callback(partial(self._end_request, call_id, place))
        if self._frugal or self._others:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _give_up(self, call_id: UUID) -> None:
        """End a call of the peer with the most under way, for one of another peer."""
        self._tasks[call_id].cancel()
        self._reply(call_id, error=f"{BUSY} at once")

    def _end_request(self, call_id: UUID, place: Place[bytes], task: asyncio.Task[None]) -> None:
        del self._tasks[call_id]
        self._places.leave(place)

    async def _answer(self, call_id: UUID, request: Any) -> None:
        handler = self._handlers.get(request.proto)
        if handler is None:
            self._reply(call_id, error=f"{request.proto!r} is not served")
            return
        loop = asyncio.get_running_loop()
        try:
            reply = await handler(request.data, PeerID(request.peer))
        except RefusedByHandler as refusal:
            if isinstance(refusal, MalformedCall):
                self._rate.spend(request.peer, loop.time(), self.CALLS_PER_MALFORMED)
            self._reply(call_id, error=str(refusal))
        except Exception as error:  # a malformed message: the caller must get an answer
            _logger.debug("call_failed protocol=%s", request.proto, exc_info=True)
            self._reply(call_id, error=type(error).__name__)
        else:
            self._rate.spend(request.peer, loop.time(), len(reply) / self.REPLY_BYTES_PER_CALL)
            self._reply(call_id, response=reply)

    def _reply(self, call_id: UUID, *, response: bytes = b"", error: str | None = None) -> None:
        if error is not None:
            content = p2pd_pb2.CallUnaryResponse(error=error.encode()[:ERROR_TEXT_MAX_BYTES])
        else:
            content = p2pd_pb2.CallUnaryResponse(response=response)
        if not self._send(call_id, unaryResponse=content):
            self._reply(call_id, error="the reply is larger than a message may be")

    # --- calls and requests of our own -----------------------------------------------------

    def _send(self, call_id: UUID, **content: Any) -> bool:
        """Send a message in one piece. ``False``: it is too large."""
        message = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, **content)
        if message.ByteSize() > MESSAGE_MAX_BYTES:
            return False
        if self._writer is not None and not self.lost.is_set():
            self._writer.write(delimited(message))
        return True

    async def _request(self, **content: Any) -> Any:
        """Send one request and wait for its result."""
        if self.lost.is_set():
            raise P2PDaemonError(_LOST)
        call_id = uuid4()
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(call_id, **content):
                raise P2PDaemonError(f"over {MESSAGE_MAX_BYTES} bytes in one message")
            return await future
        except asyncio.CancelledError:
            self._send(call_id, cancel=p2pd_pb2.Cancel())
            raise
        finally:
            del self._pending[call_id]

    async def call(self, peer: Any, protocol: str, request: bytes) -> bytes:
        """The reply of a peer. Raises ``P2PDaemonError`` and ``P2PHandlerError``."""
        call = p2pd_pb2.CallUnaryRequest(peer=peer.to_bytes(), proto=protocol, data=request)
        reply: bytes = await self._request(callUnary=call)
        return reply

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Have a handler answer the calls of a protocol. Raises ``P2PDaemonError``."""
        self._handlers[protocol] = handler
        adding = p2pd_pb2.AddUnaryHandlerRequest(proto=protocol, balanced=False)
        await self._request(addUnaryHandler=adding)

    async def stop_serving(self, protocol: str) -> None:
        self._handlers.pop(protocol, None)
        if not self.lost.is_set():  # else the daemon that knew it is gone
            removing = p2pd_pb2.RemoveUnaryHandlerRequest(proto=protocol)
            await self._request(removeUnaryHandler=removing)


def delimited(message: Any) -> bytes:
    """A protobuf message behind its length, as the daemon reads it."""
    body: bytes = message.SerializeToString()
    return varint(len(body)) + body


def varint(value: int) -> bytes:
    """An unsigned number in groups of seven bits, lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


async def read_delimited(reader: asyncio.StreamReader, size_max: int = MESSAGE_MAX_BYTES) -> bytes:
    """A message of the daemon behind its length.

    Raises ``P2PDaemonError``, ``IncompleteReadError`` and ``ConnectionError``.
    """
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 28:
            raise P2PDaemonError("the daemon's answer has no readable length")
    if size > size_max:
        raise P2PDaemonError(f"the daemon's answer has {size} bytes")
    return await reader.readexactly(size)


async def read_response(reader: asyncio.StreamReader) -> Any:
    """The daemon's answer to a request. Raises as ``read_delimited``."""
    response = p2pd_pb2.Response()
    response.ParseFromString(await read_delimited(reader))
    return accepted(response)


def accepted(response: Any) -> Any:
    """The response, unless it is an error. Raises ``P2PDaemonError``."""
    if response.type == p2pd_pb2.Response.ERROR:
        raise P2PDaemonError(response.error.msg)
    return response

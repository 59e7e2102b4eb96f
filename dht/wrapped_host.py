"""Hosts that change a part of another one: guarded, throttled, or dialling by records.

``ForwardingHost`` passes all messages on, and each of the others changes one thing:

- ``DiallingHost`` dials a peer where its record says it is, if the network has forgotten it.
- ``GuardedHost`` serves only peers that the run admits, and opens streams to no others. Whatever is
  served through it is closed to strangers: control links, bulk streams, states, replays, status and
  lane tickets. It is the only place where a protocol of a run asks for admission.
- ``ThrottledHost`` has streams that keep to a rate, so that a user can still use the internet
  connection. Small frames (messages, heartbeats, requests) never wait, but count; larger frames
  wait until the rate permits. So the mean rate is held, and other peers do not mistake a slow peer
  for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from multiaddr import Multiaddr

from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.host import CallHandler, Host, Messaging, Stream, StreamHandler
from dht.identity import PeerId
from dht.limits import Rate


class ForwardingHost:
    """``dht.host.Messaging`` by means of another host."""

    def __init__(self, host: Messaging) -> None:
        self._host = host

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        await self._host.serve_calls(protocol, handler, request_max_bytes=request_max_bytes)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        return await self._host.call(peer, protocol, request, timeout_s=timeout_s)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        await self._host.serve_streams(protocol, handler)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


class DiallingHost(ForwardingHost):
    """A host that dials a peer where its record says it is, if the network has forgotten it."""

    def __init__(
        self, host: Messaging, addresses: Callable[[PeerId], Sequence[Multiaddr]], *, dials: Host
    ) -> None:
        """``addresses``: those at which a peer says that it can be dialled. ``dials``: the host
        below all others, which has the connections."""
        super().__init__(host)
        self._addresses = addresses
        self._dials = dials

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        try:
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        except PeerUnreachable:
            if not (addresses := self._addresses(peer)):
                raise
            await self._dials.connect(peer, addresses, timeout_s=timeout_s)
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


REFUSED = b"\x02"
"""First byte of the only frame on a refused stream, followed by the reason. Control links, bulk
streams and fetches take it for a refusal."""

REASON_MAX_BYTES = 300
REFUSE_WITHIN_S = 2.0

Refusal = Callable[[PeerId], Awaitable[str | None]]
"""Gives the reason why a peer is refused; ``None`` if the run admits it."""


class GuardedHost(ForwardingHost):
    """A host with a guard before every handler and every stream that is opened."""

    def __init__(self, host: Messaging, refusal: Refusal) -> None:
        super().__init__(host)
        self._refusal = refusal
        self.refused = 0
        """Number of calls and streams of peers that are not admitted."""

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        async def answer(peer: PeerId, request: bytes) -> bytes:
            if (reason := await self._refusal(peer)) is not None:
                self.refused += 1
                raise ValueError(reason)
            return await handler(peer, request)

        await self._host.serve_calls(protocol, answer, request_max_bytes=request_max_bytes)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        async def serve(stream: Stream) -> None:
            if (reason := await self._refusal(stream.remote)) is not None:
                self.refused += 1
                await refuse(stream, reason, timeout_s=REFUSE_WITHIN_S)
                stream.abort()
            else:
                await handler(stream)

        await self._host.serve_streams(protocol, serve)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if (reason := await self._refusal(peer)) is not None:
            raise PeerUnreachable(peer, reason)
        return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


async def refuse(stream: Stream, reason: str, *, timeout_s: float) -> None:
    """Give the reason, and let the other side read it. An error means that it has gone."""
    with contextlib.suppress(StreamBroken, HostClosed):
        text = reason.encode()[:REASON_MAX_BYTES]
        await stream.send(REFUSED, text, timeout_s=timeout_s)
        await stream.finish(timeout_s=timeout_s)


FREE_FRAME_BYTES = 4096
"""Frames up to this size do not wait."""

BURST_S = 0.1
"""Unused capacity can be used this much later, as seconds at the full rate."""


class Gate:
    """One direction of a connection: frames pass one by one, at a rate that may change."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Bytes per second; ``None``: no limit."""

        self.passed = 0
        """Number of all bytes that passed."""

        self.sent_for: Counter[str] = Counter()
        """Bytes sent on the line by purpose, which the protocol of their stream names."""

        self._left: Rate[None] | None = None
        """Bytes that may pass at once; negative after a large frame."""

        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def set_rate(self, rate: float | None) -> None:
        """Change the rate at once, also for a frame that waits."""
        if rate == self.rate:
            return
        now = asyncio.get_running_loop().time()
        left = 0.0 if self._left is None else self._left.left(None, now)
        self.rate, self._left = rate, None
        if rate is not None:
            burst = rate * BURST_S
            self._left = Rate(rate, burst, debt=math.inf, authors_max=1)
            self._left.spend(None, now, burst - left)
        self._changed.set()

    def give_back(self, count: int) -> None:
        """Take back bytes that were counted and have not passed."""
        if count:
            self._count(-count)
            self._changed.set()

    def _count(self, count: int) -> None:
        self.passed += count
        if self._left is not None:
            self._left.spend(None, asyncio.get_running_loop().time(), count)

    async def pass_through(self, count: int) -> None:
        """Wait until a frame of this size may pass, and count it."""
        loop = asyncio.get_running_loop()
        if count > FREE_FRAME_BYTES:
            async with self._turn:
                while self._left and (pause_s := self._left.wait_s(None, loop.time())) > 0:
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(pause_s):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
                self._count(count)
        else:
            self._count(count)


class ThrottledHost(ForwardingHost):
    """A host with a gate for each direction of its streams. Unary calls are not limited."""

    def __init__(
        self,
        host: Messaging,
        *,
        up: Gate,
        down: Gate,
        closed: Callable[[str], str | None] = lambda protocol: None,
    ) -> None:
        """``closed(protocol)``: reason why no stream of it may begin now; ``None`` if it may.

        Streams that are open continue.
        """
        super().__init__(host)
        self.up = up
        self.down = down
        self._closed = closed

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        async def handle(stream: Stream) -> None:
            if self._closed(protocol) is not None:
                stream.abort()
                return
            await handler(ThrottledStream(stream, self.up, self.down, protocol))

        await self._host.serve_streams(protocol, handle)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if (reason := self._closed(protocol)) is not None:
            raise PeerUnreachable(peer, reason)
        stream = await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        return ThrottledStream(stream, self.up, self.down, protocol)


class ThrottledStream:
    """A stream whose frames pass a gate in each direction. It counts what goes over the line."""

    def __init__(self, stream: Stream, up: Gate, down: Gate, protocol: str) -> None:
        """``protocol``: as ``shoal/RUN/PURPOSE/NUMBER``."""
        self._stream = stream
        self._purpose = protocol.split("/")[-2:][0]
        self._up = up
        self._down = down
        self._saved = stream.saved_bytes

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    @property
    def relayed(self) -> bool:
        return self._stream.relayed

    @property
    def saved_bytes(self) -> tuple[int, int]:
        return self._stream.saved_bytes

    def _give_back(self) -> None:
        """Count what went over the line, of frames that were counted before they were packed."""
        before, self._saved = self._saved, self._stream.saved_bytes
        for gate, earlier, now in zip((self._up, self._down), before, self._saved, strict=True):
            gate.give_back(now - earlier)

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        # Waiting here is our own choice and not part of the other side's time limit.
        size = sum(memoryview(part).nbytes for part in parts)
        await self._up.pass_through(size)
        before, _ = self._stream.saved_bytes
        await self._stream.send(*parts, timeout_s=timeout_s)
        saved = self._stream.saved_bytes[0] - before
        self._up.sent_for[self._purpose] += size - saved
        self._give_back()

    def send_now(self, *parts: bytes) -> bool:
        return False  # whatever is sent passes the gate

    async def receive(self, *, timeout_s: float) -> bytes | None:
        frame = await self._stream.receive(timeout_s=timeout_s)
        if frame is not None:
            # Unread bytes slow the other side down.
            await self._take(len(frame))
        return frame

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        size = await self._stream.receive_into(target, timeout_s=timeout_s)
        if size is not None:
            await self._take(size)
        return size

    async def _take(self, size: int) -> None:
        self._give_back()
        await self._down.pass_through(size)

    async def finish(self, *, timeout_s: float) -> None:
        await self._stream.finish(timeout_s=timeout_s)

    def abort(self) -> None:
        self._stream.abort()

"""A host whose streams keep to a rate: for people who lend their line and still want to use it.

What has to be said at once (small frames: messages, heartbeats, requests) never waits, but counts;
larger frames wait until there is room. So the mean rate is held, and nobody takes a slow line for a
dead one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.host import CallHandler, Connection, Directory, Host, Stream, StreamHandler
from dht.identity import PeerId

FREE_FRAME_BYTES = 4096
"""Frames up to this size do not wait."""

BURST_S = 0.1
"""What was not used is worth so much later, not more."""


@dataclass(slots=True)
class TokenBucket:
    """How many bytes may pass. The rate may be changed at any time; ``None``: no limit."""

    rate: float | None = None
    level: float = 0.0
    """Bytes that may pass at once; below zero after a frame, however large it was."""
    looked_at: float = 0.0
    passed: int = 0
    """All bytes ever."""

    def wait_s(self, now: float) -> float:
        """How long until a frame may pass."""
        self._fill(now)
        if self.rate is None or self.level > -1.0:  # a clock cannot show less than a byte's time
            return 0.0
        return -self.level / self.rate

    def take(self, count: int, now: float) -> None:
        """A frame passes."""
        self._fill(now)
        self.passed += count
        if self.rate is not None:
            self.level -= count

    def set_rate(self, rate: float | None, now: float) -> None:
        self._fill(now)
        if rate is None or self.rate is None:
            self.level = 0.0
        self.rate = rate

    def _fill(self, now: float) -> None:
        if self.rate is not None:
            filled = self.level + (now - self.looked_at) * self.rate
            self.level = min(filled, self.rate * BURST_S)
        self.looked_at = now


class Gate:
    """One direction of a line: frames pass one after the other, as fast as its bucket allows."""

    def __init__(self) -> None:
        self.bucket = TokenBucket()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def set_rate(self, rate: float | None) -> None:
        """Counts at once, also for a frame that waits."""
        if rate != self.bucket.rate:
            self.bucket.set_rate(rate, asyncio.get_running_loop().time())
            self._changed.set()

    async def pass_through(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        if count > FREE_FRAME_BYTES:
            async with self._turn:
                while (pause_s := self.bucket.wait_s(loop.time())) > 0:
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(pause_s):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
                self.bucket.take(count, loop.time())
        else:
            self.bucket.take(count, loop.time())


class ThrottledHost:
    """Another host, with every stream behind a gate for each direction. Calls pass freely."""

    def __init__(
        self,
        host: Host,
        *,
        up: Gate,
        down: Gate,
        closed: Callable[[str], str | None] = lambda protocol: None,
    ) -> None:
        """``closed(protocol)``: why no stream of it may begin now, if so. Others go on."""
        self._host = host
        self.up = up
        self.down = down
        self._closed = closed

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

    @property
    def directory(self) -> Directory:
        return self._host.directory

    def wall_time(self) -> float:
        return self._host.wall_time()

    async def addresses(self) -> tuple[Multiaddr, ...]:
        return await self._host.addresses()

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        await self._host.connect(peer, addresses, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> None:
        await self._host.disconnect(peer)

    async def connections(self) -> tuple[Connection, ...]:
        return await self._host.connections()

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        await self._host.serve_calls(protocol, handler, request_max_bytes=request_max_bytes)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        return await self._host.call(peer, protocol, request, timeout_s=timeout_s)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        async def handle(stream: Stream) -> None:
            if self._closed(protocol) is not None:
                stream.abort()
                return
            await handler(_ThrottledStream(stream, self.up, self.down))

        await self._host.serve_streams(protocol, handle)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if (reason := self._closed(protocol)) is not None:
            raise PeerUnreachable(peer, reason)
        stream = await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        return _ThrottledStream(stream, self.up, self.down)

    async def close(self) -> None:
        await self._host.close()


class _ThrottledStream:
    def __init__(self, stream: Stream, up: Gate, down: Gate) -> None:
        self._stream = stream
        self._up = up
        self._down = down

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    @property
    def relayed(self) -> bool:
        return self._stream.relayed

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        # Waiting here is our own wish, not the other side's slowness: no part of its deadline.
        await self._up.pass_through(sum(memoryview(part).nbytes for part in parts))
        await self._stream.send(*parts, timeout_s=timeout_s)

    async def receive(self, *, timeout_s: float) -> bytes | None:
        frame = await self._stream.receive(timeout_s=timeout_s)
        if frame is not None:
            # What is not read yet holds the other side back.
            await self._down.pass_through(len(frame))
        return frame

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        size = await self._stream.receive_into(target, timeout_s=timeout_s)
        if size is not None:
            await self._down.pass_through(size)
        return size

    async def finish(self, *, timeout_s: float) -> None:
        await self._stream.finish(timeout_s=timeout_s)

    def abort(self) -> None:
        self._stream.abort()

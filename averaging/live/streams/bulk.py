"""Bulk streams: one slice to a reducer, and the merged slice back on the same stream.

A stream opens with a header, which says for which round the bytes are; their number is never read
from the wire, both sides know it from the layout. ``averaging.live.streams.links`` opens and
accepts them.

``Uplink`` orders what a peer sends over a slow line: one transfer at a time. Transfers that share a
line all end late. Three homes at 1 Mbit/s have the bytes of several rounds under way at once: each
round then takes most of a cycle, so that the next one of its fragment begins while somebody is
still busy with it, and a home that has missed one fetches its replay over lines that are full. So
on a slow line replays go first, then the transfers of the oldest round.
docs/research/results-faults.md has the figures.

A transfer that takes much longer than its bytes need waits for its receiver and not for the line:
it lets the next one in. None waits for long, because its receiver gives up a silent stream.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from averaging.errors import BulkRefused
from averaging.live.streams.buffers import GrowingBytes
from averaging.rules.line_speed import LineSpeed
from dht.errors import HostClosed, StreamBroken
from dht.host import Stream
from dht.identity import PeerId

FIRST: Final = -math.inf
"""``since`` of a transfer that goes before all rounds."""

SMALL_BYTES: Final = 16 << 10
"""Transfers of at most so many bytes wait for no turn."""

WAIT_MAX_S: Final = 10.0
"""A transfer that has waited for so long is sent beside the others: half of the time after which
its receiver takes a silent stream for broken."""

LONGER_MAX: Final = 2.0
LATER_S: Final = 0.5
"""A turn ends after so many times as long as its bytes take, and so much later."""


_BESIDE_OTHERS: Final[AbstractAsyncContextManager[None]] = nullcontext()


class Uplink:
    """The turns of one peer's transfers, in all its rounds."""

    def __init__(self, slow_bytes_s: Callable[[], float] = lambda: 0.0) -> None:
        """``slow_bytes_s``: speed of a line that is slow; 0 for another one, which all share."""
        self._slow_bytes_s = slow_bytes_s
        self._has_turn: asyncio.Future[None] | None = None
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def turn(self, size: int, *, since: float) -> AbstractAsyncContextManager[None]:
        """Wait until ``size`` bytes may be sent. ``since``: when their round began here."""
        speed = self._slow_bytes_s()
        if size <= SMALL_BYTES or speed <= 0.0:
            return _BESIDE_OTHERS
        return self._turn(size, speed, since)

    @asynccontextmanager
    async def _turn(self, size: int, speed: float, since: float) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (since, next(self._numbers), mine))
        self._let_next_in()
        lapse: asyncio.TimerHandle | None = None
        try:
            await asyncio.wait((mine,), timeout=WAIT_MAX_S)
            if mine.done():
                lapse = loop.call_later(LONGER_MAX * size / speed + LATER_S, self._end, mine)
            yield
        finally:
            if lapse is not None:
                lapse.cancel()
            mine.cancel()
            self._end(mine)

    def _end(self, turn: asyncio.Future[None]) -> None:
        if self._has_turn is turn:
            self._has_turn = None
            self._let_next_in()

    def _let_next_in(self) -> None:
        while self._waiting and self._has_turn is None:
            _, _, turn = heappop(self._waiting)
            if not turn.done():  # else its sender did not wait for it
                self._has_turn = turn
                turn.set_result(None)


_GRANTED = 1
_REFUSED = 2
_RECEIVED = 3
_SIZE_BYTES = 4

HEADER_MAX_BYTES = 64 << 10
"""The first frame of a bulk stream: round, slice and the signed commit."""

REASON_MAX_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """Limits of links and bulk streams. Every one is per peer unless it says otherwise."""

    queue_max_messages: int = 256
    queue_max_bytes: int = 2 << 20
    heartbeat_s: float = 5.0
    """How often a link on which nothing was said lately says that it is alive."""
    silence_max_s: float = 16.0
    """A link on which nothing was heard for so long is broken; three heartbeats and a bit."""
    idle_max_s: float = 120.0
    """A link opened by this peer that is unused for so long is closed, unless it is kept."""
    received_per_s: float = 500.0
    received_burst: float = 1000.0
    """A peer that sends faster is read more slowly. It delays only itself."""
    piece_bytes: int = 512 << 10
    stall_max_s: float = 20.0
    """A bulk stream on which no piece moved for so long is broken."""


class Bulk:
    """One bulk stream, seen from either end, after its header.

    The opener sends its bytes with ``send``, waits with ``granted`` and reads
    the answer with ``receive_into``; the other side reads, calls ``received``, then ``grant``
    or ``refuse``, and sends its own. ``finish`` and ``finished`` end it. Behind the bytes of either
    side goes a frame with the claim of the peer that made them (``averaging.history.claims``).
    """

    def __init__(
        self,
        stream: Stream,
        settings: TransportSettings,
        *,
        up: LineSpeed,
        down: LineSpeed,
        uplink: Uplink,
    ) -> None:
        self.stream = stream
        self.sent_bytes = 0
        self.received_bytes = 0
        self._settings = settings
        self._up = up
        self._down = down
        self._uplink = uplink
        self._sending_since: float | None = None
        self._ended = False
        self._to_grant: bytes | None = None
        """The text of a grant that goes out with the answer's first bytes."""
        self.heard_at = asyncio.get_running_loop().time()
        """Time at which the other side had said all that it says before its bytes."""
        self.since = self.heard_at
        """Time at which the round whose bytes the stream carries began here."""

    @property
    def remote(self) -> PeerId:
        return self.stream.remote

    async def send(self, data: memoryview | bytes | bytearray) -> None:
        """Send all of ``data`` in pieces. It may be reused when this returns.

        Values of the model are a memoryview, and travel as memoryviews: in a simulation they may
        weigh more than other bytes (``dht.memory.stream``).
        """
        step = self._settings.piece_bytes
        try:
            for start in range(0, len(data), step):
                piece = data[start : start + step]
                async with self._uplink.turn(len(piece), since=self.since):
                    await self._say_granted()
                    if self._sending_since is None:
                        self._sending_since = asyncio.get_running_loop().time()
                    await self.stream.send(piece, timeout_s=self._settings.stall_max_s)
                self.sent_bytes += len(piece)
        except BaseException:
            self._measure_sent()
            raise

    async def receive_some(self, target: memoryview) -> int:
        """The next piece into the start of ``target``, which it must fit; returns its size."""
        size = await self.stream.receive_into(target, timeout_s=self._settings.stall_max_s)
        if not size:
            raise StreamBroken(self.remote, "truncated: an end where more was expected")
        self.received_bytes += size
        return size

    async def receive_into(self, target: memoryview) -> None:
        """Fill ``target`` exactly. Anything shorter or longer breaks the stream."""
        filled = 0
        while filled < len(target):
            filled += await self.receive_some(target[filled:])

    async def receive_growing(self, target: GrowingBytes) -> None:
        """``receive_into`` for one that others read behind."""
        before = target.filled
        try:
            while target.filled < len(target.data):
                target.grow(target.filled + await self.receive_some(target.data[target.filled :]))
        finally:
            now = asyncio.get_running_loop().time()
            self._down.transferred(
                self.remote, target.filled - before, began=self.heard_at, ended=now
            )

    async def send_frame(self, data: bytes) -> None:
        """Send something small whose size the other side does not know."""
        await self._say_granted()
        await self.stream.send(data, timeout_s=self._settings.stall_max_s)
        self.sent_bytes += len(data)

    async def receive_frame(self, size_max: int) -> bytes:
        """Receive a frame that ``send_frame`` sent."""
        frame = await self.stream.receive(timeout_s=self._settings.stall_max_s)
        if frame is None or len(frame) > size_max:
            raise StreamBroken(self.remote, f"no frame, or one over {size_max} bytes")
        self.received_bytes += len(frame)
        self.heard_at = asyncio.get_running_loop().time()
        return frame

    async def send_sized(self, data: bytes | memoryview) -> None:
        """Send something of any size, which the other side does not know."""
        await self.send_frame(len(data).to_bytes(_SIZE_BYTES, "big"))
        await self.send(data)

    async def receive_sized(
        self, size_max: int, room_for: Callable[[int], memoryview]
    ) -> memoryview:
        """Receive what ``send_sized`` sent into memory that ``room_for`` gives."""
        size = int.from_bytes(await self.receive_frame(_SIZE_BYTES), "big")
        if size > size_max:
            raise StreamBroken(self.remote, f"{size} bytes are announced; at most {size_max}")
        target = room_for(size)
        await self.receive_into(target)
        self.heard_at = asyncio.get_running_loop().time()
        return target

    async def received(self) -> None:
        """Say that all bytes are here: the other side's line can be measured by that, whether it
        ever answers requests or not."""
        await self.stream.send(bytes([_RECEIVED]), timeout_s=self._settings.stall_max_s)

    def grant(self, but: str = "") -> None:
        """Say that the answer follows. ``but``: why the upload could not be taken, if it could
        not.

        It is said when the answer's first bytes have their turn on this peer's line. The other side
        measures its line from this word on, and a wait for a full uplink would look like a slow
        downlink there.
        """
        self._to_grant = but.encode()[:REASON_MAX_BYTES]

    async def _say_granted(self) -> None:
        text, self._to_grant = self._to_grant, None
        if text is not None:
            await self.stream.send(bytes([_GRANTED]), text, timeout_s=self._settings.stall_max_s)

    async def granted(self, *, timeout_s: float) -> str:
        """Wait until the other side grants; returns its ``but``. Raises ``BulkRefused``."""
        frame = await self.stream.receive(timeout_s=timeout_s)
        if frame == bytes([_RECEIVED]):
            self._measure_sent()
            frame = await self.stream.receive(timeout_s=timeout_s)
        self.heard_at = asyncio.get_running_loop().time()
        if frame and len(frame) <= 1 + REASON_MAX_BYTES:
            text = frame[1:].decode("utf-8", "replace")
            if frame[0] == _GRANTED:
                return text
            if frame[0] == _REFUSED:
                raise BulkRefused(self.remote, text)
        raise StreamBroken(self.remote, "neither granted nor refused")

    async def refuse(self, reason: str) -> None:
        """Say why not, and let the other side read it before the stream goes.

        On a slow line the deadline may come when all has been said and is not acknowledged yet:
        there is nothing to refuse any more, and the stream ends.
        """
        if self._ended:
            self.abort()
            return
        text = reason.encode()[:REASON_MAX_BYTES]
        with suppress(StreamBroken, HostClosed, TimeoutError):
            await self.stream.send(bytes([_REFUSED]), text, timeout_s=2.0)
            # Closing at once would throw the reason away along with what is still on the way to
            # us, so swallow a little of that; the other side hangs up as soon as it has read.
            swallowed = 0
            async with asyncio.timeout(2.0):
                while swallowed < 8 << 20:
                    frame = await self.stream.receive(timeout_s=2.0)
                    if frame is None:
                        break
                    swallowed += len(frame)
        self.abort()

    async def finish(self) -> None:
        """Say END and wait for the acknowledgement: then all has been on the line."""
        self._ended = True
        try:
            await self.stream.finish(timeout_s=self._settings.stall_max_s)
        finally:
            self._measure_sent()

    def _measure_sent(self) -> None:
        if self._sending_since is not None:
            now = asyncio.get_running_loop().time()
            self._up.transferred(self.remote, self.sent_bytes, began=self._sending_since, ended=now)
            self._sending_since = None

    async def finished(self) -> None:
        """Wait for the other side's END. More bytes instead break the stream."""
        frame = await self.stream.receive(timeout_s=self._settings.stall_max_s)
        if frame is not None:
            raise StreamBroken(self.remote, f"{len(frame)} bytes more than the layout says")

    def abort(self) -> None:
        self.stream.abort()

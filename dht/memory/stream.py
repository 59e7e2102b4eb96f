"""A stream between two hosts in memory: frames with a window, END and ACK.

Each side is a ``MemoryStream``; its actions reach the other side as messages on the simulated
network, in order. Only ``dht.memory.host`` makes streams.

Where a small model stands for a large one, a stream has a weight: a frame that is a memoryview, as
those of a model's values are, stands for so many times as many bytes, and for so many frames, each
of which has the time of one. All other frames are what they would be beside the large model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from dht.errors import StreamBroken
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.memory.network import SMALL_MESSAGE_BYTES

WINDOW_BYTES = 4 * FRAME_MAX_BYTES
"""Limit of bytes that are sent and not yet taken by the other side's reader."""

CREDIT_BYTES = FRAME_MAX_BYTES
"""A reader reports what it has taken when it is so much, as in yamux: a sender whose window is full
has at least as much on the way to it, and small messages have no answer each."""

HEADER_BYTES = 5

Wire = Callable[[int, Callable[[], object]], None]
"""Sends a message of a size, and calls the function when it arrives at the other side."""

_END = None
_WAITS = _RECEIVING, _SENDING, _FINISHING = "receiving", "sending", "waiting for the ACK"


class MemoryStream:
    """``dht.host.Stream`` on the simulated network."""

    relayed = False
    saved_bytes = 0, 0

    def __init__(
        self,
        remote: PeerId,
        in_order: Wire,
        beside: Wire,
        *,
        weight: float = 1.0,
    ) -> None:
        self.other: MemoryStream
        """The end at the other side, as soon as both are made."""

        self._weight = weight
        self.remote = remote
        self._in_order = in_order
        self._beside = beside
        self.on_over: list[Callable[[], object]] = []
        """Called once, when this side is finished or broken."""

        self._inbox: deque[tuple[bytes, int] | None] = deque()
        """Frames, each with its size on the line."""
        self._unacknowledged_bytes = 0
        self._taken_bytes = 0
        """Taken by the reader, and not yet reported to the sender."""
        self._end_sent = False
        self._ack_received = False
        self._ack_sent = False
        self._lost: str | None = None
        """Reason why nothing more arrives. Frames that arrived before can still be received."""

        self._aborted = False
        self._outgoing: list[Callable[[], object]] = []
        """The message that is sent at this moment."""
        self._outgoing_bytes = 0
        self._waits: dict[str, asyncio.Future[bool]] = {}
        """Tasks that wait for something of ``_WAITS``, one for each."""

    @property
    def _complete(self) -> bool:
        return self._ack_received and self._ack_sent

    # --- calls of the user -----------------------------------------------------------------

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        frame = b"".join(parts)
        if len(frame) > FRAME_MAX_BYTES:
            raise ValueError(f"frame has {len(frame)} bytes; at most {FRAME_MAX_BYTES}")
        if self._end_sent:
            raise ValueError("nothing can be sent after finish()")
        size = self._size_of(parts)
        self._raise_if_over()
        while not self._has_room(size):
            await self._wait(_SENDING, timeout_s)
            self._raise_if_over()
        self._put(frame, size)

    def send_now(self, *parts: bytes) -> bool:
        frame = b"".join(parts)
        size = len(frame) + HEADER_BYTES
        if self._end_sent or self._lost is not None or not self._has_room(size):
            return False
        self._put(frame, size)
        return True

    def _size_of(self, parts: tuple[bytes | bytearray | memoryview, ...]) -> int:
        """The size of a frame on the line."""
        if self._weight == 1.0:
            return sum(map(len, parts)) + HEADER_BYTES
        weighed = (len(p) * (self._weight if isinstance(p, memoryview) else 1.0) for p in parts)
        return int(sum(weighed)) + HEADER_BYTES

    def _has_room(self, size: int) -> bool:
        # One frame that stands for many goes as soon as the first of them would.
        return self._unacknowledged_bytes + min(size, FRAME_MAX_BYTES) <= WINDOW_BYTES

    def _put(self, frame: bytes, size: int) -> None:
        self._unacknowledged_bytes += size
        self._post(size, partial(self.other._arrived, (frame, size)))

    def _post(self, size_bytes: int, deliver: Callable[[], object]) -> None:
        """Send in order. What is small and said at one moment travels as one message, as it would
        in the buffer of a socket: a stream's header, its bytes and the claim behind them."""
        if size_bytes > SMALL_MESSAGE_BYTES:
            self._flush()
            self._in_order(size_bytes, deliver)
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(deliver)
        self._outgoing_bytes += size_bytes

    def _flush(self) -> None:
        if not self._outgoing:
            return
        together, size_bytes = self._outgoing, self._outgoing_bytes
        self._outgoing, self._outgoing_bytes = [], 0
        self._in_order(
            size_bytes, together[0] if len(together) == 1 else partial(_call_all, together)
        )

    async def receive(self, *, timeout_s: float) -> bytes | None:
        while not self._inbox:
            self._raise_if_over()
            await self._wait(_RECEIVING, timeout_s)
        if self._aborted:
            self._raise_if_over()
        if self._inbox[0] is _END:  # it stays there: asking again gives the same answer
            if not self._ack_sent:
                self._ack_sent = True
                self._post(HEADER_BYTES, self.other._acknowledged)
                self._note_if_complete()
            return None
        arrived = self._inbox.popleft()
        assert arrived is not None
        frame, size = arrived
        self._taken_bytes += size
        if self._taken_bytes >= CREDIT_BYTES and self._lost is None:
            self._beside(HEADER_BYTES, partial(self.other._credited, self._taken_bytes))
            self._taken_bytes = 0
        return frame

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        view = target.cast("B")
        frame = await self.receive(timeout_s=timeout_s)
        if frame is None:
            return None
        if len(frame) > len(view):
            raise self._break(f"a frame of {len(frame)} bytes where {len(view)} were expected")
        view[: len(frame)] = frame
        return len(frame)

    async def finish(self, *, timeout_s: float) -> None:
        if self._ack_received:
            return
        self._raise_if_over()
        if not self._end_sent:
            self._end_sent = True
            self._post(HEADER_BYTES, partial(self.other._arrived, _END))
        await self._wait(_FINISHING, timeout_s)
        if not self._ack_received:
            self._raise_if_over()

    def abort(self) -> None:
        self._drop("it was aborted here")

    def cut(self) -> None:
        self._drop("it was cut here")

    # --- messages from the other side ------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Break the stream, because the other side or the connection is gone."""
        if self._lost is None:
            self._lost = reason
            self._wake()
            self._over()

    def _arrived(self, frame: tuple[bytes, int] | None) -> None:
        if self._lost is None:
            self._inbox.append(frame)
            _settle(self._waits.get(_RECEIVING), True)

    def _acknowledged(self) -> None:
        if self._lost is None:
            self._ack_received = True
            _settle(self._waits.get(_FINISHING), True)
            self._note_if_complete()

    def _credited(self, size_bytes: int) -> None:
        self._unacknowledged_bytes -= size_bytes
        _settle(self._waits.get(_SENDING), True)

    def _note_if_complete(self) -> None:
        if self._complete:
            self._over()

    def _over(self) -> None:
        callbacks, self.on_over = self.on_over, []
        for callback in callbacks:
            callback()

    async def _wait(self, what: str, timeout_s: float) -> None:
        assert what not in self._waits, f"two tasks wait on one stream: {what}"
        loop = asyncio.get_running_loop()
        future = self._waits[what] = loop.create_future()
        # A timer costs less than asyncio.timeout, and streams wait thousands of times.
        timeout_s *= self._weight
        timer = loop.call_later(timeout_s, _settle, future, False)
        try:
            came = await future
        finally:
            timer.cancel()
            del self._waits[what]
        if not came:
            raise self._break(f"{what}: silence for {timeout_s:g} s")

    def _break(self, reason: str) -> StreamBroken:
        self._drop(reason)
        return StreamBroken(self.remote, self._lost or reason)

    def _drop(self, reason: str) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._inbox.clear()
        if self._lost is None:
            self._lost = reason
            if not self._complete and not self.other._aborted:  # else there is nobody to tell
                self._post(HEADER_BYTES, partial(self.other.lose, "the other side dropped it"))
        self._wake()
        self._over()

    def _wake(self) -> None:
        for what in _WAITS:
            _settle(self._waits.get(what), True)

    def _raise_if_over(self) -> None:
        if self._lost is not None:
            raise StreamBroken(self.remote, self._lost)


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _settle(future: asyncio.Future[bool] | None, came: bool) -> None:
    """End a wait, if there is one. ``came``: something has happened, and it was not in vain."""
    if future is not None and not future.done():
        future.set_result(came)

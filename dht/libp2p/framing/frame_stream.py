"""Frames over a byte stream: a libp2p stream, which the daemon hands us as a Unix socket, or a
connection of our own (``dht.libp2p.lane.lane``).

A frame is ``u32 length, u8 type`` and the payload (big-endian). DATA carries the caller's bytes.
END says that no more frames follow, and is answered by ACK once the other side's reader has taken
everything before it. Nothing else means complete: the daemon closes both directions when either
one ends, over some transports it truncates the stream, and end-of-file looks like success.

A libp2p stream ends with its socket. A connection of our own carries one stream after another:
DONE, sent by the side that served a stream which both sides have ended, says that it is ready for
the next one. The daemon encrypts its streams; on our own connections each frame is sealed
(``dht.libp2p.framing.sealing``).

On lines through the internet large frames are packed (``dht.libp2p.framing.packing``).

Bytes are read from the socket directly into the caller's buffer, and written from the caller's
memory: beside the daemon's own work this costs next to nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Protocol, cast

from dht.errors import StreamBroken
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.libp2p.framing.packing import PACK_FROM_BYTES, in_turns, packing, unpacking
from dht.libp2p.framing.sealing import TAG_BYTES, BadSeal, Seals

HEADER = struct.Struct(">IB")

AHEAD_BYTES = 64 * 1024
"""Limit of bytes read before a receiver asks; beyond it the socket holds up the sender."""

KEPT_FRAME_BYTES = 64
"""Memory of a frame that is kept, besides its content."""

QUEUE_MAX_BYTES = 2 * FRAME_MAX_BYTES
"""Limit of frames kept while ``finish`` waits for an ACK behind them and no task receives."""

FIRST_WRITE_BYTES = 32 * 1024
"""Header and start of a frame are written at once, in the size in which the daemon reads."""

PATIENCE = 16
"""Limit for a frame that arrives slowly, as a multiple of its timeout."""

LINGER_S = 2.0
"""Time that the sender of the last ACK waits for the other side to close first."""

PREAMBLE_MAX_BYTES = 64 * 1024
PREAMBLE_LENGTH_MAX_BYTES = 5

SEALED_APART_BYTES = 4096
"""Frames up to this size are sealed in memory of their own: they may be written while a larger
frame, for which there is one buffer, is still being sent."""

ABORTED = "it was aborted here"


class FrameType(IntEnum):
    DATA = 0
    END = 1
    ACK = 2
    DONE = 3
    PREAMBLE = 4
    PACKED = 5
    """Like DATA, and packed. On sealed connections only."""


class Carrier(Protocol):
    """A connection of our own, which outlives the streams on it."""

    @property
    def dialled(self) -> bool:
        """Say whether this side dialled. The other side serves the streams, and sends DONE."""
        ...

    def free(self, stream: FrameStream) -> None:
        """Take the connection back: its stream is over and left no bytes behind."""
        ...

    def lost(self, reason: str) -> None:
        """Take note that the connection is gone."""
        ...


class _Next(Enum):
    """The part of the incoming bytes that is read next."""

    PREAMBLE = "preamble"
    """A message that introduces the stream: from the daemon a protobuf behind a varint length, on
    a sealed connection a frame."""

    HEADER = "header"
    PAYLOAD = "payload"


_END = object()
"""Stands in the queue where END was received."""


class _PackedFrame(bytearray):
    """A frame as it was received, which is unpacked when somebody takes it."""


class FrameStream(asyncio.BufferedProtocol):
    """``dht.host.Stream`` on a socket of the daemon, or on a ``Carrier``."""

    def __init__(
        self,
        on_preamble: Callable[[FrameStream, bytes], None],
        *,
        carrier: Carrier | None = None,
        preamble_max_bytes: int = PREAMBLE_MAX_BYTES - 8,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_preamble = on_preamble
        self._preamble_max_bytes = preamble_max_bytes
        self._carrier = carrier
        self.seals: Seals | None = None
        """The cipher states of the connection, which earlier streams have used as well."""
        self._sealing = bytearray()
        self._opening = bytearray()
        """Buffers for one sealed frame in each direction."""

        self._transport: asyncio.Transport | None = None
        self.remote = PeerId("")
        self.relayed = False
        self.packs = False
        """Pack large frames that get smaller by it. Only a carrier's other side reads them."""

        self.on_closed: Callable[[], None] | None = None
        """Called once the stream holds no connection any more."""

        self._next = _Next.PREAMBLE
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = 0
        self._end = 0
        self._paused = False
        self._target: memoryview | None = None  # destination of a frame's payload
        self._content: memoryview | None = None  # destination of the opened content, if sealed
        self._kept: bytearray | None = None  # owner of that memory, unless the caller owns it
        self._for_queue = False  # the frame being read was begun while no task received
        self._filled = 0
        self._packed = False  # the frame being read is packed
        self._direct = False  # the last get_buffer returned the target itself
        self._received_bytes = 0
        self._saved_sent = self._saved_received = 0

        self._receiver: asyncio.Future[object] | None = None
        self._receiver_target: memoryview | None = None
        self._queue: deque[object] = deque()
        self._queued_bytes = 0
        self._end_received = False
        self._end_taken = False
        self._ack_sent = False

        self._drained: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._acked: asyncio.Future[None] | None = None
        self._end_sent = False
        self._end_sent_after_ack = False
        self._ack_received = False

        self._data_sent = False
        self._broken: str | None = None
        """Reason why nothing more is sent or received, not even from the buffer."""

        self._lost: str | None = None
        """Reason why the transport is gone. Frames that arrived before can still be received."""

        self._dropped = False  # the caller does not use the stream any more
        self._done = False
        """DONE was received: nothing more will come."""

        self._parting: asyncio.TimerHandle | None = None
        """Time limit for DONE after the caller has dropped the stream."""

    def introduce(self, peer: PeerId, *, relayed: bool) -> None:
        """Set the authenticated peer at the other end, before the caller sees the stream."""
        self.remote = peer
        self.relayed = relayed

    @property
    def saved_bytes(self) -> tuple[int, int]:
        return self._saved_sent, self._saved_received

    # --- calls of the user -----------------------------------------------------------------

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        views = [memoryview(part) for part in parts]
        size = sum(view.nbytes for view in views)
        if size > FRAME_MAX_BYTES:
            raise ValueError(f"frame has {size} bytes; at most {FRAME_MAX_BYTES}")
        if self._end_sent:
            raise ValueError("nothing can be sent after finish()")
        self._data_sent = True
        packs = self.packs and size >= PACK_FROM_BYTES
        content = await in_turns(packing(views)) if packs else None
        if content is not None:
            self._saved_sent += size - len(content)
            self._write(FrameType.PACKED, len(content), [memoryview(content)])
        else:
            self._write(FrameType.DATA, size, [v.cast("B") for v in views if v.nbytes])
        await self._drain(timeout_s)

    def send_now(self, *parts: bytes) -> bool:
        size = sum(map(len, parts))
        over = self._end_sent or self._over_because() is not None
        if over or self._writing_paused or size >= PACK_FROM_BYTES:
            return False
        self._data_sent = True
        self._write(FrameType.DATA, size, [memoryview(part) for part in parts if part])
        return True

    async def receive(self, *, timeout_s: float) -> bytes | None:
        frame = await self._receive(None, timeout_s)
        if frame is _END:
            return None
        assert isinstance(frame, bytes | bytearray)
        return bytes(frame)

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        view = target.cast("B")
        frame = await self._receive(view, timeout_s)
        if frame is _END:
            return None
        if isinstance(frame, int):
            return frame
        assert isinstance(frame, bytes | bytearray)
        if len(frame) > len(view):
            raise self._break(f"a frame of {len(frame)} bytes where {len(view)} were expected")
        view[: len(frame)] = frame
        return len(frame)

    async def finish(self, *, timeout_s: float) -> None:
        if not self._end_sent:
            self._write(FrameType.END, 0, [])
            self._end_sent = True
            self._end_sent_after_ack = self._ack_sent
        self._acked = self._loop.create_future()
        try:
            self._parse()  # frames in front of the ACK are now queued if no task receives
            if self._ack_received:
                return
            self._raise_if_over()
            self._resume_reading()
            async with asyncio.timeout(timeout_s):
                await self._acked
        except TimeoutError:
            raise self._break(f"END was not acknowledged within {timeout_s:g} s") from None
        finally:
            self._acked = None

    def abort(self) -> None:
        if self._dropped:
            return
        self._dropped = True
        was_whole = self._broken is None and (self._end_sent or not self._data_sent)
        if self._carrier is not None and self._is_over():
            self._part(self._carrier)
            return
        self._target = self._content = self._kept = None  # the caller may reuse its memory
        self._next = _Next.HEADER
        self._broken = self._broken or ABORTED
        self._wake(self._broken)
        if self._transport is None or self._lost is not None:
            return
        if was_whole and self._ack_sent and not (self._end_sent_after_ack and self._ack_received):
            # Our ACK may still be under way, and closing now could cut it off: the other side,
            # which has nothing left to wait for, closes first.
            self._resume_reading()
            self._loop.call_later(LINGER_S, self._transport.abort)
        elif was_whole and self._ack_received:
            self._transport.close()
        else:
            self._transport.abort()

    def cut(self) -> None:
        """Drop the stream so that it breaks for the other side and does not end."""
        self._break("it was cut here")

    # --- calls of a carrier ----------------------------------------------------------------

    @property
    def socket(self) -> socket.socket | None:
        """The socket of the connection, for questions to the kernel; ``None`` without one."""
        if self._transport is None or self._lost is not None:
            return None
        found: socket.socket | None = self._transport.get_extra_info("socket")
        return found

    @property
    def remote_ip(self) -> str:
        """IP address of the other end; empty without one."""
        found = None if self._transport is None else self._transport.get_extra_info("peername")
        return found[0] if isinstance(found, tuple) else ""

    def _is_over(self) -> bool:
        """Say whether the stream is complete in each direction used, as this side sees it.

        If the other side still sends a frame, the connection breaks: it is no preamble.
        """
        return (
            self._broken is None
            and self._lost is None
            and self._next is _Next.HEADER
            and self._receiver is None
            and self._drained is None
            and self._start == self._end
            and not self._queue
            and (self._end_sent or self._end_received)
            and (self._ack_received or not self._end_sent)
            and (self._ack_sent or not self._end_received)
        )

    def _part(self, carrier: Carrier) -> None:
        """Give the connection back, once the other side is done with this stream."""
        if not carrier.dialled:
            self._put(FrameType.DONE, 0, [])
            carrier.free(self)
        elif self._done:
            carrier.free(self)
        else:
            assert self._transport is not None
            self._parting = self._loop.call_later(LINGER_S, self._transport.abort)
            self._parse()
            self._resume_reading()

    def pass_on(self, successor: FrameStream) -> None:
        """Hand the connection over to another stream."""
        assert self._transport is not None and self._start == self._end
        if self._parting is not None:
            self._parting.cancel()
        successor._paused, successor._writing_paused = self._paused, self._writing_paused
        successor.seals = self.seals
        successor._transport, self._transport = self._transport, None
        successor._transport.set_protocol(successor)
        self._lost = "its connection carries another stream"
        if self.on_closed is not None:
            self.on_closed()
        successor._resume_reading()

    def expect_preamble(self) -> None:
        """Expect another preamble before the first frame."""
        self._next = _Next.PREAMBLE

    # --- sending ---------------------------------------------------------------------------

    def write_raw(self, data: bytes) -> None:
        """Write bytes without a frame: to the daemon itself, or before the connection is sealed."""
        if self._transport is not None and self._lost is None:
            self._transport.write(data)

    def write_preamble(self, message: bytes) -> None:
        """Send a sealed preamble. Does nothing if the connection is gone: ``lost`` reports that."""
        if self._transport is not None and self._lost is None:
            self._put(FrameType.PREAMBLE, len(message), [memoryview(message)])

    def _write(self, kind: FrameType, size: int, views: list[memoryview]) -> None:
        self._raise_if_over()
        self._put(kind, size, views)

    def _put(self, kind: FrameType, size: int, views: list[memoryview]) -> None:
        assert self._transport is not None
        if self.seals is not None:
            self._transport.write(self._sealed(self.seals, kind, size, views))
            return
        head = bytearray(HEADER.pack(size, kind))
        while views and len(head) < FIRST_WRITE_BYTES:
            first = views[0][: FIRST_WRITE_BYTES - len(head)]
            head += first
            if len(first) == len(views[0]):
                views.pop(0)
            else:
                views[0] = views[0][len(first) :]
        self._transport.write(head)
        for view in views:
            self._transport.write(view)

    def _sealed(
        self, seals: Seals, kind: FrameType, size: int, views: list[memoryview]
    ) -> bytes | memoryview:
        header = HEADER.pack(size, kind)
        if size <= SEALED_APART_BYTES:
            return header + seals.mine.close(header, b"".join(views))
        room = HEADER.size + size + TAG_BYTES
        if len(self._sealing) < room:
            self._sealing = bytearray(room)
        whole = memoryview(self._sealing)[:room]
        whole[: HEADER.size] = header
        content = views[0] if len(views) == 1 else b"".join(views)
        seals.mine.close_into(header, content, whole[HEADER.size :])
        return whole

    async def _drain(self, timeout_s: float) -> None:
        """Wait until the kernel has everything: then the caller may reuse its memory."""
        if self._writing_paused and self._broken is None and self._lost is None:
            transport = self._transport
            assert transport is not None
            self._drained = self._loop.create_future()
            try:
                await self._patiently(
                    self._drained, timeout_s, transport.get_write_buffer_size, "sending"
                )
            except asyncio.CancelledError:
                self._break("sending was cancelled")  # half a frame is under way
                raise
            finally:
                self._drained = None
        self._raise_if_over()

    def _over_because(self) -> str | None:
        reason = self._broken or self._lost or (ABORTED if self._dropped else None)
        return "it ended without END" if reason is None and self._done else reason

    def _raise_if_over(self) -> None:
        if (reason := self._over_because()) is not None:
            raise StreamBroken(self.remote, reason)

    async def _patiently(
        self,
        future: asyncio.Future[object] | asyncio.Future[None],
        timeout_s: float,
        progress: Callable[[], int],
        what: str,
    ) -> object:
        """Wait for the future while ``progress`` keeps changing; else break the stream."""
        give_up_at = self._loop.time() + PATIENCE * timeout_s
        seen = progress()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal seen, timer
            now_seen = progress()
            if now_seen == seen:
                self._break(f"{what}: silence for {timeout_s:g} s")
            elif self._loop.time() >= give_up_at:
                self._break(f"{what}: one frame takes over {PATIENCE * timeout_s:g} s")
            else:
                seen = now_seen
                timer = self._loop.call_later(timeout_s, check)

        timer = self._loop.call_later(timeout_s, check)
        try:
            return await future
        finally:
            timer.cancel()

    # --- receiving -------------------------------------------------------------------------

    async def _receive(self, target: memoryview | None, timeout_s: float) -> object:
        assert self._receiver is None, "two tasks receive from one stream"
        if self._end_taken:
            return _END
        if self._queue:
            frame = self._queue.popleft()
            if isinstance(frame, bytearray):
                self._queued_bytes -= len(frame) + KEPT_FRAME_BYTES
            self._parse()
            self._resume_reading()
        else:
            frame = await self._next_frame(target, timeout_s)
        if frame is _END:
            self._end_taken = True
            self._acknowledge()
        return await self._unpacked(frame) if isinstance(frame, _PackedFrame) else frame

    async def _unpacked(self, frame: _PackedFrame) -> bytearray:
        try:
            content = await in_turns(unpacking(frame))
        except ValueError as error:
            raise self._break(str(error)) from None
        except asyncio.CancelledError:
            self._break("receiving was cancelled")  # a whole frame is lost
            raise
        self._saved_received += len(content) - len(frame)
        return content

    async def _next_frame(self, target: memoryview | None, timeout_s: float) -> object:
        receiver = self._receiver = self._loop.create_future()
        self._receiver_target = target
        try:
            self._parse()
            if not receiver.done():
                self._raise_if_over()
                self._resume_reading()
                await self._patiently(
                    receiver, timeout_s, lambda: self._received_bytes, "receiving"
                )
            return receiver.result()
        except asyncio.CancelledError:
            if self._next is _Next.PAYLOAD or (receiver.done() and not receiver.cancelled()):
                self._break("receiving was cancelled")  # half a frame, or a whole one, is lost
            raise
        finally:
            self._receiver = self._receiver_target = None

    def _acknowledge(self) -> None:
        """Send ACK for END, as long as the connection is there."""
        if not self._ack_sent and self._lost is None and self._broken is None:
            self._ack_sent = True
            self._write(FrameType.ACK, 0, [])

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None and self._start == self._end:
            self._direct = True
            return self._target[self._filled :]
        self._direct = False
        if self._end == AHEAD_BYTES:
            self._make_room()
        return self._ahead[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received_bytes += nbytes
        if self._direct:
            self._filled += nbytes
            self._complete_if_full()
        else:
            self._end += nbytes
        self._parse()

    def _make_room(self) -> None:
        rest = bytes(self._ahead[self._start : self._end])
        self._ahead[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _parse(self) -> None:
        """Process as many of the bytes read ahead as possible."""
        if self._dropped and self._parting is None:
            self._start = self._end = 0
            return
        while self._broken is None:
            if self._next is _Next.PREAMBLE:
                taken = self._take_preamble()
            elif self._next is _Next.HEADER:
                taken = self._take_header()
            else:
                taken = self._take_payload()
            if not taken:
                break
        if self._start == self._end:
            self._start = self._end = 0
        if self._end - self._start > AHEAD_BYTES // 2 and not self._wanted():
            self._pause_reading()

    def _wanted(self) -> bool:
        return (
            self._next is not _Next.HEADER
            or self._parting is not None
            or (self._receiver is not None and not self._receiver.done())
        )

    def _take_preamble(self) -> bool:
        if self.seals is not None:
            return self._take_sealed_preamble(self.seals)
        size = shift = 0
        until = self._start + PREAMBLE_LENGTH_MAX_BYTES
        for index in range(self._start, min(self._end, until)):
            byte = self._ahead[index]
            size |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        else:
            if self._end >= until:
                self._break("its preamble has no readable length")
            return False
        if size > self._preamble_max_bytes:
            self._break(f"its preamble has {size} bytes; at most {self._preamble_max_bytes}")
            return False
        if self._end < index + 1 + size:
            return False
        message = bytes(self._ahead[index + 1 : index + 1 + size])
        self._start = index + 1 + size
        self._next = _Next.HEADER
        self._on_preamble(self, message)
        return True

    def _take_sealed_preamble(self, seals: Seals) -> bool:
        if self._end - self._start < HEADER.size:
            return False
        size, kind = HEADER.unpack_from(self._ahead, self._start)
        if kind != FrameType.PREAMBLE or size > self._preamble_max_bytes:
            self._break(f"a frame of type {kind} and {size} bytes instead of a preamble")
            return False
        if self._end - self._start < HEADER.size + size + TAG_BYTES:
            return False
        message = bytearray(size)
        if not self._take_small(seals, memoryview(message)):
            return False
        self._next = _Next.HEADER
        self._on_preamble(self, bytes(message))
        return True

    def _take_small(self, seals: Seals, content: memoryview) -> bool:
        """Open a sealed frame that was read ahead in full, or break the stream."""
        at = self._start + HEADER.size
        header = bytes(self._ahead[self._start : at])
        self._start = at + len(content) + TAG_BYTES
        return self._opens(seals, header, self._ahead[at : self._start], content)

    def _opens(self, seals: Seals, header: bytes, sealed: memoryview, content: memoryview) -> bool:
        try:
            seals.theirs.open_into(header, sealed, content)
        except BadSeal:
            self._break("a frame was not sealed by the other side, or is not the next one")
            return False
        return True

    def _take_header(self) -> bool:
        if self._end - self._start < HEADER.size:
            return False
        size, kind = HEADER.unpack_from(self._ahead, self._start)
        if kind == FrameType.DONE and self._carrier is not None and self._carrier.dialled:
            return self._take_done(self._carrier, size)
        if self._parting is not None:
            self._break(f"a frame of type {kind} after the end of the stream")
            return False
        if kind == FrameType.ACK:
            return self._take_ack(size)
        self._packed = kind == FrameType.PACKED and self.seals is not None
        known = self._packed or kind in (FrameType.DATA, FrameType.END)
        if not known or self._end_received:
            self._break(f"a frame of type {kind}{' after END' if self._end_received else ''}")
            return False
        if size > (0 if kind == FrameType.END else FRAME_MAX_BYTES):
            self._break(f"a frame of {size} bytes is announced; at most {FRAME_MAX_BYTES}")
            return False
        return self._take_end() if kind == FrameType.END else self._begin_frame(size)

    def _take_ack(self, size: int) -> bool:
        if size or not self._end_sent or self._ack_received:
            self._break("an ACK without an END")
            return False
        if not self._take_word():
            return False
        self._ack_received = True
        if self._acked is not None and not self._acked.done():
            self._acked.set_result(None)
        return True

    def _take_end(self) -> bool:
        if not self._take_word():
            return False
        self._end_received = True
        self._deliver(_END)
        return True

    def _take_done(self, carrier: Carrier, size: int) -> bool:
        if size or self._done:
            self._break("DONE with content, or twice")
            return False
        if not self._take_word():
            return False
        if self._start != self._end:
            self._break("bytes after DONE")
            return False
        self._done = True
        if self._parting is not None:
            carrier.free(self)
        else:
            self._wake("it ended without END")
        return False

    def _take_word(self) -> bool:
        """Take a frame without content, if it has arrived in full and is genuine."""
        if self.seals is None:
            self._start += HEADER.size
            return True
        if self._end - self._start < HEADER.size + TAG_BYTES:
            return False
        return self._take_small(self.seals, memoryview(bytearray()))

    def _begin_frame(self, size: int) -> bool:
        """Choose the memory for a frame: the receiver's, our own, or none yet."""
        if self._receiver is not None and not self._receiver.done():
            place = self._receiver_target
            if place is not None and size > len(place):
                self._break(f"a frame of {size} bytes where {len(place)} were expected")
                return False
            if place is None or self._packed:
                self._keep(size)
            else:
                self._kept = None
                self._target = place[:size]
        elif self._acked is not None and self._queued_bytes + size <= QUEUE_MAX_BYTES:
            self._keep(size)
            self._for_queue = True
            self._queued_bytes += size + KEPT_FRAME_BYTES
        else:
            return False
        if self.seals is not None:
            if len(self._opening) < size + TAG_BYTES:
                self._opening = bytearray(size + TAG_BYTES)
            self._content = self._target
            self._target = memoryview(self._opening)[: size + TAG_BYTES]
        self._start += HEADER.size
        self._filled = 0
        self._next = _Next.PAYLOAD
        return True

    def _keep(self, size: int) -> None:
        """Read a frame into memory of our own."""
        self._kept = _PackedFrame(size) if self._packed else bytearray(size)
        self._target = memoryview(self._kept)

    def _take_payload(self) -> bool:
        assert self._target is not None
        count = min(self._end - self._start, len(self._target) - self._filled)
        self._target[self._filled : self._filled + count] = self._ahead[
            self._start : self._start + count
        ]
        self._start += count
        self._filled += count
        return self._complete_if_full()

    def _complete_if_full(self) -> bool:
        if self._target is None or self._filled < len(self._target):
            return False
        size = self._filled
        if self.seals is not None:
            assert self._content is not None
            size = len(self._content)
            kind = FrameType.PACKED if self._packed else FrameType.DATA
            header = HEADER.pack(size, kind)
            if not self._opens(self.seals, header, self._target, self._content):
                return False
        frame: object = size if self._kept is None else self._kept
        self._target = self._content = self._kept = None
        self._next = _Next.HEADER
        self._deliver(frame)
        return True

    def _deliver(self, frame: object) -> None:
        if self._receiver is not None and not self._receiver.done():
            if self._for_queue and isinstance(frame, bytearray):
                self._queued_bytes -= len(frame) + KEPT_FRAME_BYTES
            self._receiver.set_result(frame)
        else:
            self._queue.append(frame)
        self._for_queue = False

    # --- calls of the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Zero: "drained" must mean that no byte of the caller's memory is still needed.
        self._transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def eof_received(self) -> bool:
        return False  # closes the transport: the daemon has closed both directions

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = "it ended without END" if error is None else f"it was cut: {error}"
        self._wake(self._lost)
        if self._parting is not None:
            self._parting.cancel()
        if self.on_closed is not None:
            self.on_closed()
        if self._carrier is not None:
            self._carrier.lost(self._broken or self._lost)

    def _pause_reading(self) -> None:
        if not self._paused and self._transport is not None and self._lost is None:
            self._paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused and self._transport is not None and self._lost is None:
            self._paused = False
            self._transport.resume_reading()

    def _break(self, reason: str) -> StreamBroken:
        """Drop the stream, wake all waiting tasks, and return the error to raise."""
        self._broken = self._broken or reason
        self._wake(self._broken)
        if self._transport is not None and self._lost is None:
            self._transport.abort()
        return StreamBroken(self.remote, self._broken)

    def _wake(self, reason: str) -> None:
        for future in (self._receiver, self._drained, self._acked):
            if future is not None and not future.done():
                future.set_exception(StreamBroken(self.remote, reason))

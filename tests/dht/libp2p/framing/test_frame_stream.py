"""The framing, on a plain Unix socket in the place of the daemon: every way it can go wrong."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dht.errors import StreamBroken
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.libp2p.framing.frame_stream import (
    AHEAD_BYTES,
    HEADER,
    KEPT_FRAME_BYTES,
    QUEUE_MAX_BYTES,
    FrameStream,
    FrameType,
)
from tests.integration.loopback import WAIT_S, run

PREAMBLE = b"\x00"  # an introduction of no bytes
END = HEADER.pack(0, FrameType.END)
ACK = HEADER.pack(0, FrameType.ACK)


def data(payload: bytes) -> bytes:
    return HEADER.pack(len(payload), FrameType.DATA) + payload


async def open_stream(end: socket.socket) -> FrameStream:
    loop = asyncio.get_running_loop()
    introduced = loop.create_future()
    end.setblocking(False)
    _, stream = await loop.create_unix_connection(
        lambda: FrameStream(lambda stream, message: introduced.set_result(message)), sock=end
    )
    assert await introduced == b""
    stream.introduce(PeerId("other"), relayed=False)
    return stream


@asynccontextmanager
async def against_raw() -> AsyncIterator[tuple[FrameStream, socket.socket]]:
    """A stream, and the bare socket of whoever is at its other end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    theirs.send(PREAMBLE)
    stream = await open_stream(ours)
    try:
        yield stream, theirs
    finally:
        stream.cut()
        theirs.close()
        await asyncio.sleep(0.01)  # the transport closes in the loop's next turns


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    left, right = socket.socketpair()
    left.send(PREAMBLE)
    right.send(PREAMBLE)
    streams = await open_stream(left), await open_stream(right)
    try:
        yield streams
    finally:
        for stream in streams:
            stream.cut()
        await asyncio.sleep(0.01)


async def test_frames_of_any_size_arrive_as_they_were_sent_in_one_or_several_parts() -> None:
    sizes = [0, 1, 5, 4095, AHEAD_BYTES - 5, AHEAD_BYTES, 3 * AHEAD_BYTES + 1, FRAME_MAX_BYTES]

    async with pair() as (left, right):

        async def send() -> None:
            for size in sizes:
                payload = bytearray(i % 251 for i in range(size))
                half = size // 2
                await left.send(
                    bytes(payload[:half]), memoryview(payload)[half:], b"", timeout_s=WAIT_S
                )
                payload[:] = bytes(size)  # the caller's memory is free again
            await left.finish(timeout_s=WAIT_S)

        async def receive() -> None:
            target = memoryview(bytearray(FRAME_MAX_BYTES))
            for turn, size in enumerate(sizes):
                expected = bytes(i % 251 for i in range(size))
                if turn % 2:
                    assert await right.receive(timeout_s=WAIT_S) == expected
                else:
                    assert await right.receive_into(target, timeout_s=WAIT_S) == size
                    assert target[:size] == expected
            assert await right.receive(timeout_s=WAIT_S) is None
            assert await right.receive_into(target, timeout_s=WAIT_S) is None

        # The second None above must not wait for bytes: END was said once and for all.
        await asyncio.gather(send(), receive())


async def test_a_burst_of_small_frames_is_taken_one_by_one() -> None:
    async with against_raw() as (stream, raw):
        raw.send(b"".join(data(bytes([i])) for i in range(200)) + END)
        for i in range(200):
            assert await stream.receive(timeout_s=WAIT_S) == bytes([i])
        assert await stream.receive(timeout_s=WAIT_S) is None
        assert raw.recv(100) == ACK


@pytest.mark.parametrize("cut_at", range(1, len(data(b"abc"))))
async def test_a_frame_may_arrive_in_pieces(cut_at: int) -> None:
    frame = data(b"abc")
    async with against_raw() as (stream, raw):
        raw.send(frame[:cut_at])
        receiving = asyncio.ensure_future(stream.receive(timeout_s=WAIT_S))
        await asyncio.sleep(0.001)
        raw.send(frame[cut_at:])
        assert await receiving == b"abc"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (HEADER.pack(1 << 30, FrameType.DATA), "1073741824 bytes is announced"),
        (HEADER.pack(FRAME_MAX_BYTES + 1, FrameType.DATA), "is announced"),
        (HEADER.pack(0, 3), "type 3"),
        (HEADER.pack(1, FrameType.END) + b"x", "is announced"),
        (ACK, "an ACK without an END"),
        (b"", "ended without END"),
        (data(b"abc")[:-1], "ended without END"),
        (data(b"abc")[:3], "ended without END"),
    ],
)
async def test_a_breach_of_any_rule_breaks_the_stream(sent: bytes, reason: str) -> None:
    async with against_raw() as (stream, raw):
        receiving = asyncio.ensure_future(stream.receive(timeout_s=WAIT_S))
        await asyncio.sleep(0)
        raw.send(sent)
        if "ended" in reason:
            raw.close()
        with pytest.raises(StreamBroken, match=reason):
            await receiving
        with pytest.raises(StreamBroken):
            await stream.send(b"x", timeout_s=WAIT_S)


async def test_a_gigabyte_announced_costs_nothing() -> None:
    async with against_raw() as (stream, raw):
        raw.send(HEADER.pack(1 << 30, FrameType.DATA))
        with pytest.raises(StreamBroken):
            await stream.receive(timeout_s=WAIT_S)
        held = sum(sys.getsizeof(getattr(stream, name)) for name in ("_kept", "_target"))
        assert held < 1000


async def test_data_after_end_breaks_the_stream() -> None:
    async with against_raw() as (stream, raw):
        raw.send(END + data(b"more"))
        assert await stream.receive(timeout_s=WAIT_S) is None
        with pytest.raises(StreamBroken, match="after END"):
            await stream.finish(timeout_s=WAIT_S)


async def test_a_frame_larger_than_the_target_breaks_the_stream_and_spares_the_target() -> None:
    async with against_raw() as (stream, raw):
        target = bytearray(b"mine")
        raw.send(data(b"12345"))
        with pytest.raises(StreamBroken, match="5 bytes where 4 were expected"):
            await stream.receive_into(memoryview(target), timeout_s=WAIT_S)
        assert target == b"mine"


async def test_a_frame_over_the_limit_is_not_sent() -> None:
    async with pair() as (left, right):
        with pytest.raises(ValueError, match="at most"):
            await left.send(bytes(FRAME_MAX_BYTES), b"x", timeout_s=WAIT_S)
        await left.send(b"still alive", timeout_s=WAIT_S)
        assert await right.receive(timeout_s=WAIT_S) == b"still alive"


async def test_silence_breaks_the_stream_after_the_timeout_and_not_before() -> None:
    loop = asyncio.get_running_loop()
    async with against_raw() as (stream, raw):
        raw.send(data(b"abc")[:-1])
        began = loop.time()
        with pytest.raises(StreamBroken, match="silence"):
            await stream.receive(timeout_s=0.1)
        assert 0.1 <= loop.time() - began < WAIT_S


async def test_a_frame_that_arrives_slowly_but_steadily_is_waited_for() -> None:
    async with against_raw() as (stream, raw):
        # A busy machine may stop this process for half a second at any time.
        receiving = asyncio.ensure_future(stream.receive(timeout_s=1.0))
        frame = data(b"0123456789ab")
        for index in range(len(frame)):
            raw.send(frame[index : index + 1])
            await asyncio.sleep(0.07)
        assert await receiving == b"0123456789ab"


async def test_a_frame_that_trickles_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.libp2p.framing.frame_stream.PATIENCE", 2)

    async with against_raw() as (stream, raw):
        receiving = asyncio.ensure_future(stream.receive(timeout_s=0.7))
        raw.send(data(bytes(100_000))[:10])
        with pytest.raises(StreamBroken, match=r"one frame takes over 1\.4 s"):
            while not receiving.done():
                raw.send(b"x")
                await asyncio.sleep(0.01)
            await receiving


async def test_a_reader_that_does_not_read_holds_the_sender_up_instead_of_filling_memory() -> None:
    async with pair() as (left, right):
        with pytest.raises(StreamBroken, match="sending: silence"):
            for _ in range(100):
                await left.send(bytes(FRAME_MAX_BYTES), timeout_s=0.1)
        assert right._end - right._start <= AHEAD_BYTES
        assert not right._queue


async def test_finish_waits_for_the_acknowledgement() -> None:
    async with against_raw() as (stream, raw):
        finishing = asyncio.ensure_future(stream.finish(timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        assert not finishing.done()
        assert raw.recv(100) == END
        raw.send(ACK)
        await finishing
        await stream.finish(timeout_s=WAIT_S)  # saying it again is no error, and sends nothing
        with pytest.raises(ValueError, match="after finish"):
            await stream.send(b"x", timeout_s=WAIT_S)


async def test_finish_without_an_acknowledgement_fails_in_time() -> None:
    async with against_raw() as (stream, _raw):
        with pytest.raises(StreamBroken, match="not acknowledged"):
            await stream.finish(timeout_s=0.05)
    async with against_raw() as (stream, raw):
        raw.close()
        with pytest.raises(StreamBroken):
            await stream.finish(timeout_s=WAIT_S)


async def test_frames_in_front_of_the_acknowledgement_can_be_received_after_finish() -> None:
    async with against_raw() as (stream, raw):
        finishing = asyncio.ensure_future(stream.finish(timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        raw.send(data(b"one") + data(b"two") + ACK + data(b"three") + END)
        await finishing
        for expected in (b"one", b"two", b"three", None):
            assert await stream.receive(timeout_s=WAIT_S) == expected
        assert stream._queued_bytes == 0


def test_the_queue_in_front_of_an_acknowledgement_is_bounded() -> None:
    async def scenario() -> None:
        async with pair() as (left, right):
            sending = asyncio.ensure_future(flood(right))
            with pytest.raises(StreamBroken, match="not acknowledged"):
                await left.finish(timeout_s=0.2)
            kept = sum(len(frame) for frame in left._queue if isinstance(frame, bytearray))
            assert kept <= QUEUE_MAX_BYTES
            with pytest.raises(StreamBroken):
                await sending

    async def flood(stream: FrameStream) -> None:
        for _ in range(100):
            await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=WAIT_S)

    run(scenario())


async def test_frames_without_content_take_room_in_the_queue_as_well() -> None:
    """A member could have its partner keep frames without end while it did not acknowledge."""
    async with against_raw() as (stream, raw):
        flood = asyncio.get_running_loop().sock_sendall(raw, 100_000 * data(b""))
        sending = asyncio.ensure_future(flood)
        with pytest.raises(StreamBroken, match="not acknowledged"):
            await stream.finish(timeout_s=0.5)
        assert len(stream._queue) <= QUEUE_MAX_BYTES // KEPT_FRAME_BYTES + 1
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_both_sides_can_send_at_once_while_both_receive() -> None:
    async def talk(stream: FrameStream) -> int:
        for _ in range(20):
            await stream.send(bytes(300_000), timeout_s=WAIT_S)
        await stream.finish(timeout_s=WAIT_S)
        return 0

    async def listen(stream: FrameStream) -> int:
        size = 0
        while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
            size += len(frame)
        return size

    async with pair() as (left, right):
        sizes = await asyncio.gather(talk(left), talk(right), listen(left), listen(right))
        assert list(sizes) == [0, 0, 6_000_000, 6_000_000]


async def test_frames_that_arrived_before_the_end_of_the_connection_can_still_be_received() -> None:
    async with against_raw() as (stream, raw):
        raw.send(data(b"one") + data(b"two"))
        assert await stream.receive(timeout_s=WAIT_S) == b"one"
        raw.close()
        await asyncio.sleep(0.01)
        assert await stream.receive(timeout_s=WAIT_S) == b"two"
        with pytest.raises(StreamBroken, match="without END"):
            await stream.receive(timeout_s=WAIT_S)


async def test_receiving_can_be_cancelled_between_frames_but_not_within_one() -> None:
    async with against_raw() as (stream, raw):
        for sent in (b"", data(b"abc")[:3]):
            raw.send(sent)
            await asyncio.sleep(0.01)
            receiving = asyncio.ensure_future(stream.receive(timeout_s=WAIT_S))
            await asyncio.sleep(0.01)
            receiving.cancel()
            await asyncio.wait([receiving])
        raw.send(data(b"abc")[3:] + data(b"def")[:6])
        assert await stream.receive(timeout_s=WAIT_S) == b"abc"
        receiving = asyncio.ensure_future(stream.receive(timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        receiving.cancel()
        await asyncio.wait([receiving])
        with pytest.raises(StreamBroken, match="cancelled"):
            await stream.receive(timeout_s=WAIT_S)


async def test_abort_ends_whoever_waits_and_gives_the_target_back() -> None:
    async with against_raw() as (stream, raw):
        target = memoryview(bytearray(1000))
        raw.send(data(bytes(1000))[:500])
        receiving = asyncio.ensure_future(stream.receive_into(target, timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        stream.abort()
        stream.abort()
        with pytest.raises(StreamBroken, match="aborted"):
            await receiving
        assert stream._target is None
        with pytest.raises(StreamBroken):
            await stream.send(b"x", timeout_s=WAIT_S)


def is_open(raw: socket.socket) -> bool:
    try:
        return raw.recv(100) != b""
    except BlockingIOError:
        return True


async def test_the_sender_of_the_last_acknowledgement_lets_the_other_side_close_first() -> None:
    async with against_raw() as (stream, raw):
        raw.send(END)
        assert await stream.receive(timeout_s=WAIT_S) is None
        stream.abort()
        await asyncio.sleep(0.01)
        assert raw.recv(100) == ACK
        assert is_open(raw), "closing now could cut the ACK off on its way"
        raw.close()
        await asyncio.sleep(0.01)
        assert stream._lost is not None


async def test_the_receiver_of_the_last_acknowledgement_closes_at_once() -> None:
    async with against_raw() as (stream, raw):
        raw.send(END)
        assert await stream.receive(timeout_s=WAIT_S) is None
        finishing = asyncio.ensure_future(stream.finish(timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        assert raw.recv(100) == ACK + END
        raw.send(ACK)
        await finishing
        stream.abort()
        await asyncio.sleep(0.01)
        assert not is_open(raw)


async def test_a_stream_dropped_half_way_closes_at_once() -> None:
    async with against_raw() as (stream, raw):
        raw.send(END)
        assert await stream.receive(timeout_s=WAIT_S) is None
        await stream.send(b"half of the answer", timeout_s=WAIT_S)
        stream.abort()
        await asyncio.sleep(0.01)
        raw.recv(100)
        assert not is_open(raw)

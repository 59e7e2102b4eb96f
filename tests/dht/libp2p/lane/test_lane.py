"""The direct lane on loopback; a plain function stands for the daemon between two peers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dht.errors import StreamBroken
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.libp2p.framing.frame_stream import HEADER, FrameStream, FrameType
from dht.libp2p.framing.sealing import KEY_BYTES, NUMBER_BYTES
from dht.libp2p.lane.connection import CONNECTIONS_MAX, Connection, LaneSettings, Path, parse_lane
from dht.libp2p.lane.wire import LaneOffer
from dht.limits import Place
from dht.wrapped_host import Gate, ThrottledStream
from tests.dht.libp2p.lane_ends import (
    ANNA,
    BORIS,
    HERE,
    PATIENT,
    End,
    one_round,
    opened,
    pair,
)
from tests.integration.loopback import WAIT_S, run, until


async def test_streams_follow_one_another_on_one_connection() -> None:
    async with pair() as (anna, boris):
        for size in (0, 1, 70_000, FRAME_MAX_BYTES):
            await one_round(anna, boris, size)
            await until(lambda: anna.idle(BORIS) == 1, timeout_s=WAIT_S)
        assert (anna.lane.counters["dialled"], boris.lane.counters["accepted"]) == (1, 1)
        assert boris.lane.counters["streams_served"] == 4


async def test_streams_at_once_have_a_connection_each() -> None:
    async with pair() as (anna, boris):
        await asyncio.gather(*(opened(anna) for _ in range(3)))
        assert boris.connections == 3


async def test_a_stream_that_breaks_takes_its_connection_with_it() -> None:
    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        await ours.send(b"half of it", timeout_s=WAIT_S)
        ours.abort()
        assert await theirs.receive(timeout_s=WAIT_S) == b"half of it"
        with pytest.raises(StreamBroken):
            await theirs.receive(timeout_s=WAIT_S)
        await until(lambda: not anna.connections, timeout_s=WAIT_S)
        await until(lambda: not boris.connections, timeout_s=WAIT_S)
        await one_round(anna, boris, 1)


async def test_a_frame_sent_after_the_end_of_a_stream_is_no_part_of_the_next() -> None:
    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        finishing = asyncio.ensure_future(theirs.finish(timeout_s=WAIT_S))
        assert await ours.receive(timeout_s=WAIT_S) is None
        await finishing
        theirs.abort()  # its handler has heard enough
        await ours.send(b"and another thing", timeout_s=WAIT_S)
        ours.abort()
        await until(lambda: not boris.connections, timeout_s=WAIT_S)
        assert boris.served.empty()
        await one_round(anna, boris, 1)


async def test_an_abort_is_noticed_at_once_and_the_connection_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dht.libp2p.framing.frame_stream.LINGER_S", 1000.0)

    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        ours.abort()  # nothing was said at all
        with pytest.raises(StreamBroken):
            await theirs.receive(timeout_s=WAIT_S)

        ours = await opened(anna)
        theirs = await boris.served.get()
        finishing = asyncio.ensure_future(ours.finish(timeout_s=WAIT_S))
        await asyncio.sleep(0)
        finishing.cancel()  # before anybody has said that END was heard
        await asyncio.wait((finishing,))
        ours.abort()
        await until(lambda: not anna.connections, timeout_s=WAIT_S)


async def test_a_side_that_goes_on_when_the_other_is_done_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dht.libp2p.framing.frame_stream.LINGER_S", 1000.0)

    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        finishing = asyncio.ensure_future(ours.finish(timeout_s=WAIT_S))
        assert await theirs.receive(timeout_s=WAIT_S) is None
        await finishing
        ours.abort()
        await theirs.send(b"and another thing", timeout_s=WAIT_S)
        await until(lambda: not anna.connections, timeout_s=WAIT_S)


async def test_a_receiver_that_waits_for_more_hears_that_there_is_none() -> None:
    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()

        async def serve() -> None:
            assert await theirs.receive(timeout_s=WAIT_S) is None
            theirs.abort()

        serving = asyncio.ensure_future(serve())
        await ours.finish(timeout_s=WAIT_S)
        with pytest.raises(StreamBroken, match="without END"):
            await ours.receive(timeout_s=WAIT_S)
        await serving
        ours.abort()
        assert anna.idle(BORIS) == 1


async def test_nobody_waits_long_for_a_connection_and_the_next_stream_has_it() -> None:
    async with pair(LaneSettings(wait_s=0.0)) as (anna, boris):
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
        await until(lambda: anna.idle(BORIS) == 1, timeout_s=WAIT_S)
        await one_round(anna, boris, 1)


async def refused(anna: End) -> None:
    """The lane is not to be had, and is not asked for again at once."""
    assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
    asked = anna.asked
    assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
    assert anna.asked == asked
    await until(lambda: not anna.connections, timeout_s=WAIT_S)


async def test_a_peer_without_a_lane_is_left_alone_for_a_while() -> None:
    async with pair() as (anna, boris):
        boris_again = anna.others.pop(BORIS)
        pauses = []
        for _ in range(9):
            await refused(anna)
            known = anna.lane._peers[BORIS]
            pauses.append(known.not_before - asyncio.get_running_loop().time())
            known.not_before = 0.0  # as if so long had passed
        expected = [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]
        assert pauses == pytest.approx(expected, abs=15)  # the machine may be busy
        anna.others[BORIS] = boris_again
        await one_round(anna, boris, 1)


async def test_a_closed_port_and_a_peer_without_a_direct_connection_go_another_way() -> None:
    async with pair() as (anna, _):
        with socket.create_server((HERE, 0)) as taken:
            free = taken.getsockname()[1]
        anna.change = lambda offer: replaced(offer, port=free)
        await refused(anna)
    async with pair() as (anna, _):
        anna.at = ()
        await refused(anna)


def replaced(offer: bytes, **changes: Any) -> bytes:
    """An offer in which the port, or fields of the ticket, are others."""
    told = msgspec.msgpack.decode(offer, type=LaneOffer)
    port = changes.pop("port", told.port)
    ticket = msgspec.structs.replace(told.ticket, **changes)
    return msgspec.msgpack.encode(LaneOffer(ticket, port))


@pytest.mark.parametrize(
    "change",
    [
        {"number": bytes(NUMBER_BYTES)},
        {"dialler_key": bytes(KEY_BYTES)},
        {"listener_key": bytes(KEY_BYTES)},
    ],
)
async def test_without_a_ticket_and_both_of_its_keys_there_is_no_lane(
    change: dict[str, object],
) -> None:
    async with pair() as (anna, boris):
        anna.change = lambda offer: replaced(offer, **change)
        await refused(anna)
        assert boris.served.empty()
        await until(lambda: not boris.connections, timeout_s=WAIT_S)


async def test_behind_a_router_others_are_told_its_port() -> None:
    async with pair(there=LaneSettings(told_port=443)) as (_, boris):
        told = msgspec.msgpack.decode(await boris.lane.offer(ANNA), type=LaneOffer)
        assert told.port == 443 != boris.lane.port


async def test_a_neighbour_is_told_the_own_port_and_not_the_one_that_the_router_maps() -> None:
    """Two homes behind one router have to take different ports of it."""
    async with pair() as (_, boris):
        boris.lane._port_mapped(443)
        for ip in "11.1.2.3", "100.64.0.7", None, "192.168.1.3", "2a01:db8::1":
            boris.at = () if ip is None else (ip,)
            told = msgspec.msgpack.decode(await boris.lane.offer(ANNA), type=LaneOffer)
            near = ip in ("192.168.1.3", "2a01:db8::1")
            assert told.port == (boris.lane.port if near else 443)


async def test_a_port_that_is_taken_is_no_reason_not_to_take_part() -> None:
    with socket.create_server((HERE, 0)) as taken:
        settings = LaneSettings(wait_s=5.0, port=taken.getsockname()[1])
        async with pair(there=settings) as (_, boris):
            assert boris.lane.port is None
            with pytest.raises(ValueError, match="does not listen"):
                await boris.lane.offer(ANNA)


@pytest.mark.parametrize(
    ("text", "ports"),
    [("auto", (0, None)), ("7701", (7701, 7701)), ("7701:443", (7701, 443))],
)
def test_a_lane_is_written_as_its_port(text: str, ports: tuple[int, int | None]) -> None:
    settings = parse_lane(text)
    assert settings is not None
    assert (settings.port, settings.told_port) == ports
    assert parse_lane("off") is None


@pytest.mark.parametrize("text", ["", "0", "on", "7701:", "1:2:3", "65536", "-1", "\u0661"])
def test_a_text_that_is_no_port_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="'auto' or 'off'"):
        parse_lane(text)


async def test_a_ticket_is_good_once() -> None:
    async with pair() as (anna, boris):
        kept: list[bytes] = []
        anna.change = lambda offer: kept.append(offer) or kept[0]  # type: ignore[func-returns-value]
        await opened(anna)
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
        assert boris.lane.counters["turned_away"] == 1


async def test_a_protocol_that_is_refused_leaves_the_connection_for_others() -> None:
    async with pair() as (anna, boris):
        boris.refuses = "not here"
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
        boris.refuses = None
        await one_round(anna, boris, 1)
        assert boris.lane.counters["accepted"] == 1


@pytest.mark.parametrize("said", [b"", b"\x10", b"\x10half a num"])
async def test_a_stranger_is_turned_away_when_its_time_is_over(said: bytes) -> None:
    async with pair(there=LaneSettings(greet_timeout_s=0.2)) as (_, boris):
        reader, writer = await asyncio.open_connection(HERE, boris.lane.port)
        writer.write(said)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read(1000) == b""
        writer.transport.abort()
        await until(lambda: not boris.connections, timeout_s=WAIT_S)
        assert boris.lane.counters["turned_away"] == 1


@pytest.mark.parametrize(
    "said", [b"\xff" * 6, b"\xff\xff\x7f", b"\x03abc", b"GET / HTTP/1.1\r\n" + bytes(80)]
)
async def test_bytes_that_are_no_ticket_are_turned_away_at_once(said: bytes) -> None:
    async with pair() as (_, boris):
        reader, writer = await asyncio.open_connection(HERE, boris.lane.port)
        writer.write(said)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read(100) == b""
        writer.transport.abort()
        await until(lambda: not boris.connections, timeout_s=WAIT_S)
        assert boris.lane.counters["turned_away"] == 1


@pytest.mark.parametrize("at", [4, 5, 300, 70_000 + 20])
def test_a_byte_that_was_changed_on_the_way_breaks_the_stream(at: int) -> None:
    """Changes in a frame's length, its type, its content, and its tag."""

    async def scenario() -> None:
        async with pair() as (anna, boris), meddler(boris.lane.port, at) as port:
            anna.change = lambda offer: replaced(offer, port=port)
            ours = await opened(anna)
            theirs = await boris.served.get()
            meddle.set()
            receiving = asyncio.ensure_future(theirs.receive(timeout_s=WAIT_S))
            await ours.send(bytes(70_000), timeout_s=WAIT_S)
            await ours.send(b"enough for a frame that says it is longer", timeout_s=WAIT_S)
            with pytest.raises(StreamBroken, match=r"seal|type|announced"):
                await receiving

    meddle = asyncio.Event()

    @asynccontextmanager
    async def meddler(port: int | None, at: int) -> AsyncIterator[int]:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen = 0
            with contextlib.suppress(OSError):
                while data := bytearray(await reader.read(1 << 16)):
                    if meddle.is_set() and seen <= at - 1 < seen + len(data):
                        data[at - 1 - seen] ^= 1
                    seen += len(data) if meddle.is_set() else 0
                    writer.write(data)
            writer.transport.abort()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            writers.append(writer)
            onward = await asyncio.open_connection(HERE, port)
            writers.append(
                onward[1]
            )  # and not in ``carry``, which may be cancelled before it begins
            await asyncio.gather(carry(reader, onward[1]), carry(onward[0], writer))

        server = await asyncio.start_server(handle, HERE, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for writer in writers:
                writer.transport.abort()

    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[object]] = []
    run(scenario())


@pytest.mark.parametrize("said", [b"", b"\x10half a num"])
async def test_the_oldest_stranger_gives_way_to_one_that_has_a_ticket(said: bytes) -> None:
    few = LaneSettings(strangers_max=2, greet_timeout_s=2 * WAIT_S)
    async with pair(PATIENT, few) as (anna, boris):
        strangers = []
        for _ in range(2):
            strangers.append(await asyncio.open_connection(HERE, boris.lane.port))
            strangers[-1][1].write(said)
        await until(lambda: boris.connections == 2, timeout_s=WAIT_S)
        await one_round(anna, boris, 1)
        async with asyncio.timeout(WAIT_S):
            assert await strangers[0][0].read(1) == b""
        assert boris.lane.counters["refused"] == 1
        assert boris.connections == 2
        for _, writer in strangers:
            writer.transport.abort()


async def test_a_flood_from_one_address_drops_its_own_connections() -> None:
    few = LaneSettings(strangers_max=3)
    async with pair(there=few) as (_, boris):
        port = boris.lane.port
        elsewhere = await asyncio.open_connection(HERE, port, local_addr=("127.0.0.2", 0))
        await until(lambda: boris.connections == 1, timeout_s=WAIT_S)
        flood = [await asyncio.open_connection(HERE, port) for _ in range(9)]
        async with asyncio.timeout(WAIT_S):
            for reader, _ in flood[:-2]:
                assert await reader.read(1) == b""
        assert boris.lane.counters["refused"] == 7
        assert boris.connections == 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(elsewhere[0].read(1), 0.1)
        for _, writer in [elsewhere, *flood]:
            writer.transport.abort()


async def test_keys_that_hold_all_connections_and_use_none_make_room() -> None:
    """Bulk data of all others went through the daemon, and that of peers behind routers nowhere."""
    async with pair() as (anna, boris):
        for number in range(CONNECTIONS_MAX):
            held = Connection(boris.lane, Path.DIRECT, dialled=False)
            held.peer = PeerId(f"key{number % 32}")
            held.place = Place(held.peer)
            assert boris.lane._places.take(held.place)
            boris.lane.rest(held)
        await one_round(anna, boris, 1)
        assert boris.lane._places.held(ANNA) == 1
        assert len(boris.lane._places) == CONNECTIONS_MAX


class From(socket.socket):
    """One end of a connection, as if the other end had this address."""

    address = ""

    def getpeername(self) -> tuple[str, int, int, int]:
        return self.address, 7700, 0, 0


async def test_a_flood_from_one_ipv6_network_drops_its_own_connections() -> None:
    """One owner has so many addresses that no two connections need to share one."""
    ends: list[socket.socket] = []

    def comes_from(address: str) -> From:
        here, there = socket.socketpair()
        come = From(fileno=here.detach())
        come.address = address
        ends.extend((come, there))
        return come

    async with pair(there=LaneSettings(strangers_max=3)) as (_, boris):
        honest = boris.lane.admit(comes_from("2606:4700::1"), Path.DIRECT)
        for number in range(9):
            boris.lane.admit(comes_from(f"2a00:78:1:{number:x}::1"), Path.DIRECT)
        assert boris.lane.counters["refused"] == 7
        assert honest in boris.lane._strangers
        near = boris.lane.admit(comes_from("fe80::1%eth0"), Path.DIRECT)
        assert near in boris.lane._strangers
    for end in ends:
        end.close()


async def test_there_is_a_limit_to_connections_with_one_peer() -> None:
    few = LaneSettings(wait_s=5.0, per_peer_max=2)
    async with pair(few, few) as (anna, boris):
        await asyncio.gather(opened(anna), opened(anna))
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
        assert anna.asked == 2  # one knows one's own limit
    async with pair(PATIENT, few) as (anna, boris):
        await asyncio.gather(opened(anna), opened(anna))
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None
        assert boris.lane.counters["turned_away"] == 1


@pytest.mark.parametrize("impatient", [ANNA, BORIS])
async def test_a_connection_that_nobody_uses_is_closed(impatient: PeerId) -> None:
    """The dialling side closes it, or the other side if the dialling side is gone."""
    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        end = anna if impatient == ANNA else boris
        end.lane.settings = LaneSettings(idle_max_s=0.02)
        await asyncio.gather(theirs.finish(timeout_s=WAIT_S), ours.receive(timeout_s=WAIT_S))
        ours.abort()
        theirs.abort()
        await until(lambda: not anna.connections, timeout_s=WAIT_S)
        await until(lambda: not boris.connections, timeout_s=WAIT_S)


async def test_a_connection_in_use_is_not_idle() -> None:
    async with pair() as (anna, boris):
        await opened(anna)
        in_use = (*anna.lane._peers[BORIS].dialled, *boris.lane._served)
        assert [connection.resting for connection in in_use] == [None, None]


async def test_a_kept_connection_whose_other_end_sleeps_holds_nobody_up_twice() -> None:
    async with pair() as (anna, boris):
        ours = await asyncio.gather(opened(anna), opened(anna))
        theirs = [await boris.served.get() for _ in ours]
        ended = (stream.finish(timeout_s=WAIT_S) for stream in theirs)
        heard = (stream.receive(timeout_s=WAIT_S) for stream in ours)
        await asyncio.gather(*ended, *heard)
        for stream in (*ours, *theirs):
            stream.abort()
        await until(lambda: anna.idle(BORIS) == 2, timeout_s=WAIT_S)
        anna.lane.settings = LaneSettings(answer_timeout_s=0.05)
        boris.lane.heard = lambda connection, message: None
        await refused(anna)


async def test_a_peer_whose_kept_connection_is_stale_is_dialled_anew_at_once() -> None:
    """A router had forgotten the connection: bulk data went through the daemon for 30 s."""
    async with pair() as (anna, boris):
        await one_round(anna, boris, 1)
        await until(lambda: anna.idle(BORIS) == 1, timeout_s=WAIT_S)
        stale, hear = set(boris.lane._served), boris.lane.heard
        boris.lane.heard = lambda connection, message: (
            None if connection in stale else hear(connection, message)
        )
        anna.lane.settings = LaneSettings(answer_timeout_s=0.5, wait_s=WAIT_S)
        await opened(anna)


async def test_a_good_connection_is_not_cut_because_the_time_to_open_a_stream_is_up() -> None:
    """One that was dialled in the last moment was cut, and the peer was left alone for 30 s."""
    async with pair() as (anna, boris):
        await one_round(anna, boris, 1)
        await until(lambda: anna.idle(BORIS) == 1, timeout_s=WAIT_S)
        assert await anna.lane.open(BORIS, "/test", timeout_s=0.0) is not None
        assert anna.lane.counters["dialled"] == 1


async def test_stale_connections_leave_room_for_a_new_one() -> None:
    """With as many of them as a peer may have, it was not dialled anew for 30 s."""
    async with pair(LaneSettings(per_peer_max=2)) as (anna, boris):
        ours = await asyncio.gather(opened(anna), opened(anna))
        theirs = [await boris.served.get() for _ in ours]
        ended = (stream.finish(timeout_s=WAIT_S) for stream in theirs)
        heard = (stream.receive(timeout_s=WAIT_S) for stream in ours)
        await asyncio.gather(*ended, *heard)
        for stream in (*ours, *theirs):
            stream.abort()
        await until(lambda: anna.idle(BORIS) == 2, timeout_s=WAIT_S)
        stale, hear = set(boris.lane._served), boris.lane.heard
        boris.lane.heard = lambda connection, message: (
            None if connection in stale else hear(connection, message)
        )
        anna.lane.settings = LaneSettings(per_peer_max=2, answer_timeout_s=0.5, wait_s=WAIT_S)
        await opened(anna)


async def test_closing_breaks_what_is_open() -> None:
    async with pair() as (anna, boris):
        ours = await opened(anna)
        await boris.served.get()
        receiving = asyncio.ensure_future(ours.receive(timeout_s=WAIT_S))
        await asyncio.sleep(0)
        await boris.lane.close()
        with pytest.raises(StreamBroken):
            await receiving
        assert await anna.lane.open(BORIS, "/test", timeout_s=WAIT_S) is None


async def test_done_means_nothing_where_there_is_no_connection_of_our_own() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_unix_connection(
        lambda: FrameStream(lambda stream, message: None), sock=ours
    )
    theirs.send(b"\x00" + HEADER.pack(0, FrameType.DONE))
    with pytest.raises(StreamBroken, match="type 3"):
        await stream.receive(timeout_s=WAIT_S)
    theirs.close()
    await asyncio.sleep(0.01)


async def test_large_frames_are_packed_on_a_far_line(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(i % 7 for i in range(300_000))

    monkeypatch.setattr(Connection, "is_far", True)
    async with pair() as (anna, boris):
        ours = await opened(anna)
        theirs = await boris.served.get()
        target = memoryview(bytearray(len(content)))
        for one, other, lane in ((ours, theirs, anna.lane), (theirs, ours, boris.lane)):
            before = lane.sent_bytes
            _, size = await asyncio.gather(
                one.send(content, timeout_s=WAIT_S),
                other.receive_into(target, timeout_s=WAIT_S),
            )
            assert size == len(content) and target == content
            assert lane.sent_bytes - before < len(content) / 2
            _, whole = await asyncio.gather(
                one.send(content, timeout_s=WAIT_S), other.receive(timeout_s=WAIT_S)
            )
            assert whole == content
        theirs.cut()


async def test_a_volume_counts_what_went_over_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are counted before they are packed, and the rest is given back."""
    content = bytes(i % 7 for i in range(300_000))

    monkeypatch.setattr(Connection, "is_far", True)
    async with pair() as (anna, boris):
        up, down = Gate(), Gate()
        ours = ThrottledStream(await opened(anna), up, down, "bulk/1")
        theirs = ThrottledStream(await boris.served.get(), Gate(), here := Gate(), "bulk/1")
        before = anna.lane.sent_bytes
        for _ in range(2):
            _, whole = await asyncio.gather(
                ours.send(content, timeout_s=WAIT_S), theirs.receive(timeout_s=WAIT_S)
            )
            assert whole == content
        sent = anna.lane.sent_bytes - before
        assert sent < len(content)
        assert sent * 0.99 < up.passed == here.passed <= sent
        assert up.sent_for == {"bulk": up.passed}
        assert down.passed == 0
        ours.abort()


async def test_nothing_is_packed_on_a_near_or_a_fast_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for far, rate, packs in ((False, 1e6, False), (True, 1e6, True), (True, 1e8, False)):
        if far:
            monkeypatch.setattr(Connection, "is_far", True)
        async with pair() as (anna, _):
            anna.lane._pacer.pace._best.append((0.0, rate))
            stream = await opened(anna)
            assert stream.packs == packs
            stream.cut()


async def test_closing_at_the_moment_of_a_dial_leaves_no_socket_open() -> None:
    async with pair() as (_, boris):
        with socket.socket() as near:
            near.connect((HERE, boris.lane.port))
            near.setblocking(False)
            admit = boris.lane.admit
            admitted = asyncio.Event()

            def noted(dialled: socket.socket, path: Path) -> Connection:
                admitted.set()
                return admit(dialled, path)

            boris.lane.admit = noted
            await admitted.wait()
            await boris.lane.close()
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.get_running_loop().sock_recv(near, 1) == b""

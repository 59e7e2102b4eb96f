"""Contract of ``dht.host.Host``, tested with every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from multiaddr import Multiaddr

from dht import addresses
from dht.errors import CallRefused, HostClosed, PeerUnreachable, StreamBroken
from dht.host import FRAME_MAX_BYTES, UNARY_MAX_BYTES, Host, Stream
from dht.identity import PeerId
from dht.records import PeerRecord, seal
from tests.contract.worlds import World, essential

WAIT_S = 30.0
SHORT_S = 0.5
KEY = "run/peers/0"


async def pair(world: World) -> tuple[Host, Host]:
    """Two hosts, of which the first has connected to the second."""
    anna, boris = await world.host("anna"), await world.host("boris")
    await anna.connect(boris.peer_id, await boris.addresses(), timeout_s=WAIT_S)
    return anna, boris


async def echo(peer: PeerId, request: bytes) -> bytes:
    return request


async def return_frames(stream: Stream) -> None:
    while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
        await stream.send(frame, timeout_s=WAIT_S)
    await stream.finish(timeout_s=WAIT_S)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# Calls.


@essential
async def test_a_call_returns_the_answer_of_the_handler_which_learns_the_caller(
    world: World,
) -> None:
    anna, boris = await pair(world)

    async def name(peer: PeerId, request: bytes) -> bytes:
        return f"{peer} says ".encode() + request

    await boris.serve_calls("/test/name", name, request_max_bytes=100)
    reply = await anna.call(boris.peer_id, "/test/name", b"hello", timeout_s=WAIT_S)
    assert reply == f"{anna.peer_id} says hello".encode()


async def test_a_call_goes_back_over_the_connection_that_the_other_side_opened(
    world: World,
) -> None:
    anna, boris = await pair(world)
    await anna.serve_calls("/test/echo", echo, request_max_bytes=100)
    assert await boris.call(anna.peer_id, "/test/echo", b"hi", timeout_s=WAIT_S) == b"hi"


async def test_the_largest_request_and_reply_pass_and_larger_ones_do_not(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_calls("/test/echo", echo, request_max_bytes=UNARY_MAX_BYTES)
    largest = bytes(UNARY_MAX_BYTES)
    assert await anna.call(boris.peer_id, "/test/echo", largest, timeout_s=WAIT_S) == largest
    with pytest.raises(ValueError, match="at most"):
        await anna.call(boris.peer_id, "/test/echo", largest + b"x", timeout_s=WAIT_S)


async def test_a_request_over_the_protocols_own_limit_is_refused(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_calls("/test/echo", echo, request_max_bytes=10)
    assert await anna.call(boris.peer_id, "/test/echo", bytes(10), timeout_s=WAIT_S)
    with pytest.raises(CallRefused, match="11 bytes; at most 10"):
        await anna.call(boris.peer_id, "/test/echo", bytes(11), timeout_s=WAIT_S)


@essential
async def test_a_handler_refuses_with_a_value_error_and_its_reason_arrives(world: World) -> None:
    anna, boris = await pair(world)

    async def refuse(peer: PeerId, request: bytes) -> bytes:
        raise ValueError("run is finished")

    await boris.serve_calls("/test/refuse", refuse, request_max_bytes=10)
    with pytest.raises(CallRefused, match="run is finished") as caught:
        await anna.call(boris.peer_id, "/test/refuse", b"", timeout_s=WAIT_S)
    assert caught.value.peer == boris.peer_id
    assert caught.value.protocol == "/test/refuse"


def test_a_bug_in_a_handler_refuses_the_call_and_is_reported_to_its_own_loop(world: World) -> None:
    async def main() -> None:
        anna, boris = await pair(world)

        async def broken(peer: PeerId, request: bytes) -> bytes:
            raise KeyError("a bug")

        await boris.serve_calls("/test/broken", broken, request_max_bytes=10)
        with pytest.raises(CallRefused) as caught:
            await anna.call(boris.peer_id, "/test/broken", b"", timeout_s=WAIT_S)
        assert "a bug" not in caught.value.reason  # what is inside is none of a stranger's business

    with pytest.raises(ExceptionGroup) as caught:
        world.run(main())
    assert caught.value.subgroup(KeyError)


def test_a_reply_over_the_limit_refuses_the_call_and_is_reported(world: World) -> None:
    async def main() -> None:
        anna, boris = await pair(world)

        async def endless(peer: PeerId, request: bytes) -> bytes:
            return bytes(UNARY_MAX_BYTES + 1)

        await boris.serve_calls("/test/endless", endless, request_max_bytes=10)
        await boris.serve_calls("/test/echo", echo, request_max_bytes=10)
        with pytest.raises(CallRefused, match="larger"):
            await anna.call(boris.peer_id, "/test/endless", b"", timeout_s=WAIT_S)
        assert await anna.call(boris.peer_id, "/test/echo", b"still", timeout_s=WAIT_S) == b"still"

    with pytest.raises(ExceptionGroup) as caught:
        world.run(main())
    assert caught.value.subgroup(ValueError)


async def test_a_protocol_without_a_handler_is_refused(world: World) -> None:
    anna, boris = await pair(world)
    with pytest.raises(CallRefused, match="not served"):
        await anna.call(boris.peer_id, "/test/nothing", b"", timeout_s=WAIT_S)
    with pytest.raises(PeerUnreachable):
        await anna.open_stream(boris.peer_id, "/test/nothing", timeout_s=WAIT_S)


async def test_a_protocol_has_one_handler(world: World) -> None:
    anna = await world.host("anna")
    await anna.serve_calls("/test/echo", echo, request_max_bytes=10)
    with pytest.raises(ValueError, match="served already"):
        await anna.serve_calls("/test/echo", echo, request_max_bytes=10)
    with pytest.raises(ValueError, match="served already"):
        await anna.serve_streams("/test/echo", return_frames)


async def test_a_call_that_is_not_answered_in_time_fails_then(world: World) -> None:
    anna, boris = await pair(world)

    async def sleep(peer: PeerId, request: bytes) -> bytes:
        await asyncio.sleep(60)
        return b""

    await boris.serve_calls("/test/sleep", sleep, request_max_bytes=10)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnreachable, match=r"0\.5 s"):
        await anna.call(boris.peer_id, "/test/sleep", b"", timeout_s=SHORT_S)
    assert SHORT_S * 0.9 <= asyncio.get_running_loop().time() - started < SHORT_S + 1.5


async def test_fifty_calls_at_once_get_each_its_own_answer(world: World) -> None:
    anna, boris = await pair(world)

    async def late(peer: PeerId, request: bytes) -> bytes:
        await asyncio.sleep((50 - request[0]) * 0.002)
        return request

    await boris.serve_calls("/test/late", late, request_max_bytes=10)
    calls = (
        anna.call(boris.peer_id, "/test/late", bytes([n]), timeout_s=WAIT_S) for n in range(50)
    )
    assert await asyncio.gather(*calls) == [bytes([n]) for n in range(50)]


# Connections.


@essential
async def test_a_host_can_be_dialled_at_its_addresses_and_is_then_connected(world: World) -> None:
    anna, boris = await world.host("anna"), await world.host("boris")
    at = await boris.addresses()
    assert at
    assert {addresses.peer_of(address) for address in at} == {boris.peer_id}
    assert await anna.connections() == ()
    await anna.connect(boris.peer_id, at, timeout_s=WAIT_S)
    (connection,) = await anna.connections()
    assert connection.peer == boris.peer_id
    assert not connection.relayed
    await anna.connect(boris.peer_id, at, timeout_s=WAIT_S)  # again: nothing to do
    assert len(await anna.connections()) == 1


async def test_a_stranger_connects_beside_its_owner_whose_streams_go_on(world: World) -> None:
    anna, boris = await pair(world)
    callers: list[PeerId] = []

    async def answer(peer: PeerId, request: bytes) -> bytes:
        callers.append(peer)
        return request

    async def echo(stream: Stream) -> None:
        while (frame := await stream.receive(timeout_s=WAIT_S)) is not None:
            await stream.send(frame, timeout_s=WAIT_S)

    await boris.serve_calls("/test/answer", answer, request_max_bytes=10)
    await boris.serve_streams("/test/echo", echo)
    stream = await anna.open_stream(boris.peer_id, "/test/echo", timeout_s=WAIT_S)
    async with anna.stranger() as stranger:
        await stranger.connect(boris.peer_id, await boris.addresses(), timeout_s=WAIT_S)
        await stranger.call(boris.peer_id, "/test/answer", b"met", timeout_s=WAIT_S)
        assert callers == [stranger.peer_id]
        assert stranger.peer_id != anna.peer_id
        assert {c.peer for c in await boris.connections()} == {anna.peer_id, stranger.peer_id}
    await stream.send(b"still here", timeout_s=WAIT_S)
    assert await stream.receive(timeout_s=WAIT_S) == b"still here"
    stream.abort()


async def test_a_disconnected_peer_is_no_longer_listed_and_can_be_dialled_again(
    world: World,
) -> None:
    anna, boris = await pair(world)
    await anna.disconnect(boris.peer_id)
    assert await anna.connections() == ()
    await anna.disconnect(boris.peer_id)  # nothing to do
    await anna.connect(boris.peer_id, await boris.addresses(), timeout_s=WAIT_S)
    assert [connection.peer for connection in await anna.connections()] == [boris.peer_id]


async def test_connecting_to_a_closed_port_fails(world: World) -> None:
    anna = await world.host("anna")
    boris = world.identity("boris").peer_id
    nowhere = Multiaddr(f"/ip4/127.0.0.1/tcp/1/p2p/{boris}")
    with pytest.raises(PeerUnreachable) as caught:
        await anna.connect(boris, [nowhere], timeout_s=WAIT_S)
    assert caught.value.peer == boris
    with pytest.raises(PeerUnreachable):
        await anna.call(boris, "/test/echo", b"", timeout_s=SHORT_S)
    with pytest.raises(PeerUnreachable):
        await anna.open_stream(boris, "/test/echo", timeout_s=SHORT_S)


async def test_a_peer_that_answers_at_the_address_of_another_is_refused(world: World) -> None:
    anna, boris = await world.host("anna"), await world.host("boris")
    clara = world.identity("clara").peer_id
    at = [
        addresses.with_peer(addresses.without_peer(address), clara)
        for address in await boris.addresses()
    ]
    with pytest.raises(PeerUnreachable):
        await anna.connect(clara, at, timeout_s=WAIT_S)
    assert await anna.connections() == ()


async def test_a_peer_known_through_others_is_dialled_without_being_given_its_address(
    world: World,
) -> None:
    anna, boris = await pair(world)
    clara = await world.host("clara")
    await anna.serve_calls("/test/echo", echo, request_max_bytes=10)
    await clara.connect(boris.peer_id, await boris.addresses(), timeout_s=WAIT_S)
    await clara.connect(anna.peer_id, (), timeout_s=WAIT_S)
    assert await clara.call(anna.peer_id, "/test/echo", b"hi", timeout_s=WAIT_S) == b"hi"


async def test_a_closed_host_says_so_and_closes_twice(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_calls("/test/echo", echo, request_max_bytes=10)
    await anna.close()
    await anna.close()
    with pytest.raises(HostClosed):
        await anna.call(boris.peer_id, "/test/echo", b"", timeout_s=WAIT_S)
    with pytest.raises(HostClosed):
        await anna.open_stream(boris.peer_id, "/test/echo", timeout_s=WAIT_S)
    with pytest.raises(HostClosed):
        await anna.connect(boris.peer_id, (), timeout_s=WAIT_S)
    with pytest.raises(HostClosed):
        await anna.connections()


# Streams.


@essential
async def test_frames_of_every_size_arrive_whole_and_in_order_both_ways(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)
    stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
    assert stream.remote == boris.peer_id
    frames = [bytes([n % 251]) * size for n, size in enumerate((0, 1, 65_537, FRAME_MAX_BYTES))]
    for frame in frames:
        await stream.send(frame, timeout_s=WAIT_S)
        assert await stream.receive(timeout_s=WAIT_S) == frame
    await stream.finish(timeout_s=WAIT_S)
    assert await stream.receive(timeout_s=WAIT_S) is None
    stream.abort()
    stream.abort()


async def test_a_frame_is_the_concatenation_of_its_parts_which_may_be_reused_at_once(
    world: World,
) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)
    stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
    part = bytearray(b"x" * 300_000)
    await stream.send(b"head", part, memoryview(part)[:5], timeout_s=WAIT_S)
    part[:] = b"y" * len(part)
    assert await stream.receive(timeout_s=WAIT_S) == b"head" + b"x" * 300_005


async def test_small_frames_that_are_sent_at_once_keep_their_order_with_the_others(
    world: World,
) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)
    stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
    await stream.send(b"first", timeout_s=WAIT_S)
    assert stream.send_now(b"sec", b"ond")
    await stream.send(b"third", timeout_s=WAIT_S)
    assert stream.send_now(b"fourth")
    for frame in (b"first", b"second", b"third", b"fourth"):
        assert await stream.receive(timeout_s=WAIT_S) == frame
    await stream.finish(timeout_s=WAIT_S)
    assert not stream.send_now(b"after the end")


async def test_a_sender_gives_up_if_the_receiver_never_reads_and_sends_nothing_at_once(
    world: World,
) -> None:
    anna, boris = await pair(world)

    async def deaf(stream: Stream) -> None:
        await asyncio.sleep(60)

    await boris.serve_streams("/test/deaf", deaf)
    stream = await anna.open_stream(boris.peer_id, "/test/deaf", timeout_s=WAIT_S)
    with pytest.raises(StreamBroken, match="silence"):
        for _ in range(64):
            await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=SHORT_S)
    assert not stream.send_now(b"x")


async def test_a_frame_over_the_limit_is_a_value_error_and_harms_nothing(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)
    stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="at most"):
        await stream.send(bytes(FRAME_MAX_BYTES), b"x", timeout_s=WAIT_S)
    await stream.send(b"fine", timeout_s=WAIT_S)
    assert await stream.receive(timeout_s=WAIT_S) == b"fine"


async def test_frames_can_still_be_received_after_finish(world: World) -> None:
    anna, boris = await pair(world)

    async def answer_at_the_end(stream: Stream) -> None:
        question = await stream.receive(timeout_s=WAIT_S)
        assert await stream.receive(timeout_s=WAIT_S) is None
        for number in range(3):
            await stream.send((question or b"") + bytes([number]), timeout_s=WAIT_S)
        await stream.finish(timeout_s=WAIT_S)

    await boris.serve_streams("/test/answer", answer_at_the_end)
    stream = await anna.open_stream(boris.peer_id, "/test/answer", timeout_s=WAIT_S)
    await stream.send(b"q", timeout_s=WAIT_S)
    await stream.finish(timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="after finish"):
        await stream.send(b"one more thing", timeout_s=WAIT_S)
    for number in range(3):
        assert await stream.receive(timeout_s=WAIT_S) == b"q" + bytes([number])
    assert await stream.receive(timeout_s=WAIT_S) is None
    stream.abort()


async def test_finish_returns_only_after_the_other_side_has_read_everything(world: World) -> None:
    anna, boris = await pair(world)
    read: list[bytes | None] = []

    async def slow(stream: Stream) -> None:
        for _ in range(4):
            await asyncio.sleep(0.05)
            read.append(await stream.receive(timeout_s=WAIT_S))

    await boris.serve_streams("/test/slow", slow)
    stream = await anna.open_stream(boris.peer_id, "/test/slow", timeout_s=WAIT_S)
    for number in range(3):
        await stream.send(bytes([number]), timeout_s=WAIT_S)
    await stream.finish(timeout_s=WAIT_S)
    assert read == [b"\0", b"\1", b"\2", None]
    stream.abort()


async def test_frames_in_front_of_the_acknowledgement_are_kept(world: World) -> None:
    anna, boris = await pair(world)

    async def talk_first(stream: Stream) -> None:
        for number in range(5):
            await stream.send(bytes([number]) * 1000, timeout_s=WAIT_S)
        assert await stream.receive(timeout_s=WAIT_S) is None
        await stream.finish(timeout_s=WAIT_S)

    await boris.serve_streams("/test/talk", talk_first)
    stream = await anna.open_stream(boris.peer_id, "/test/talk", timeout_s=WAIT_S)
    await stream.finish(timeout_s=WAIT_S)
    for number in range(5):
        assert await stream.receive(timeout_s=WAIT_S) == bytes([number]) * 1000
    assert await stream.receive(timeout_s=WAIT_S) is None
    stream.abort()


async def test_a_frame_can_be_received_into_the_callers_memory(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)
    stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
    target = bytearray(b"-" * 10)
    await stream.send(b"sixsix", timeout_s=WAIT_S)
    assert await stream.receive_into(memoryview(target), timeout_s=WAIT_S) == 6
    assert target == b"sixsix----"
    await stream.send(b"eleven byte", timeout_s=WAIT_S)
    with pytest.raises(StreamBroken, match="11 bytes where 10"):
        await stream.receive_into(memoryview(target), timeout_s=WAIT_S)
    with pytest.raises(StreamBroken):
        await stream.send(b"x", timeout_s=WAIT_S)


async def broken_end(world: World, handler: Callable[[Stream], object]) -> None:
    """Open a stream to a handler that sends ``ready``, and see it break after that."""
    anna, boris = await pair(world)

    async def serve(stream: Stream) -> None:
        await stream.send(b"ready", timeout_s=WAIT_S)
        result = handler(stream)
        if asyncio.iscoroutine(result):
            await result

    await boris.serve_streams("/test/broken", serve)
    stream = await anna.open_stream(boris.peer_id, "/test/broken", timeout_s=WAIT_S)
    assert await stream.receive(timeout_s=WAIT_S) == b"ready"
    with pytest.raises(StreamBroken) as caught:
        await stream.receive(timeout_s=WAIT_S)
    assert caught.value.peer == boris.peer_id
    with pytest.raises(StreamBroken):
        await stream.finish(timeout_s=WAIT_S)


async def test_a_handler_that_returns_without_finish_breaks_the_stream(world: World) -> None:
    await broken_end(world, lambda stream: None)


async def test_a_handler_that_gives_up_breaks_the_stream(world: World) -> None:
    async def give_up(stream: Stream) -> None:
        raise StreamBroken(stream.remote, "given up")

    await broken_end(world, give_up)


def test_a_bug_in_a_stream_handler_breaks_the_stream_and_is_reported(world: World) -> None:
    async def fail(stream: Stream) -> None:
        raise KeyError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        world.run(broken_end(world, fail))
    assert caught.value.subgroup(KeyError)


async def test_an_aborted_stream_breaks_at_the_other_side(world: World) -> None:
    anna, boris = await pair(world)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def listen(stream: Stream) -> None:
        try:
            await stream.receive(timeout_s=WAIT_S)
            await stream.receive(timeout_s=WAIT_S)
            ended.set_result("whole")
        except StreamBroken:
            ended.set_result("broken")

    await boris.serve_streams("/test/listen", listen)
    stream = await anna.open_stream(boris.peer_id, "/test/listen", timeout_s=WAIT_S)
    await stream.send(b"beginning", timeout_s=WAIT_S)
    await asyncio.sleep(0.1)
    stream.abort()
    assert await asyncio.wait_for(ended, WAIT_S) == "broken"
    with pytest.raises(StreamBroken):
        await stream.receive(timeout_s=WAIT_S)


async def test_silence_breaks_a_stream_after_the_timeout(world: World) -> None:
    anna, boris = await pair(world)

    async def silent(stream: Stream) -> None:
        await asyncio.sleep(60)

    await boris.serve_streams("/test/silent", silent)
    stream = await anna.open_stream(boris.peer_id, "/test/silent", timeout_s=WAIT_S)
    started = asyncio.get_running_loop().time()
    with pytest.raises(StreamBroken, match="silence"):
        await stream.receive(timeout_s=SHORT_S)
    assert SHORT_S <= asyncio.get_running_loop().time() - started < WAIT_S
    stream = await anna.open_stream(boris.peer_id, "/test/silent", timeout_s=WAIT_S)
    with pytest.raises(StreamBroken):
        await stream.finish(timeout_s=SHORT_S)


async def test_a_sender_waits_until_the_receiver_reads(
    world: World,
) -> None:
    anna, boris = await pair(world)
    may_read = asyncio.Event()
    total = 64

    async def lazy(stream: Stream) -> None:
        await may_read.wait()
        count = 0
        while await stream.receive(timeout_s=WAIT_S) is not None:
            count += 1
        assert count == total

    await boris.serve_streams("/test/lazy", lazy)
    stream = await anna.open_stream(boris.peer_id, "/test/lazy", timeout_s=WAIT_S)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(total):
            await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=WAIT_S)
            sent += 1
        await stream.finish(timeout_s=WAIT_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all())
        await asyncio.sleep(1.0)
        assert sent < total / 2
        may_read.set()
    stream.abort()


async def test_ten_streams_at_once_do_not_mix(world: World) -> None:
    anna, boris = await pair(world)
    await boris.serve_streams("/test/frames", return_frames)

    async def talk(number: int) -> None:
        stream = await anna.open_stream(boris.peer_id, "/test/frames", timeout_s=WAIT_S)
        for size in (10, 100_000, 1):
            frame = bytes([number]) * size
            await stream.send(frame, timeout_s=WAIT_S)
            assert await stream.receive(timeout_s=WAIT_S) == frame
        await stream.finish(timeout_s=WAIT_S)
        assert await stream.receive(timeout_s=WAIT_S) is None
        stream.abort()

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(talk(number))


async def test_a_host_that_closes_breaks_streams_and_calls_at_once(world: World) -> None:
    anna, boris = await pair(world)

    async def wait(stream: Stream) -> None:
        await forever()

    async def sleep(peer: PeerId, request: bytes) -> bytes:
        await forever()
        return b""

    await boris.serve_streams("/test/wait", wait)
    await boris.serve_calls("/test/sleep", sleep, request_max_bytes=10)
    stream = await anna.open_stream(boris.peer_id, "/test/wait", timeout_s=WAIT_S)
    started = asyncio.get_running_loop().time()

    async def broken_call() -> None:
        with pytest.raises((PeerUnreachable, CallRefused)):
            await anna.call(boris.peer_id, "/test/sleep", b"", timeout_s=2 * WAIT_S)

    async def broken_stream() -> None:
        with pytest.raises(StreamBroken):
            await stream.receive(timeout_s=2 * WAIT_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(broken_call())
        tasks.create_task(broken_stream())
        await asyncio.sleep(0.2)
        await boris.close()
    assert asyncio.get_running_loop().time() - started < WAIT_S


# The directory.


def record(
    world: World, name: str, *, key: str = KEY, sequence: int = 1, ttl_s: float = 30.0
) -> bytes:
    content = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, name=name)
    return seal(content, world.identity(name), key=key, sequence=sequence, ttl_s=ttl_s)


async def test_records_are_found_by_peers_that_were_introduced_through_others(
    world: World,
) -> None:
    anna, boris = await pair(world)
    clara = await world.host("clara")
    await clara.connect(boris.peer_id, await boris.addresses(), timeout_s=WAIT_S)
    mine = record(world, "anna")
    assert await anna.directory.publish(KEY, mine, timeout_s=WAIT_S) >= 1
    theirs = record(world, "clara")
    assert await clara.directory.publish(KEY, theirs, timeout_s=WAIT_S) >= 1

    everything = {anna.peer_id: mine, clara.peer_id: theirs}
    for host in (anna, boris, clara):
        assert await host.directory.look_up(KEY, timeout_s=WAIT_S) == everything


async def test_a_quick_look_up_finds_what_a_thorough_one_did_although_a_holder_is_gone(
    world: World,
) -> None:
    anna, boris = await pair(world)
    clara = await world.host("clara")
    for host in (anna, boris):
        await clara.connect(host.peer_id, await host.addresses(), timeout_s=WAIT_S)
    mine = record(world, "anna")
    assert await anna.directory.publish(KEY, mine, timeout_s=WAIT_S) >= 1
    for quick in (True, False, True, True):
        found = await clara.directory.look_up(KEY, timeout_s=WAIT_S, quick=quick)
        assert found == {anna.peer_id: mine}

    newer = record(world, "anna", sequence=2)
    assert await anna.directory.publish(KEY, newer, timeout_s=WAIT_S) >= 1
    await boris.close()
    for _ in range(3):  # each holder has its turn
        found = await clara.directory.look_up(KEY, timeout_s=WAIT_S, quick=True)
        assert found == {anna.peer_id: newer}


async def test_an_unknown_key_has_no_records(world: World) -> None:
    anna, _ = await pair(world)
    assert await anna.directory.look_up("run/peers/1", timeout_s=WAIT_S) == {}


async def test_a_host_without_peers_stores_nothing_elsewhere_and_finds_at_most_its_own_records(
    world: World,
) -> None:
    anna = await world.host("anna")
    mine = record(world, "anna")
    assert await anna.directory.publish(KEY, mine, timeout_s=SHORT_S) == 0
    found = await anna.directory.look_up(KEY, timeout_s=SHORT_S)
    assert found in ({}, {anna.peer_id: mine})


async def test_a_newer_record_replaces_an_older_one_and_never_the_reverse(world: World) -> None:
    anna, boris = await pair(world)
    old = record(world, "anna", sequence=1, ttl_s=300.0)  # it would hold for longer
    new = record(world, "anna", sequence=2)
    for sealed in (old, new):
        assert await anna.directory.publish(KEY, sealed, timeout_s=WAIT_S) == 1
    assert await boris.directory.look_up(KEY, timeout_s=WAIT_S) == {anna.peer_id: new}
    assert await anna.directory.publish(KEY, old, timeout_s=WAIT_S) == 0
    assert await boris.directory.look_up(KEY, timeout_s=WAIT_S) == {anna.peer_id: new}


async def test_a_record_of_another_peer_or_another_key_is_not_stored(world: World) -> None:
    anna, boris = await pair(world)
    borrowed = record(world, "boris")
    assert await anna.directory.publish(KEY, borrowed, timeout_s=WAIT_S) == 0
    misplaced = record(world, "anna", key="run/peers/01")
    assert await anna.directory.publish(KEY, misplaced, timeout_s=WAIT_S) == 0
    assert await anna.directory.publish(KEY, b"nonsense", timeout_s=WAIT_S) == 0
    assert await boris.directory.look_up(KEY, timeout_s=WAIT_S) == {}


async def test_a_record_expires(world: World) -> None:
    anna, boris = await pair(world)
    # A busy machine may take longer for a look-up than the first records live.
    for sequence, ttl_s in enumerate((1.0, 4.0, 16.0), 1):
        mine = record(world, "anna", sequence=sequence, ttl_s=ttl_s)
        await anna.directory.publish(KEY, mine, timeout_s=WAIT_S)
        seen = await boris.directory.look_up(KEY, timeout_s=WAIT_S)
        await asyncio.sleep(ttl_s + 0.3)
        assert await boris.directory.look_up(KEY, timeout_s=WAIT_S) == {}
        if seen:
            break
    assert seen == {anna.peer_id: mine}

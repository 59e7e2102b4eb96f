"""Hosts that change a part of another one: a rate is held, and a peer is dialled by its record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dht.errors import PeerUnreachable, StreamBroken
from dht.host import Messaging, Stream
from dht.identity import Identity
from dht.memory.host import MemoryNetwork
from dht.memory.network import Weather
from dht.wrapped_host import FREE_FRAME_BYTES, DiallingHost, Gate, ThrottledHost

FAST = Weather(latency_s=(0.001, 0.001))
FRAME = bytes(512 << 10)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[ThrottledHost, Stream, Stream]]:
    """A throttled host, its end of a stream, and the other's end, which is not throttled."""
    network = MemoryNetwork(FAST)
    anna, boris = network.host("anna"), network.host("boris")
    throttled = ThrottledHost(anna, up=Gate(), down=Gate())
    theirs: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def serve(stream: Stream) -> None:
        theirs.set_result(stream)
        await over.wait()

    await boris.serve_streams("/frames", serve)
    await anna.connect(boris.peer_id, await boris.addresses(), timeout_s=5)
    ours = await throttled.open_stream(boris.peer_id, "/frames", timeout_s=5)
    await ours.send(b"begin", timeout_s=5)
    other = await theirs
    assert await other.receive(timeout_s=5) == b"begin"
    yield throttled, ours, other
    over.set()
    ours.abort()
    await asyncio.sleep(1.0)


async def carry(sender: Stream, receiver: Stream, frames: int) -> float:
    """Seconds that so many frames take."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def send() -> None:
        for _ in range(frames):
            await sender.send(FRAME, timeout_s=60)

    async def receive() -> None:
        got = 0
        while got < frames:
            got += len(await receiver.receive(timeout_s=60) or b"") == len(FRAME)

    await asyncio.gather(send(), receive())
    return loop.time() - began


@pytest.mark.parametrize("rate", [150_000.0, 1e6, 20e6])
async def test_a_rate_is_held_within_a_tenth_in_both_directions(rate: float) -> None:
    async with pair() as (host, ours, theirs):
        host.up.set_rate(rate)
        host.down.set_rate(rate)
        frames = 60
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            took_s = await carry(sender, receiver, frames)
            held = frames * len(FRAME) / took_s
            assert held == pytest.approx(rate, rel=0.1), held


async def test_a_rate_that_is_changed_counts_at_once() -> None:
    async with pair() as (host, ours, theirs):
        host.up.set_rate(100.0)  # a frame would take an hour and a half
        await ours.send(FRAME, timeout_s=60)
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting = asyncio.create_task(carry(ours, theirs, 10))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        host.up.set_rate(None)
        await waiting
        assert loop.time() - began < 6.0
        assert await carry(ours, theirs, 40) < 1.0, "no limit any more"


async def test_a_small_frame_never_waits_but_counts() -> None:
    async with pair() as (host, ours, _):
        loop = asyncio.get_running_loop()
        host.up.set_rate(1000.0)
        passed = host.up.passed
        await ours.send(FRAME, timeout_s=60)
        began = loop.time()
        for _ in range(10):
            await ours.send(bytes(FREE_FRAME_BYTES), timeout_s=60)
        assert loop.time() - began < 1.0
        assert host.up.passed - passed == len(FRAME) + 10 * FREE_FRAME_BYTES
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await host.up.pass_through(FREE_FRAME_BYTES + 1)


async def test_an_hour_of_unused_rate_is_worth_a_moment() -> None:
    gate, loop = Gate(), asyncio.get_running_loop()
    gate.set_rate(100_000.0)
    await asyncio.sleep(3600.0)
    began = loop.time()
    for passed_at in (0.0, 0.4):
        await gate.pass_through(50_000)
        assert loop.time() - began == pytest.approx(passed_at)


async def test_a_closed_protocol_begins_no_stream_either_way_and_the_rest_goes_on() -> None:
    network = MemoryNetwork(FAST)
    anna, boris = network.host("anna"), network.host("boris")
    closed = {"/bulk"}
    limited = ThrottledHost(
        anna,
        up=Gate(),
        down=Gate(),
        closed=lambda protocol: "used up" if protocol in closed else None,
    )
    heard: list[str] = []

    def hear(host: Messaging, protocol: str) -> Coroutine[Any, Any, None]:
        async def serve(stream: Stream) -> None:
            heard.append(f"{host.peer_id} {protocol}")
            await stream.receive(timeout_s=5)

        return host.serve_streams(protocol, serve)

    for protocol in ("/bulk", "/control"):
        await hear(limited, protocol)
        await hear(boris, protocol)
    await anna.connect(boris.peer_id, await boris.addresses(), timeout_s=5)
    ours = await limited.open_stream(boris.peer_id, "/control", timeout_s=5)
    with pytest.raises(PeerUnreachable, match="used up"):
        await limited.open_stream(boris.peer_id, "/bulk", timeout_s=5)
    theirs = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=5)
    with pytest.raises(StreamBroken):
        await theirs.receive(timeout_s=5)
    await ours.send(b"small", timeout_s=5)
    await asyncio.sleep(1.0)
    assert heard == [f"{boris.peer_id} /control"]
    closed.clear()
    again = await boris.open_stream(anna.peer_id, "/bulk", timeout_s=5)
    await again.send(b"x", timeout_s=5)
    await asyncio.sleep(1.0)
    assert heard[1:] == [f"{anna.peer_id} /bulk"]
    for stream in (ours, theirs, again):
        stream.abort()
    await asyncio.sleep(1.0)


async def leave_open(stream: Stream) -> None: ...


@pytest.mark.parametrize("known", [True, False])
async def test_a_stream_is_opened_to_a_peer_of_which_only_the_addresses_are_known(
    known: bool,
) -> None:
    network = MemoryNetwork()
    anna, boris = (network.host(Identity.generate()) for _ in range(2))
    await boris.serve_streams("talk", leave_open)
    found = await boris.addresses() if known else ()
    dialling = DiallingHost(anna, lambda peer: found, dials=anna)
    with pytest.raises(PeerUnreachable):
        await anna.open_stream(boris.peer_id, "talk", timeout_s=1.0)

    if known:
        stream = await dialling.open_stream(boris.peer_id, "talk", timeout_s=1.0)
        assert stream.remote == boris.peer_id
    else:
        with pytest.raises(PeerUnreachable):
            await dialling.open_stream(boris.peer_id, "talk", timeout_s=1.0)
    await anna.close()
    await boris.close()

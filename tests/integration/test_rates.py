"""Rate limits hold between real hosts, and can change during a transfer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dht.host import Stream
from dht.libp2p.lane.connection import LaneSettings
from dht.wrapped_host import Gate, ThrottledHost
from tests.integration.loopback import LOOPBACK, hosts, run
from tests.swarms.commands import tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FRAME = bytes(256 << 10)
SECONDS = 8.0


async def send_for_ever(stream: Stream) -> None:
    while True:
        await stream.send(FRAME, timeout_s=30)


async def bytes_per_s(stream: Stream, *, seconds: float) -> float:
    """Received bytes per second."""
    loop = asyncio.get_running_loop()
    began, got = loop.time(), 0
    while loop.time() - began < seconds:
        got += len(await stream.receive(timeout_s=30) or b"")
    return got / (loop.time() - began)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("lane", [None, LaneSettings(wait_s=10.0)], ids=["daemon", "lane"])
def test_a_rate_is_held_within_a_tenth_between_real_hosts(
    direction: str, lane: LaneSettings | None
) -> None:
    async def work() -> None:
        settings = replace(LOOPBACK, lane=lane)
        async with hosts(settings, settings) as (anna, boris):
            up, down = Gate(), Gate()
            throttled = ThrottledHost(anna, up=up, down=down)
            opened: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
            over = asyncio.Event()

            async def serve(stream: Stream) -> None:
                opened.set_result(stream)
                await over.wait()

            await boris.serve_streams("/frames", serve)
            ours = await throttled.open_stream(boris.peer_id, "/frames", timeout_s=10, bulk=True)
            assert anna.lane is None or anna.lane.counters["streams_opened"] == 1
            await ours.send(b"begin", timeout_s=5)
            theirs = await opened
            await theirs.receive(timeout_s=5)
            gate = up if direction == "up" else down
            sender, receiver = (ours, theirs) if direction == "up" else (theirs, ours)
            sending = asyncio.create_task(send_for_ever(sender))
            for rate in (1e6, 3e6):
                gate.set_rate(rate)
                await bytes_per_s(receiver, seconds=1.0)  # sent at the previous rate
                held = await bytes_per_s(receiver, seconds=SECONDS)
                tell(f"{direction} {rate / 1e6:g} MB/s: held {held / 1e6:.3f}")
                assert held == pytest.approx(rate, rel=0.1)
            sending.cancel()
            await asyncio.wait([sending])
            over.set()
            ours.abort()

    run(work(), timeout_s=120)

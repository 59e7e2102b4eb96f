"""Rates hold between real hosts as they do on the simulated network, and change while running."""

from __future__ import annotations

import asyncio

import pytest

from dht.host import Stream
from dht.throttled_host import Gate, ThrottledHost
from tests.integration.loopback import hosts, run
from tests.integration.swarm_processes import tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FRAME = bytes(256 << 10)
SECONDS = 8.0


async def bytes_per_s(sender: Stream, receiver: Stream) -> float:
    """What arrives while the sender sends as fast as it may."""
    loop = asyncio.get_running_loop()

    async def send() -> None:
        while True:
            await sender.send(FRAME, timeout_s=30)

    async def receive(seconds: float) -> float:
        began, got = loop.time(), 0
        while loop.time() - began < seconds:
            got += len(await receiver.receive(timeout_s=30) or b"")
        return got / (loop.time() - began)

    sending = asyncio.create_task(send())
    try:
        await receive(1.0)  # what was on its way belongs to the rate before
        return await receive(SECONDS)
    finally:
        sending.cancel()
        await asyncio.wait([sending])


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_rate_is_held_within_a_tenth_between_real_hosts(direction: str) -> None:
    async def work() -> None:
        async with hosts(2) as (anna, boris):
            up, down = Gate(), Gate()
            throttled = ThrottledHost(anna, up=up, down=down)
            opened: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
            over = asyncio.Event()

            async def serve(stream: Stream) -> None:
                opened.set_result(stream)
                await over.wait()

            await boris.serve_streams("/frames", serve)
            ours = await throttled.open_stream(boris.peer_id, "/frames", timeout_s=10)
            await ours.send(b"begin", timeout_s=5)
            theirs = await opened
            await theirs.receive(timeout_s=5)
            gate = up if direction == "up" else down
            ends = (ours, theirs) if direction == "up" else (theirs, ours)
            for rate in (1e6, 3e6):
                gate.set_rate(rate)
                held = await bytes_per_s(*ends)
                tell(f"{direction} {rate / 1e6:g} MB/s: held {held / 1e6:.3f}")
                assert held == pytest.approx(rate, rel=0.1)
            over.set()
            ours.abort()

    run(work(), timeout_s=120)

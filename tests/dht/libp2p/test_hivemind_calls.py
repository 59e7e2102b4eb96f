"""Unary calls over the connection with the daemon."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from dht.libp2p.hivemind_calls import UnaryCalls, varint
from dht.libp2p.hivemind_imports import PeerID, p2pd_pb2


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")]
)
def test_lengths_are_written_as_the_daemon_reads_them(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded


async def test_slow_calls_of_few_keys_do_not_take_the_places_of_all_calls() -> None:
    """64 keys with 16 calls for meetings each held all places for ten seconds."""
    calls = UnaryCalls()
    answered: list[bytes] = []

    async def handle(data: bytes, peer: PeerID) -> bytes:
        if data == b"slow":
            await asyncio.Event().wait()
        answered.append(peer.to_bytes())
        return b""

    calls._handlers["/test"] = handle

    async def ask(peer: bytes, data: bytes) -> None:
        request = p2pd_pb2.CallUnaryRequest(peer=peer, proto="/test", data=data)
        calls._begin_request(uuid4(), request)
        await asyncio.sleep(0)

    calls._places.in_all = 64
    for number in range(64):
        await ask(b"key%d" % (number % 8), b"slow")
    for _ in range(3):
        await ask(b"anna", b"quick")
        await asyncio.sleep(0)

    assert answered == 3 * [b"anna"]
    assert len(calls._tasks) <= 64
    tasks = list(calls._tasks.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

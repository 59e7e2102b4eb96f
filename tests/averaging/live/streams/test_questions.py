"""Streams on which one peer asks and the other answers."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from averaging.live.streams.questions import (
    DATA,
    STALL_MAX_S,
    answer_requests,
    ask,
    next_data,
    stream_to,
)
from dht.host import Stream
from dht.memory.host import MemoryNetwork
from tests.averaging.live.links import introduce

PROTOCOL = "questions/1"


class AskNumber(msgspec.Struct, array_like=True):
    number: int


NUMBERS = msgspec.msgpack.Decoder(AskNumber)


async def test_a_stream_ends_when_its_questions_are_answered_and_its_connection_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stream that is dropped takes the connection with it, and the next one has to dial."""
    caplog.set_level(logging.DEBUG)
    ended = asyncio.Event()

    async def serve(stream: Stream) -> None:
        async def answer(request: AskNumber) -> None:
            await stream.send(DATA, bytes([request.number]), timeout_s=STALL_MAX_S)

        await answer_requests(stream, NUMBERS, answer)
        ended.set()

    network = MemoryNetwork()
    anna, boris = network.host("anna"), network.host("boris")
    await introduce(anna, boris)
    await boris.serve_streams(PROTOCOL, serve)
    async with stream_to(anna, boris.peer_id, PROTOCOL) as stream:
        for number in (3, 5):
            await ask(stream, AskNumber(number))
            assert bytes(await next_data(stream)) == bytes([number])
    await ended.wait()
    assert "answers_broken" not in caplog.text

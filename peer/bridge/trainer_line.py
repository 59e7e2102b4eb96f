"""The agent's end of the line to its trainer, on the agent's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from peer.bridge.messages import (
    MESSAGE_MAX_BYTES,
    Beat,
    Frames,
    FromAgent,
    FromTrainer,
    LineBroken,
    decode_from_trainer,
    pack,
)


class TrainerLine:
    """The agent's end of the line, in its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.heard_at = asyncio.get_running_loop().time()
        self._asked = 0
        """Number of the question that was asked last."""
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        """Questions without an answer yet, by number."""

    @classmethod
    async def open(cls, descriptor: int) -> TrainerLine:
        line = socket.socket(fileno=descriptor)
        reader, writer = await asyncio.open_unix_connection(sock=line)
        return cls(reader, writer)

    def say(self, message: FromAgent) -> None:
        """Send a message without waiting. A trainer that does not read misses news, not state."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() < MESSAGE_MAX_BYTES:
            self._writer.write(pack(message))

    async def ask(
        self, question: Callable[[int], FromAgent], *, within_s: float | None = None
    ) -> Any:
        """The answer to ``question(number)``, which is asked now. Raises ``TimeoutError``."""
        self._asked = number = self._asked + 1
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self.say(question(number))
            async with asyncio.timeout(within_s):
                return await answer
        finally:
            del self._waiting[number]

    def answered(self, number: int, message: FromTrainer) -> None:
        """The trainer has answered a question. An answer that comes too late is dropped."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def messages(self) -> AsyncIterator[FromTrainer]:
        """Messages of the trainer, until the line is closed. Raises ``LineBroken``."""
        frames = Frames()
        while True:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            self.heard_at = asyncio.get_running_loop().time()
            for frame in frames.feed(data):
                try:
                    yield decode_from_trainer(frame)
                except msgspec.DecodeError as error:
                    raise LineBroken(str(error)) from error

    async def beat(self, every_s: float = 1.0) -> None:
        """Send signs of life to the trainer, for ever."""
        while True:
            self.say(Beat())
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def hear_doorbell(descriptor: int, rang: Callable[[], None]) -> Callable[[], None]:
    """Call ``rang`` whenever the trainer rings. Returns a function that ends this."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def on_readable() -> None:
        try:
            data = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        if data:
            rang()
        else:  # the trainer is gone, and the line is closed as well
            loop.remove_reader(descriptor)

    loop.add_reader(descriptor, on_readable)

    def stop() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    return stop

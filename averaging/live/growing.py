"""Bytes that one task writes from the front while others already read behind it.

This is how encoding overlaps with sending, merging with answering, and checking with receiving.
"""

from __future__ import annotations

import asyncio

from averaging.errors import AveragingError


class Abandoned(AveragingError):
    """The bytes will never be complete, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"abandoned: {self.reason}"


class Growing:
    """A range of bytes and how far it is filled.

    Only the loop's thread touches the object; others may look whether it is ``lost``.
    """

    __slots__ = ("_waiting", "data", "filled", "lost")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.filled = 0
        self.lost: str | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @classmethod
    def whole(cls, data: memoryview) -> Growing:
        """Of bytes that are all here."""
        growing = cls(data)
        growing.filled = len(data)
        return growing

    def __repr__(self) -> str:
        return f"Growing({self.filled} of {len(self.data)}{', lost' if self.lost else ''})"

    @property
    def complete(self) -> bool:
        return self.filled == len(self.data) and self.lost is None

    def grow(self, filled: int) -> None:
        """The first ``filled`` bytes are final now."""
        assert self.filled <= filled <= len(self.data)
        self.filled = filled
        self._wake()

    def abandon(self, reason: str) -> None:
        """No more bytes will come. Those who wait are told."""
        if not self.complete:
            self.lost = self.lost or reason
            self._wake()

    async def beyond(self, start: int) -> int:
        """Wait until more than ``start`` bytes are final; returns how many are.

        Also returns at the end. Raises ``Abandoned``. The deadline is the caller's.
        """
        while self.filled <= start and self.filled < len(self.data):
            if self.lost is not None:
                raise Abandoned(self.lost)
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return self.filled

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

"""The order of what a peer sends over a slow line: one transfer at a time.

Transfers that share a line all end late. Three homes at 1 Mbit/s have the bytes of several rounds
under way at once: each round then takes most of a cycle, so that the next one of its fragment
begins while somebody is still busy with it, and a home that has missed one fetches its replay over
lines that are full. So on a slow line replays go first, then the transfers of the oldest round.
docs/research/results-faults.md has the figures.

A transfer that takes much longer than its bytes need waits for its receiver and not for the line:
it lets the next one in. None waits for long, because its receiver gives up a silent stream.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from heapq import heappop, heappush
from typing import Final

FIRST: Final = -math.inf
"""``since`` of a transfer that goes before all rounds."""

SMALL_BYTES: Final = 16 << 10
"""Transfers of at most so many bytes wait for no turn."""

WAIT_MAX_S: Final = 10.0
"""A transfer that has waited for so long is sent beside the others: half of the time after which
its receiver takes a silent stream for broken."""

LONGER_MAX: Final = 2.0
LATER_S: Final = 0.5
"""A turn ends after so many times as long as its bytes take, and so much later."""


_BESIDE_OTHERS: Final[AbstractAsyncContextManager[None]] = nullcontext()


class Uplink:
    """The turns of one peer's transfers, in all its rounds."""

    def __init__(self, slow_bytes_s: Callable[[], float] = lambda: 0.0) -> None:
        """``slow_bytes_s``: speed of a line that is slow; 0 for another one, which all share."""
        self._slow_bytes_s = slow_bytes_s
        self._has_turn: asyncio.Future[None] | None = None
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def turn(self, size: int, *, since: float) -> AbstractAsyncContextManager[None]:
        """Wait until ``size`` bytes may be sent. ``since``: when their round began here."""
        speed = self._slow_bytes_s()
        if size <= SMALL_BYTES or speed <= 0.0:
            return _BESIDE_OTHERS
        return self._turn(size, speed, since)

    @asynccontextmanager
    async def _turn(self, size: int, speed: float, since: float) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (since, next(self._numbers), mine))
        self._let_next_in()
        lapse: asyncio.TimerHandle | None = None
        try:
            await asyncio.wait((mine,), timeout=WAIT_MAX_S)
            if mine.done():
                lapse = loop.call_later(LONGER_MAX * size / speed + LATER_S, self._end, mine)
            yield
        finally:
            if lapse is not None:
                lapse.cancel()
            mine.cancel()
            self._end(mine)

    def _end(self, turn: asyncio.Future[None]) -> None:
        if self._has_turn is turn:
            self._has_turn = None
            self._let_next_in()

    def _let_next_in(self) -> None:
        while self._waiting and self._has_turn is None:
            _, _, turn = heappop(self._waiting)
            if not turn.done():  # else its sender did not wait for it
                self._has_turn = turn
                turn.set_result(None)

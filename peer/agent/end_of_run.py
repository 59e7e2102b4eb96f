"""One peer's ``Ending`` with a clock: what happens is heard at once, from anywhere.

What follows from it waits here until ``peer.agent.leaving`` does it, from the first states on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peer.rules.ending import Effect, Ending, Input, State

T = TypeVar("T")


class EndOfRun:
    """The inputs that an ``Ending`` has heard, and the effects that are still to be carried out."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.todo: deque[tuple[State, Effect]] = deque()
        """The effects to carry out, each with the state that it follows from."""
        self._news: asyncio.Future[None] | None = None
        """Done when something is heard that changes the state, or is to be acted upon."""

    def __repr__(self) -> str:
        return f"EndOfRun({self.ending!r}, todo={len(self.todo)})"

    def hear(self, heard: Input) -> None:
        before = self.ending.state
        now = asyncio.get_running_loop().time()
        effects = self.ending.hear(heard, now=now, wall_time=time.time())
        self.todo.extend((self.ending.state, effect) for effect in effects)
        is_news = bool(effects) or self.ending.state is not before
        if is_news and self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _next_news(self) -> asyncio.Future[None]:
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    async def happens(self, *, within_s: float) -> bool:
        """Wait for news, so long at most. Returns whether there are any."""
        done, _ = await asyncio.wait((self._next_news(),), timeout=within_s)
        return bool(done)

    async def unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; ``None``, with ``work`` cancelled, if this peer leaves first."""
        return await self.unless(lambda: self.ending.departure is not None, work)

    async def unless(self, is_void: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; ``None``, with ``work`` cancelled, if it is void before."""
        working = asyncio.ensure_future(work)
        try:
            while not (working.done() or is_void()):
                await asyncio.wait(
                    (working, self._next_news()), return_when=asyncio.FIRST_COMPLETED
                )
            return working.result() if working.done() else None
        finally:
            working.cancel()
            await asyncio.wait((working,))

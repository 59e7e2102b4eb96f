"""Running a command's coroutine on a fast event loop, until it is done or told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from peer import signals

T = TypeVar("T")


def run_until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` with an event that the first signal sets (``peer.signals``), to end in order.

    A second, insisting signal cancels ``main`` and raises ``KeyboardInterrupt``.
    """
    earlier = {number: signal.getsignal(number) for number in signals.asking()}

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        stop = asyncio.Event()

        def signalled(number: signal.Signals) -> None:
            if stop.is_set() and number in signals.INSISTING:
                task.cancel()
            stop.set()

        for number in earlier:
            loop.add_signal_handler(number, signalled, number)
        return await main(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in earlier.items():  # uvloop leaves its own behind
            signal.signal(number, handler)


def run_unless_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, which the first signal cancels: there is nothing to finish."""
    return run_until_stopped(lambda stop: unless_stopped(stop, work))


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which the first signal cancels: there is nothing to finish."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise asyncio.CancelledError
        return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))

"""Signals that ask a process to end, and event loops that end in order when one comes.

Ctrl-C (SIGINT) and SIGTERM ask the first time and insist the second time. A closed terminal
(SIGHUP) asks as well, but never insists: shell and kernel both send it, one right after the other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

INSISTING = (signal.SIGINT, signal.SIGTERM)


def asking() -> tuple[signal.Signals, ...]:
    """The signals to handle, read before setting handlers: ``nohup`` may have ignored SIGHUP."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return INSISTING
    return (*INSISTING, signal.SIGHUP)


@contextmanager
def second_ends(last: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the process at once when a second one insists, also in the middle of an operation.

    ``last`` is called before, on another thread than that of the operation.

    Python runs handlers between two operations. Several signals during one, such as the backward
    pass of a large batch, are a single one to them: a thread counts what really came.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    counted = asking()

    def count() -> None:
        asked = False
        while received := ours.recv(64):
            for number in received:
                if asked and number in INSISTING:
                    try:
                        last()
                    finally:
                        os._exit(128 + number)
                asked = asked or number in counted

    thread = threading.Thread(target=count, name="signals", daemon=True)
    thread.start()
    earlier = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        theirs.shutdown(socket.SHUT_WR)  # a process that was forked meanwhile has it open
        theirs.close()
        thread.join()
        ours.close()


@contextmanager
def handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have ``handle`` called with each of these signals within the block."""
    earlier = {number: signal.signal(number, handle) for number in asking()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def as_interrupts() -> AbstractContextManager[None]:
    """Let each of these signals raise ``KeyboardInterrupt`` within the block, as Ctrl-C does.

    For programs that have started processes in sessions of their own, which only they can end.
    """
    return handled(_interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number not in INSISTING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def terminations(heard: Callable[[], None]) -> Iterator[None]:
    """Call ``heard`` at the first SIGTERM within the block, where it would kill the process.

    A second one kills. Only in the main thread, and not where the program handles SIGTERM itself.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        heard()

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Let the first of these signals wait for the end of the block, which must not be left halfway.

    A second one insists, and is handled at once. Python handles signals in the main thread: in any
    other one nothing has to wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The others end the process, or are ignored: nothing is left halfway by them.
    handlers = {each: given for each in asking() if callable(given := signal.getsignal(each))}
    waiting: list[tuple[int, FrameType | None]] = []
    holds = True

    def give_back() -> None:
        nonlocal holds
        holds = False
        for each, given in handlers.items():
            signal.signal(each, given)

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting and holds and number in INSISTING:
            waiting.clear()
            give_back()
            handlers[signal.Signals(number)](number, frame)
        else:
            waiting.append((number, frame))

    try:
        for each in handlers:
            signal.signal(each, hold)
        yield
    finally:
        if holds:
            give_back()
        for number, frame in waiting[:1]:
            handlers[signal.Signals(number)](number, frame)


# --- event loops of commands --------------------------------------------------------------------


def run_until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a fast event loop, with an event that the first signal sets, to end in order.

    A second, insisting signal cancels ``main`` and raises ``KeyboardInterrupt``.
    """
    import uvloop  # of commands alone: trainers import this module, too

    earlier = {number: signal.getsignal(number) for number in asking()}

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        stop = asyncio.Event()

        def signalled(number: signal.Signals) -> None:
            if stop.is_set() and number in INSISTING:
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

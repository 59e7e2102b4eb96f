"""Signals that ask a process to end.

Ctrl-C (SIGINT) and SIGTERM ask the first time and insist the second time. A closed terminal
(SIGHUP) asks as well, but never insists: shell and kernel both send it, one right after the other.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
def as_interrupts() -> Iterator[None]:
    """Let each of these signals raise ``KeyboardInterrupt`` within the block, as Ctrl-C does.

    For programs that have started processes in sessions of their own, which only they can end.
    """
    earlier = {number: signal.signal(number, _interrupt) for number in asking()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


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

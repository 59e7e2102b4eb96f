"""Signals that ask a process to end.

Ctrl-C (SIGINT) and SIGTERM ask the first time and insist the second time. A closed terminal
(SIGHUP) asks as well, but never insists: shell and kernel both send it, one right after the other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INSISTING = (signal.SIGINT, signal.SIGTERM)


def asking() -> tuple[signal.Signals, ...]:
    """The signals to handle, read before setting handlers: ``nohup`` may have ignored SIGHUP."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return INSISTING
    return (*INSISTING, signal.SIGHUP)


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

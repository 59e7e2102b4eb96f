"""By which signals a process is asked to end, and what they do to whom they only have to interrupt.

Ctrl-C and SIGTERM ask once and insist when they come again. So does a closed terminal (SIGHUP) ask,
but it never insists: shell and kernel both send it, one right after the other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INSISTING = (signal.SIGINT, signal.SIGTERM)


def asking() -> tuple[signal.Signals, ...]:
    """To be asked before any of them is handled: what ``nohup`` has ignored stays ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return INSISTING
    return (*INSISTING, signal.SIGHUP)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Within, each of them raises ``KeyboardInterrupt``, as Ctrl-C does.

    For whoever has started processes with sessions of their own: nobody ends those if it goes
    without a word.
    """
    usual = {number: signal.signal(number, _interrupt) for number in asking()}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number not in INSISTING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt

"""Signals: the first one asks, the second one insists."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from peer import signals
from peer.event_loop import run_until_stopped, unless_stopped


@pytest.fixture(autouse=True)
def usual_hangup() -> Iterator[None]:
    """Handle SIGHUP even if these tests were started with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop_in_good_order(number: signal.Signals) -> None:
    async def main(stop: asyncio.Event) -> str:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5)
        await asyncio.sleep(0.01)
        return "in good order"

    assert run_until_stopped(main) == "in good order"


def test_the_second_signal_ends_it_and_still_cleans_up() -> None:
    cleaned: list[bool] = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 5)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(main)
    assert cleaned == [True]


def test_a_closed_terminal_asks_twice_and_does_not_insist() -> None:
    async def main(stop: asyncio.Event) -> str:
        for _ in range(2):  # once from the shell, once from the kernel
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(stop.wait(), 5)
            await asyncio.sleep(0.01)
        return "in good order"

    assert run_until_stopped(main) == "in good order"


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main(stop: asyncio.Event) -> bool:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        return stop.is_set()

    assert run_until_stopped(main) is False


@pytest.mark.parametrize("number", signals.asking())
def test_a_program_with_processes_to_end_is_interrupted(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), signals.as_interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_waits_for_the_end_of_what_must_not_be_left_halfway() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals.held_back():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_insists_also_where_the_first_one_waits() -> None:
    heard: list[int] = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    earlier = signal.signal(signal.SIGINT, handler)
    try:
        with signals.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            assert not heard
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == [signal.SIGINT]
        assert heard == [signal.SIGINT]
        # What the handler has set stays.
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_in_another_thread_no_signal_is_held_back() -> None:
    def elsewhere() -> object:
        with signals.held_back():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result() is signal.default_int_handler


def test_an_exception_of_the_coroutine_is_raised() -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        run_until_stopped(main)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_there_is_nothing_to_finish_the_first_signal_ends_it() -> None:
    cleaned: list[bool] = []

    async def look() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(lambda stop: unless_stopped(stop, look()))
    assert cleaned == [True]


def test_a_result_before_a_request_to_stop_is_returned() -> None:
    async def look() -> str:
        return "found"

    assert run_until_stopped(lambda stop: unless_stopped(stop, look())) == "found"

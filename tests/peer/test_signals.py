"""Signals that ask a process to end, as a process gets them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from peer import signals
from peer.signals import run_until_stopped, terminations, unless_stopped
from tests.processes import Child

PROGRAM = """
import hashlib
import signal
from peer.signals import asking, second_ends

signal.signal(signal.SIGHUP, signal.HANGUP)  # whatever this test was started under
for each in asking():
    signal.signal(each, lambda number, frame: None)
with second_ends():
    print("works", flush=True)
    # Like an operation of torch: Python runs no handler before it is over.
    hashlib.pbkdf2_hmac("sha256", b"", b"", ITERATIONS)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("sent", "hangup", "iterations", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), "SIG_DFL", 2**31 - 1, 130),
        ((signal.SIGHUP, signal.SIGTERM), "SIG_DFL", 2**31 - 1, 143),
        ((signal.SIGHUP, signal.SIGTERM), "SIG_IGN", 2**22, 0),  # as under nohup
        ((signal.SIGHUP, signal.SIGHUP), "SIG_DFL", 2**22, 0),
        ((signal.SIGINT,), "SIG_DFL", 2**22, 0),
    ],
)
def test_a_second_signal_in_the_middle_of_an_operation_ends_the_process(
    sent: tuple[signal.Signals, ...], hangup: str, iterations: int, code: int
) -> None:
    """A handler of Python hears of both only after the operation, as if they were one."""
    program = PROGRAM.replace("ITERATIONS", str(iterations)).replace("HANGUP", hangup)
    with Child("-c", program) as child:
        assert child.line() == "works"
        for each in sent:
            time.sleep(0.3)
            child.process.send_signal(each)
        assert child.wait() == code
        assert child.rest() == ("" if code else "done\n")


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_block_from_ending() -> None:
    """It has a copy of the socket that wakes the thread."""
    program = """
import os, signal, time
from peer.signals import second_ends

with second_ends():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
os.kill(child, signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=30)


def test_the_first_sigterm_is_heard_and_a_second_one_kills() -> None:
    heard: list[int] = []
    with terminations(lambda: heard.append(1)):
        signal.raise_signal(signal.SIGTERM)
        assert heard == [1]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_handles_sigterm_itself_goes_on_doing_so() -> None:
    heard: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with terminations(lambda: heard.append(0)):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert heard == [signal.SIGTERM, signal.SIGTERM]


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

"""Signals that ask a process to end, as a process gets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from peer.signals import terminations
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

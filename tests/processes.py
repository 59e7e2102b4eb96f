"""Processes of tests, and checks that none is left behind.

A zombie (a process that has ended and waits for its parent) does not count as left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from peer.demo.processes import Output, family, kill_tree, launch

RANKS_ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""Environment of several ranks of an island on one machine."""


PORTS = range(20_000, 32_000)
"""Ports below the kernel's ephemeral range, so that no outgoing connection takes one of them."""


def free_port() -> int:
    """An unused port, for a process that must be told its port before it starts.

    A port from binding to port 0 would not do: the kernel may soon give it to a connection.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"100 ports between {PORTS.start} and {PORTS.stop - 1} were tried; all are taken")


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All running descendants of a process, in any session or process group.

    The resource tracker of Python, which lives as long as its process, does not count.
    """
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if is_running(child) and not _is_tracker(child)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


class Child:
    """A program, this Python unless another is named, whose input and output are pipes to the test.

    At the end of the block its input is closed, and it is killed with its family if it still runs.
    """

    def __init__(
        self, *arguments: str, program: Sequence[str] = (sys.executable,), **options: Any
    ) -> None:
        """``options``: those of ``subprocess.Popen``."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            [*program, *arguments], **{**pipes, **options}
        )
        self.pid = self.process.pid

    @property
    def output(self) -> IO[Any]:
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        """The next line of its output; an empty one when it has ended."""
        line: str = self.output.readline()
        return line.rstrip("\n")

    def rest(self) -> str:
        """All that it still says."""
        rest: str = self.output.read()
        return rest

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, for it alone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            kill_tree(self.process)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # of what was not written yet
                    pipe.close()


@contextmanager
def killed_beside_its_child(program: str, argument: Path) -> Iterator[None]:
    """Run a program that prints the process id of its child and kills itself. The child is killed
    at the end."""
    with Child("-c", program, str(argument)) as killed:
        child = int(killed.line())
        killed.wait()
        try:
            yield
        finally:
            os.kill(child, signal.SIGKILL)


def still_running(processes: Iterable[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended; returns those that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in processes if is_running(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def described(processes: Iterable[psutil.Process]) -> list[str]:
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        except psutil.NoSuchProcess:
            continue
    return lines


def signal_family(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its descendants, such as trainer, agent and daemon."""
    for member in family(process):
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)


def end_softly(process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Ask a process to end, and kill it with its family after ``within_s``."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        kill_tree(process)


def say(*words: object) -> None:
    """A line of a helper for the test that has started it."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def said(output: str, kind: str) -> list[dict[str, Any]]:
    """The objects after this word at the beginning of a line: helpers print such lines."""
    lines = [line.partition(" ") for line in output.splitlines(keepends=True)]
    return [json.loads(rest) for word, _, rest in lines if word == kind and rest.endswith("\n")]


class Processes:
    """The processes of one test. On exit they are ended; fails if other processes are left.

    All processes started meanwhile count: those started with this object, their children, and
    other new children of this process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before: set[psutil.Process] = set()
        self._started: list[subprocess.Popen[bytes]] = []
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        self._before = set(descendants())
        return self

    def python(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start this Python with arguments; ``output_of`` the process has its output."""
        return self.start([sys.executable, *arguments], environment=environment)

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log = self._directory / f"output-{len(self._started)}.txt"
        process = launch(command, log, environment=environment)
        self._started.append(process)
        return process

    def _log_of(self, process: subprocess.Popen[bytes]) -> Path:
        return self._directory / f"output-{self._started.index(process)}.txt"

    def output_of(self, process: subprocess.Popen[bytes]) -> str:
        return self._log_of(process).read_text(errors="replace")

    def records_of(
        self, process: subprocess.Popen[bytes], event: str | None = None
    ) -> list[dict[str, Any]]:
        """The complete JSON lines of its output, oldest first."""
        records = Output(self._log_of(process)).news()
        return [record for record in records if event is None or record.get("event") == event]

    def wait_for_line(
        self, process: subprocess.Popen[bytes], beginning: str, *, timeout_s: float
    ) -> str:
        """The first line of output with this beginning. Fails if the process ends or is slow."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = process.poll() is not None
            output = self.output_of(process)
            for line in output.splitlines(keepends=True):
                if line.startswith(beginning) and line.endswith("\n"):
                    return line.rstrip("\n")
            assert not ended, f"it ended with {process.returncode} and said:\n{output}"
            assert time.monotonic() < deadline, (
                f"nothing within {timeout_s:g} s; it said:\n{output}"
            )
            time.sleep(0.02)

    def note(self) -> set[psutil.Process]:
        """Remember the current descendants: those that become orphans later still count."""
        self._seen |= set(descendants()) - self._before
        return set(self._seen)

    def kill_hard(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Kill with SIGKILL; returns the children of the process, which are orphans now."""
        children = descendants(process.pid)
        self._seen |= set(children)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return children

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.note()
        for process in self._started:
            if process.poll() is None:
                end_softly(process, within_s=30.0)
        left = still_running(self._seen, timeout_s=30)
        text = described(left)
        for orphan in left:
            orphan.kill()
        if kind is None:
            assert not left, "processes were left behind:\n" + "\n".join(text)

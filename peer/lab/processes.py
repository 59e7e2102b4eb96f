"""Shoal's own commands as processes: start one, read what it prints, kill it with its family.

What ``shoal demo`` and ``shoal chaos`` have in common. Each process gets a session of its own and
writes to a file, so that nothing it leaves running can hold a pipe of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from peer.errors import PeerError


class ProcessFailed(PeerError):
    """A process did not do what it should, before anything was done to it."""

    def __init__(self, what: str, log: str) -> None:
        super().__init__(what, log)
        self.what = what
        self.log = log

    def __str__(self) -> str:
        return f"the swarm stopped: {self.what}; its output is in {self.log}"


CLI = ("-P", "-m", "peer.cli")
"""As users start it: the folder they stand in is not searched for modules."""

PORTS = range(20_000, 32_000)
"""Below those that the kernel hands out: no connection takes one of these meanwhile."""


def spawn(
    arguments: Sequence[str],
    log: Path,
    *,
    module: Sequence[str] = CLI,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start one with its output appended to ``log``."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all that it started, the oldest first: trainer, agent, daemon."""
    try:
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """kill -9 a process with everything it started. The agent has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # or it may start another one behind our back
    members = family(process)[1:]
    process.kill()
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def new_records(log: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """The complete JSON lines after ``position``; other lines (warnings) are passed over."""
    try:
        with log.open("rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        return [], position
    end = data.rfind(b"\n") + 1
    records = []
    for line in data[:end].splitlines():
        if line.startswith(b"{"):
            try:
                record = json.loads(line)
            except ValueError:  # what a kill -9 cut off, and another life wrote on
                continue
            if isinstance(record, dict):
                records.append(record)
    return records, position + end


def free_port() -> int:
    """One that nobody has, for a process that must be told its port before it starts.

    Bound to port 0 and let go, a port is soon given to somebody else's connection.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"of 100 ports from {PORTS.start} to {PORTS.stop - 1} all are taken")

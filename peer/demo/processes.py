"""Runs Shoal's commands as processes: starts one, reads its output, kills it with its children.

For ``shoal demo``, and for tests of whole swarms. Each process has a session of its own and writes
to a file, so that a child that survives it cannot keep a pipe open.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from peer.errors import PeerError


class ProcessFailed(PeerError):
    """A process failed although no fault was injected."""

    what: str
    log: str
    message = "the swarm stopped: {what}; its output is in {log}"


CLI = ("-P", "-m", "peer.cli")
"""How users start the command: without the current folder on the module path."""

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def bootstrap_command(folder: Path, *, listen: str = LOOPBACK) -> list[str]:
    """Arguments of a bootstrap peer that keeps its key in ``folder`` and prints its address."""
    there = ("--listen", listen, "--data-dir", str(folder))
    return ["bootstrap", *there, "--page", "off", "--json"]


def learner_command(
    command: Sequence[str], folder: Path, *, pace_s: float, listen: Sequence[str] = (LOOPBACK,)
) -> list[str]:
    """Arguments of a learner that is named after its folder and trains on one core.

    ``command``: ``start`` or ``join``, with its argument. ``listen``: the address, and options.
    """
    own = ("--directory", str(folder), "--name", folder.name, "--listen", *listen)
    return [*command, *own, "--pace", str(pace_s), "--threads", "1", "--json", "--yes"]


def spawn(
    arguments: Sequence[str],
    log: Path,
    *,
    module: Sequence[str] = CLI,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start one of Shoal's commands, or another ``module``, as ``launch`` does."""
    return launch([sys.executable, *module, *arguments], log, environment=environment)


def launch(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output appended to ``log``."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and its descendants, such as trainer, agent and daemon."""
    try:
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants with SIGKILL. (The agent has a session of its own.)"""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # otherwise it may start another child meanwhile
    members = family(process)[1:]
    process.kill()
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


class Output:
    """The JSON lines that a process writes into its log. Other lines are skipped."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._read_bytes = 0

    def news(self) -> list[dict[str, Any]]:
        """The lines that are complete since the last call."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._read_bytes += end
        records = []
        for line in data[:end].splitlines():
            if line.startswith(b"{"):
                try:
                    record = json.loads(line)
                except ValueError:  # cut off by a SIGKILL, then continued by the next process
                    continue
                if isinstance(record, dict):
                    records.append(record)
        return records

    def first(
        self, field: str, process: subprocess.Popen[bytes], *, name: str, within_s: float
    ) -> str:
        """The value of the first line that has this field. Raises ``ProcessFailed``."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for record in self.news():
                if field in record:
                    return str(record[field])
            if process.poll() is not None:
                what = f"{name} ended with exit code {process.returncode}"
                raise ProcessFailed(what, str(self.log))
            time.sleep(0.05)
        raise ProcessFailed(f"{name} printed no {field} within {within_s:g} s", str(self.log))

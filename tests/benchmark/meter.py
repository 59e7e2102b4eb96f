"""Measures processor time, traffic and peak memory of this process and its children."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a stretch of work used."""

    cpu_seconds: float
    daemon_bytes_sent: int | None
    """Bytes sent by libp2p daemons; ``None`` without one."""
    peak_memory_bytes: int
    """Above the memory held at the beginning."""


class Meter:
    """Measures from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._watched: list[psutil.Process] = []
        """Listed once: searching all processes would be charged to the measured work."""
        self._cpu = 0.0
        self._written: int | None = None
        self._resident: dict[int, int] = {}

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _daemon_written(self) -> int | None:
        """Bytes that libp2p daemons wrote to the network and to this process: each payload byte
        once at the sender (network) and once at the receiver (unix socket)."""
        written: int | None = None
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, AttributeError):
                if "p2pd" in process.name():
                    # Linux counts read() and write() on sockets here too.
                    written = (written or 0) + process.io_counters().write_chars
        return written

    def start(self) -> None:
        me = psutil.Process()
        self._watched = [me, *me.children(recursive=True)]
        self._resident = {}
        for process in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets the peak
                self._resident[process.pid] = process.memory_info().rss
        self._written = self._daemon_written()
        self._cpu = self._cpu_seconds()

    def stop(self) -> Usage:
        cpu = self._cpu_seconds() - self._cpu
        written = self._daemon_written()
        peak = 0
        for pid, before in self._resident.items():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                highest = next(line for line in lines if line.startswith("VmHWM:"))
                peak += max(0, int(highest.split()[1]) * 1024 - before)
        sent = None if written is None or self._written is None else (written - self._written) // 2
        return Usage(cpu, sent, peak)

"""The process of one peer of ``tests.benchmark.averaging``.

It reads commands as JSON lines on its standard input, carries them out with a ``Participant``,
answers on its standard output, and measures itself. ``tests.benchmark.averaging`` sends the
commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmark.participant import Participant, Reply, Setup, largest_error


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


def open_participant(system: str, setup: Setup, meeting_point: str | None) -> Participant:
    """Start one peer; ``meeting_point`` is ``None`` for the first one.

    Imports are local: each system has heavy dependencies of its own.
    """
    if system == "gloo":
        from tests.benchmark.gloo_averager import GlooParticipant

        return GlooParticipant(setup, meeting_point)
    if system == "hivemind":
        from tests.benchmark.hivemind_averager import HivemindParticipant

        return HivemindParticipant(setup, meeting_point)
    if system in ("shoal", "daemon", "numpy"):
        from tests.benchmark.shoal_averager import ShoalParticipant

        return ShoalParticipant(
            setup, meeting_point, direct=system != "daemon", compiled=system != "numpy"
        )
    raise ValueError(f"system is {system!r}; known: daemon, gloo, hivemind, numpy, shoal")


class CommandLoop:
    """Carries out the commands of the benchmark, one at a time."""

    def __init__(self, system: str, setup: Setup) -> None:
        self._system = system
        self._setup = setup
        self._participant: Participant | None = None
        self._meter = Meter()
        self._direct_bytes_before = 0

    def obey(self, do: str, arguments: Reply) -> Reply:
        """Carry out one command and return the reply."""
        if self._participant is None:
            assert do == "open", f"{do} came before open"
            opened = open_participant(self._system, self._setup, arguments["meeting_point"])
            self._participant = opened
            return {"meeting_point": opened.meeting_point}
        participant = self._participant
        match do:
            case "ready":
                participant.ready()
                self._meter.start()
                self._direct_bytes_before = participant.direct_bytes_sent
                return {}
            case "form" | "exchange":
                began = time.perf_counter()
                (participant.form if do == "form" else participant.exchange)()
                return {"seconds": time.perf_counter() - began}
            case "spent":
                return self._usage(participant)
            case "error":
                return {"max_error": largest_error(participant.result(), self._setup.peers)}
            case "close":
                participant.close()
                return {}
            case _:  # a command that only one system has
                reply: Reply = getattr(participant, f"do_{do}")(**arguments)
                return reply

    def _usage(self, participant: Participant) -> Reply:
        usage = self._meter.stop()
        reply: Reply = {
            "cpu_seconds": usage.cpu_seconds,
            "peak_memory_bytes": usage.peak_memory_bytes,
        }
        if usage.daemon_bytes_sent is not None:
            direct = participant.direct_bytes_sent - self._direct_bytes_before
            reply["bytes_sent"] = usage.daemon_bytes_sent + direct
        return reply


def main() -> None:
    settings = json.loads(sys.argv[1])
    commands = CommandLoop(settings.pop("system"), Setup(**settings))
    # Libraries print: replies get a descriptor of their own, and prints go to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        do = arguments.pop("do")
        replies.write(json.dumps(commands.obey(do, arguments)) + "\n")
        if do == "close":
            return


if __name__ == "__main__":
    main()

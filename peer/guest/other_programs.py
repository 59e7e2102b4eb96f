"""Processor use of one peer, and by programs other than Shoal: the total use less that of Shoal.

All peers on the machine count as Shoal: trainers (the parents of agents, and processes with the
same command, which are other ranks), agents, daemons, keepers, and their children. So two peers
that give way to other programs do not give way to each other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    parent: int
    command: tuple[str, ...]
    began: float
    """Start time, which tells it from a later process with the same id."""
    busy_s: float


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Processor times of the machine and its processes at one moment."""

    busy_s: float
    all_s: float
    """Time of all processors, busy and idle."""
    processes: Mapping[int, Process]


def times_now() -> ProcessorTimes:
    """Take a sample. Costs about 0.1 ms for each process; do not call it in an event loop."""
    times = psutil.cpu_times()
    # Time of virtual machines is part of user time; waiting for a disk is idle time.
    named = times._asdict()
    all_s = sum(spent for name, spent in named.items() if not name.startswith("guest"))
    idle_s = named["idle"] + named.get("iowait", 0.0)
    processes = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                spent = process.cpu_times()
                processes[process.pid] = Process(
                    process.ppid(),
                    tuple(process.cmdline()),
                    process.create_time(),
                    spent.user + spent.system,
                )
        except psutil.Error:  # it has ended, or access is denied
            continue
    return ProcessorTimes(all_s - idle_s, all_s, processes)


def others_share(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """Share of all processors that other programs used between two samples, 0 to 1."""
    all_s = after.all_s - before.all_s
    if all_s <= 0:
        return 0.0
    shoal_s = 0.0
    for pid in shoal_processes(after.processes):
        now, then = after.processes[pid], before.processes.get(pid)
        if then is not None and then.began == now.began:
            shoal_s += now.busy_s - then.busy_s
    return min(1.0, max(0.0, (after.busy_s - before.busy_s - shoal_s) / all_s))


def names_of_others(processes: Mapping[int, Process]) -> frozenset[str]:
    """Names of the programs other than Shoal that run, in small letters and without ``.exe``.

    The first two words of a command count: the second one may be the program of an interpreter.
    """
    others = processes.keys() - set(shoal_processes(processes))
    words = (word for pid in others for word in processes[pid].command[:2])
    names = (re.split(r"[/\\]", word)[-1].lower() for word in words)
    return frozenset(name.removesuffix(".exe") for name in names)


def shoal_processes(processes: Mapping[int, Process]) -> Collection[int]:
    """Ids of the processes that belong to Shoal."""
    trainers = {
        process.parent
        for process in processes.values()
        if "peer.agent" in process.command and process.parent in processes and process.parent > 1
    }
    commands = {processes[pid].command for pid in trainers}
    pids = {
        pid
        for pid, process in processes.items()
        if process.command and (process.command in commands or _is_shoal_command(process.command))
    }
    grown = True
    while grown:
        more = {pid for pid, process in processes.items() if process.parent in pids} - pids
        grown = bool(more)
        pids |= more
    return pids


def _is_shoal_command(command: tuple[str, ...]) -> bool:
    return any(word == "peer.cli" or word.endswith("/shoal") for word in command[:4])


class OwnUse:
    """Share of the machine's processors that a process and its descendants use: those of a peer are
    its trainer, agent and daemon."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._busy: dict[tuple[int, float], float] = {}
        self._at: float | None = None

    def share_since_last(self) -> float | None:
        """The share since the last call, 0 to 1; ``None`` at the first one."""
        now, then, before = time.monotonic(), self._at, self._busy
        self._busy, self._at = self._times(), now
        if then is None or now <= then:
            return None
        # Only processes that were there before: the time of others may be from long ago.
        spent = sum(
            busy - before[process] for process, busy in self._busy.items() if process in before
        )
        return min(1.0, max(0.0, spent / (now - then) / (psutil.cpu_count() or 1)))

    def _times(self) -> dict[tuple[int, float], float]:
        times: dict[tuple[int, float], float] = {}
        try:
            root = psutil.Process(self._pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return times
        for process in family:
            try:
                spent = process.cpu_times()
                times[process.pid, process.create_time()] = spent.user + spent.system
            except psutil.Error:  # it has ended
                continue
        return times

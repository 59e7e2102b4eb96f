"""What other programs use of this machine's processors: all that is used, less what Shoal uses.

Shoal is every peer of this machine, whoever started it: trainers (an agent's parent is one, and
whoever runs the same command is another rank of it), agents, daemons, keepers, and what these
started. So two peers that both give way to others do not give way to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was seen."""

    parent: int
    command: tuple[str, ...]
    began: float
    """Tells it from a later one with the same number."""
    busy_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine at one moment. Processor times since it was started."""

    busy_s: float
    all_s: float
    """Of all processors together."""
    processes: Mapping[int, Process]


def look() -> Sample:
    """Takes about 0.1 ms for each process: not for an event loop."""
    times = psutil.cpu_times()
    # Guests' time is part of user time; waiting for a disk is idle.
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
        except psutil.Error:  # it has ended, or is none of our business
            continue
    return Sample(all_s - idle_s, all_s, processes)


def others_share(before: Sample, after: Sample) -> float:
    """What others used of all processors between two looks. 0 to 1."""
    all_s = after.all_s - before.all_s
    if all_s <= 0:
        return 0.0
    ours_s = 0.0
    for pid in ours(after.processes):
        now, then = after.processes[pid], before.processes.get(pid)
        if then is not None and then.began == now.began:
            ours_s += now.busy_s - then.busy_s
    return min(1.0, max(0.0, (after.busy_s - before.busy_s - ours_s) / all_s))


def ours(processes: Mapping[int, Process]) -> Collection[int]:
    """Those that are Shoal's."""
    trainers = {
        seen.parent
        for seen in processes.values()
        if "peer.agent" in seen.command and seen.parent in processes and seen.parent > 1
    }
    commands = {processes[pid].command for pid in trainers}
    found = {
        pid
        for pid, seen in processes.items()
        if seen.command and (seen.command in commands or _is_command_of_ours(seen.command))
    }
    grown = True
    while grown:
        more = {pid for pid, seen in processes.items() if seen.parent in found} - found
        grown = bool(more)
        found |= more
    return found


def _is_command_of_ours(command: tuple[str, ...]) -> bool:
    return any(word == "peer.cli" or word.endswith("/shoal") for word in command[:4])

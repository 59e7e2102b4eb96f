"""The facts of this machine that decide where the run's state is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from peer.rules.state_place import StatePlace, choose_place

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the memory limit of a container, by the version of Linux' control groups."""

VOLATILE = frozenset(("tmpfs", "ramfs", "devtmpfs"))
"""File systems that keep files in memory."""


def place_of_state(wish: str, values: int, folder: Path) -> StatePlace:
    """The place of a state of so many values. ``wish``: the value of ``--state-on-disk``."""
    kind = file_system(folder)
    return choose_place(
        wish,
        values,
        memory_bytes=memory_bytes(),
        free_bytes=shutil.disk_usage(folder).free,
        volatile=kind if kind in VOLATILE else None,
    )


def memory_bytes(limits: tuple[Path, ...] = CONTAINER_LIMITS) -> float:
    """Memory of this machine, or of the container."""
    found = [float(psutil.virtual_memory().total)]
    for path in limits:
        try:
            found.append(float(path.read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return min(found)


def file_system(folder: Path) -> str:
    """Kind of the file system of a folder; empty if it is not known."""
    whole = folder.resolve()
    mounted = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounted[each] for each in (whole, *whole.parents) if each in mounted), "")

"""Facts of this machine or its container: memory, disk, processors, battery, heat, the screen."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from peer.rules.limits import StatePlace, choose_place

CGROUP = Path("/sys/fs/cgroup")
VOLATILE = frozenset(("tmpfs", "ramfs", "devtmpfs"))
"""File systems that keep files in memory."""


def place_of_state(wish: str, size: int, folder: Path) -> StatePlace:
    """The place of a state of so many bytes. ``wish``: the value of ``--state-on-disk``."""
    kind = file_system(folder)
    return choose_place(
        wish,
        size,
        memory_bytes=memory().total,
        free_bytes=shutil.disk_usage(folder).free,
        volatile=kind if kind in VOLATILE else None,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of this machine, or of the container that this process is in."""

    available: float
    total: float
    is_of_container: bool = False


def memory(cgroup: Path = CGROUP) -> Memory:
    """The memory that this process sees."""
    whole = psutil.virtual_memory()
    limits = (_number(cgroup / name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
    limit = min(each for each in (*limits, math.inf) if each is not None)
    if limit >= whole.total:
        return Memory(whole.available, whole.total)
    used = _number(cgroup / "memory.current") or 0.0
    # Pages of files count as used, and are given back when memory is short.
    used -= _number(cgroup / "memory.stat", of="inactive_file") or 0.0
    return Memory(min(whole.available, max(0.0, limit - used)), limit, is_of_container=True)


def _number(path: Path, *, of: str = "") -> float | None:
    """The number in a file, or in its line ``of``; ``None``: there is none, or "max"."""
    try:
        found = re.search(rf"^{of}\s*(\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else float(found[1])


def file_system(folder: Path) -> str:
    """Kind of the file system of a folder; empty if it is not known."""
    whole = folder.resolve()
    mounted = {
        Path(partition.mountpoint): partition.fstype
        for partition in psutil.disk_partitions(all=True)
    }
    return next((mounted[path] for path in (whole, *whole.parents) if path in mounted), "")


TIME_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Processor time that a container may use in each period, a file of Linux' control groups."""


def container_processors(limit: Path = TIME_LIMIT) -> int | None:
    """Number of processors whose time a container may use, rounded up; ``None`` without a limit.

    Libraries do not look at it: torch begins a thread for each core that it may run on. Those are
    no more than the processors that the container is bound to, which may be fewer than the limit.
    """
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        processors = max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        return None
    return min(processors, _bound_to())


def _bound_to() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else sys.maxsize


PROCESSORS = frozenset(("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "amdgpu"))
"""Sensors of processors, and of AMD's accelerators, by their names in Linux. A disk has others."""


def battery() -> float | None:
    """The battery's charge, 0 to 1; ``None`` on mains power, or without a battery."""
    try:
        state = psutil.sensors_battery()
    except (AttributeError, OSError):  # no such function on this system
        return None
    if state is None or state.power_plugged is not False:
        return None
    return float(state.percent) / 100


def celsius() -> float | None:
    """The highest temperature of the processors; ``None`` where no sensor tells it."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):  # Linux and FreeBSD only
        return None
    degrees = [
        sensor.current
        for name, of_device in sensors.items()
        if name in PROCESSORS
        for sensor in of_device
        if sensor.current is not None
    ]
    return max(degrees, default=None)


SCREENS = {
    # X11, and what runs on it under Wayland, as most games do: the window in front.
    "xprop -id $(xprop -root -notype _NET_ACTIVE_WINDOW | grep -o '0x[0-9a-f]*' | head -n 1)"
    " _NET_WM_STATE": r"_NET_WM_STATE_FULLSCREEN",
    # Sway: any of its windows, each a container whose mode comes before that of another thing.
    "swaymsg -t get_tree": r'"inhibit_idle": true'
    r'|"type": "(floating_)?con"((?!"type"|"fullscreen_mode").)*"fullscreen_mode": [12]',
    "busctl --user --auto-start=no call org.gnome.SessionManager /org/gnome/SessionManager"
    " org.gnome.SessionManager IsInhibited u 8": r"b true",
    "busctl --user --auto-start=no call org.kde.Solid.PowerManagement.PolicyAgent"
    " /org/kde/Solid/PowerManagement/PolicyAgent org.kde.Solid.PowerManagement.PolicyAgent"
    " HasInhibition u 4": r"b true",
    # macOS.
    "pmset -g assertions": r"PreventUserIdleDisplaySleep +1",
}
"""Commands that ask a desktop whether a program fills the screen, and what they print then.

Under Wayland, and on a Mac, a program may not ask for the windows of others. But films, games and
calls keep the screen from going dark, and desktops tell that.
"""

SCREEN_TOLD_WITHIN_S = 2.0


def screen_is_taken(ask: Callable[[str], str] | None = None) -> bool:
    """True if a program fills the screen, or keeps it awake, as far as a desktop tells."""
    ask = ask or _printed
    return any(re.search(told, ask(command), re.DOTALL) for command, told in SCREENS.items())


def _printed(command: str) -> str:
    """The output of a command; nothing if it fails, or its program is not there."""
    if shutil.which(command.split()[0]) is None:
        return ""
    with subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as asked:
        try:
            return asked.communicate(timeout=SCREEN_TOLD_WITHIN_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(asked.pid, signal.SIGKILL)
            return ""

"""The processors that the container of this process may use."""

from __future__ import annotations

import math
from pathlib import Path

TIME_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Processor time that a container may use in each period, a file of Linux' control groups."""


def container_processors(limit: Path = TIME_LIMIT) -> int | None:
    """Number of processors whose time a container may use, rounded up; ``None`` without a limit.

    Libraries do not look at it: torch begins a thread for each core of the machine.
    """
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        return None

"""The processors that the container of this process may use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

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

"""Battery and temperature of this machine, as its operating system tells them."""

from __future__ import annotations

import psutil

PROCESSORS = frozenset(("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "amdgpu"))
"""Sensors of processors, and of AMD's accelerators, by their names in Linux. A disk has others."""


def battery() -> float | None:
    """What the battery holds, 0 to 1; ``None`` on mains power, or without a battery."""
    try:
        found = psutil.sensors_battery()
    except (AttributeError, OSError):  # no such function on this system
        return None
    if found is None or found.power_plugged is not False:
        return None
    return float(found.percent) / 100


def celsius() -> float | None:
    """The highest temperature of the processors; ``None`` where no sensor tells it."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):  # Linux and FreeBSD only
        return None
    degrees = [
        each.current
        for name, found in sensors.items()
        if name in PROCESSORS
        for each in found
        if each.current is not None
    ]
    return max(degrees, default=None)

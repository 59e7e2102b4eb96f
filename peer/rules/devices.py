"""The devices that a machine's owner names for training: ``--device`` and ``--devices``.

Only the names are judged here. Whether this machine has such devices is known to torch, which takes
seconds to import (``peer.island.training``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEVICES_MAX = 1024

_NAME = re.compile(r"(cpu|cuda|mps)(?::(0|[1-9][0-9]{0,3}))?")


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """The devices to train on, as they were asked for."""

    device: str = "auto"
    """The name of one device, or ``auto``."""
    count: int | None = None
    """Number of devices of one kind that train together; ``None``: none was named."""
    names: tuple[str, ...] = ()
    """Devices that train together, each with its index; empty: none were named."""


def check_device(name: str) -> None:
    """Raise ``ValueError`` unless it is a value of ``--device``."""
    if name != "auto" and not _NAME.fullmatch(name):
        raise ValueError(
            f"--device is {name[:100]!r}; it is auto, cpu, cuda, one of several as cuda:1, or mps"
        )


def wished_devices(device: str, devices: str) -> DeviceWish:
    """The wish behind ``--device`` and ``--devices``. Raises ``ValueError``."""
    check_device(device)
    if devices == "auto":
        return DeviceWish(device)
    if re.fullmatch(r"[1-9][0-9]{0,3}", devices) and int(devices) <= DEVICES_MAX:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--devices {devices} is for --device cpu or cuda, not for {device}")
        return DeviceWish(device, count=int(devices))
    named = [_NAME.fullmatch(name.strip()) for name in devices.split(",")]
    # The same device has two names, as cuda and cuda:0.
    known = [(found[1], found[2] or "0") for found in named if found is not None]
    is_one_kind = len({kind for kind, _ in known}) == 1
    if len(known) < len(named) or len(set(known)) < len(known) or not is_one_kind:
        raise ValueError(
            f"--devices is {devices[:100]!r}; it is auto, a number from 1 to {DEVICES_MAX}, or "
            "different devices of one kind as cuda:0,cuda:1"
        )
    if device != "auto":
        raise ValueError(
            f"--device {device} names one device and --devices {devices} several; pass one of them"
        )
    return DeviceWish(names=tuple(f"{kind}:{index}" for kind, index in known))

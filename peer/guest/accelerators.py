"""Use of NVIDIA's accelerators by programs other than Shoal, as their driver counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from peer.guest.other_programs import Process, shoal_processes


@dataclass(frozen=True, slots=True)
class Use:
    """One process on one device, in one of the driver's periods."""

    device: int
    pid: int
    at_us: int
    share: float
    """Share of the period in which it computed."""


def others_share(uses: Sequence[Use], processes: Mapping[int, Process]) -> float:
    """Share of the busiest device that other programs use, 0 to 1.

    A process that is not in ``processes`` counts for nobody: in a container the driver tells ids
    from outside, where this peer's own trainer has another one.
    """
    others = processes.keys() - set(shoal_processes(processes))
    shares: dict[tuple[int, int], list[float]] = {}
    for use in uses:
        if use.pid in others:
            shares.setdefault((use.device, use.pid), []).append(use.share)
    devices: dict[int, float] = {}
    for (device, _), seen in shares.items():
        devices[device] = devices.get(device, 0.0) + sum(seen) / len(seen)
    return min(1.0, max(devices.values(), default=0.0))


class Accelerators:
    """Asks the driver what its devices did since the last question."""

    def __init__(self, read: Callable[[int], Sequence[Use]] | None = None) -> None:
        self._read = read or _read
        self._seen_us = 0

    def others_share(self, processes: Mapping[int, Process]) -> float:
        uses = self._read(self._seen_us)
        fresh = self._seen_us > 0
        self._seen_us = max((use.at_us for use in uses), default=self._seen_us)
        # At the first question the driver tells what it remembers, of whatever time.
        return others_share(uses, processes) if fresh else 0.0


def _read(since_us: int) -> Sequence[Use]:
    """What the driver knows since then; nothing where there is none, or it does not tell."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return [
            use for device in range(pynvml.nvmlDeviceGetCount()) for use in _of(device, since_us)
        ]
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _of(device: int, since_us: int) -> Iterator[Use]:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(device)
    try:
        found = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError:  # nobody used it
        return
    for each in found:
        yield Use(device, each.pid, each.timeStamp, each.smUtil / 100)

"""Facts that NVIDIA's driver tells of its devices: processes that compute there or hold memory,
and how hot they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one device that a process holds now."""

    device: int
    pid: int
    share: float
    """Share of the device's memory."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of the driver; empty where there is none, or it does not tell."""

    uses: Sequence[Use] = ()
    held: Sequence[Held] = ()
    celsius: float | None = None
    """Temperature of the hottest device."""


def share_of_accelerators(reading: Reading, processes: Mapping[int, Process]) -> float:
    """Share of a device that other programs use, 0 to 1: of its time, or of its memory if that is
    more. Of several devices the busiest one counts, among those where Shoal holds memory.

    A process that is not in ``processes`` counts for nobody: in a container the driver tells ids
    from outside, where this peer's own trainer has another one.
    """
    shoal = set(shoal_processes(processes))
    others = processes.keys() - shoal
    own_devices = {held.device for held in reading.held if held.pid in shoal}
    times: dict[tuple[int, int], list[float]] = {}
    for use in reading.uses:
        if use.pid in others:
            times.setdefault((use.device, use.pid), []).append(use.share)
    busy: dict[int, float] = {}
    for (device, _), shares_used in times.items():
        busy[device] = busy.get(device, 0.0) + sum(shares_used) / len(shares_used)
    full: dict[int, float] = {}
    for held in reading.held:
        if held.pid in others:
            full[held.device] = full.get(held.device, 0.0) + held.share
    devices = busy.keys() | full.keys()
    counted = devices & own_devices if own_devices else devices
    shares = (max(busy.get(device, 0.0), full.get(device, 0.0)) for device in counted)
    return min(1.0, max(shares, default=0.0))


class Accelerators:
    """Asks the driver what its devices did since the last question."""

    def __init__(self, read: Callable[[int], Reading] | None = None) -> None:
        self._read = read or _read
        self._seen_us = 0
        self.celsius: float | None = None
        """Temperature of the hottest device at the last question."""

    def others_share(self, processes: Mapping[int, Process]) -> float:
        reading = self._read(self._seen_us)
        self.celsius = reading.celsius
        # At the first question the driver tells what it remembers, of whatever time.
        fresh = reading if self._seen_us else Reading(held=reading.held)
        self._seen_us = max((use.at_us for use in reading.uses), default=self._seen_us)
        return share_of_accelerators(fresh, processes)


def _read(since_us: int) -> Reading:
    try:
        import pynvml
    except ImportError:
        return Reading()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Reading()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        degrees = [celsius for handle in handles for celsius in _celsius(handle)]
        return Reading(
            [
                use
                for device, handle in enumerate(handles)
                for use in _uses(device, handle, since_us)
            ],
            [held for device, handle in enumerate(handles) for held in _held(device, handle)],
            max(degrees, default=None),
        )
    except pynvml.NVMLError:
        return Reading()
    finally:
        pynvml.nvmlShutdown()


def _uses(device: int, handle: object, since_us: int) -> Iterator[Use]:
    import pynvml

    with suppress(pynvml.NVMLError):  # nobody used it
        for use in pynvml.nvmlDeviceGetProcessUtilization(handle, since_us):
            yield Use(device, use.pid, use.timeStamp, use.smUtil / 100)


def _held(device: int, handle: object) -> Iterator[Held]:
    import pynvml

    with suppress(pynvml.NVMLError):  # a driver that does not tell
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        processes = {
            process.pid: process.usedGpuMemory
            for ask in (
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
                pynvml.nvmlDeviceGetComputeRunningProcesses,
            )
            for process in ask(handle)
        }
        for pid, used in processes.items():
            yield Held(device, pid, (used or 0) / total)


def _celsius(handle: object) -> Iterator[float]:
    import pynvml

    with suppress(pynvml.NVMLError):  # a part of a device, which has no sensor
        yield float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))

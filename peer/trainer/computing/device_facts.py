"""The devices of this machine: what they can do, their memory and temperature, and late values.

A late value is still on its way from a device: nobody waits until it has been computed.
"""

from __future__ import annotations

import importlib.util
import platform
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from peer.guest.machine import memory
from peer.quantities import plural
from peer.trainer.computing.choices import DeviceFacts, cuda_precisions


def choose_device(wanted: str) -> torch.device:
    """The device that was asked for; ``auto``: the fastest one. Raises ``ValueError``."""
    if wanted != "auto":
        try:
            device = torch.device(wanted)
            if device.type == "cuda":
                # To use it would take half a gigabyte, also of a process that trains nothing.
                _check_cuda(device)
            else:
                torch.empty(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            # The first sentence: others list all that torch knows.
            reason = str(error).splitlines()[0].partition(". ")[0]
            raise ValueError(
                f"device {wanted!r} cannot be used here: {reason[:120]}; there are: "
                f"{', '.join(_devices())}"
            ) from error
        return device
    return torch.device(_devices()[0].partition(":")[0])


def _check_cuda(device: torch.device) -> None:
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise RuntimeError(f"torch {torch.__version__} is a build without CUDA")
    if (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError("torch finds no such device")


def _devices() -> list[str]:
    """The devices of this machine, the fastest first."""
    accelerators = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append("mps")
    return [*accelerators, "cpu"]


def facts_of(device: torch.device) -> DeviceFacts:
    """Read the capabilities of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return DeviceFacts(
            kind="cuda",
            name=device_name(device),
            fast=cuda_precisions(capability, bf16=bf16),
            compiles=capability >= (7, 0) and importlib.util.find_spec("triton") is not None,
            memory_bytes=float(properties.total_memory),
        )
    total = float(psutil.virtual_memory().total)
    if device.type == "mps":
        # Earlier systems have no bf16 in their matrix library.
        bf16 = tuple(map(int, platform.mac_ver()[0].split(".")[:1])) >= (14,)
        return DeviceFacts(
            kind="mps",
            name=device_name(device),
            fast=("bf16", "fp32") if bf16 else ("fp32",),
            emulated=("fp16",),
            memory_bytes=total,
        )
    bf16 = cpu_has_bf16()
    return DeviceFacts(
        kind=device.type,
        name=device_name(device),
        fast=("bf16", "fp32") if bf16 else ("fp32",),
        emulated=("fp16",) if bf16 else ("bf16", "fp16"),
        memory_bytes=total,
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"Apple {platform.machine()}"
    return f"CPU, {plural(torch.get_num_threads(), 'thread')}"


def cpu_has_bf16() -> bool:
    """Return whether the processor multiplies bf16 matrices, as torch reports.

    AMX and AVX512-BF16, and the bf16 extension of ARM. Other processors have only conversions, and
    bf16 is slower than fp32 there.
    """
    if (
        get_capabilities := getattr(torch.cpu, "get_capabilities", None)
    ) is not None:  # from torch 2.11 on
        capabilities = get_capabilities()
        return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    asked: list[Callable[[], bool]] = [
        getattr(torch.cpu, name, lambda: False)
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    ]
    return any(ask() for ask in asked)


def free_bytes(device: torch.device) -> float:
    """Memory that this process could still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(free + unused)
    return memory().available


def used_bytes(device: torch.device) -> float | None:
    """Device memory that this process holds; ``None`` on a CPU, whose memory all programs share."""
    if device.type == "cuda":
        return float(torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return float(torch.mps.driver_allocated_memory())
    return None


def temperature_c(device: torch.device) -> float | None:
    """Temperature of the device, where it can be read."""
    if device.type != "cuda":
        return None
    try:
        from pynvml import NVMLError
    except ImportError:
        return None
    try:
        return float(torch.cuda.temperature(device))
    except (NVMLError, RuntimeError, OSError):
        return None  # a driver that does not tell, or a part of a device, which has no sensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """State of the device that trains. ``None``: not known or not readable."""

    flops_per_token: float
    """Floating-point operations of a step per token."""
    peak_flops: float | None
    """Most floating-point operations per second that the device makes in this precision."""
    memory_bytes: float | None
    temperature_c: float | None
    preparing: str | None = None
    """The preparation under way while the device trains, in words."""


LAG = 1
"""Steps after which it is asked whether a step was skipped, where the answer is on a device. By
then it has arrived, and processes that are one learner ask at the same step."""


class LateValue:
    """A number that may still be on its way from the device."""

    def __init__(self, value: torch.Tensor | float) -> None:
        self._value: torch.Tensor | float = value
        self._arrived: torch.cuda.Event | None = None
        if isinstance(value, torch.Tensor):
            self._value = value.detach()
            if value.is_cuda:
                on_host = torch.empty((), dtype=torch.float32, pin_memory=True)
                on_host.copy_(self._value.reshape(()), non_blocking=True)
                self._value = on_host
                self._arrived = torch.cuda.current_stream(value.device).record_event()

    @property
    def is_late(self) -> bool:
        """True if it comes from a device."""
        return self._arrived is not None

    def ready(self) -> float | None:
        """The number, if it has arrived."""
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._value)

    def wait(self) -> float:
        """The number, as soon as it has arrived. Work that was queued later is not waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


class Skips:
    """Finds out which steps of an optimizer a ``GradScaler`` has skipped."""

    def __init__(self) -> None:
        self._steps: deque[tuple[LateValue, int]] = deque()

    def note(self, optimizer: torch.optim.Optimizer, tokens: int = 0) -> Iterator[int]:
        """Note a step of the optimizer, in a hook of it: the scaler's note is gone afterwards.

        Returns the tokens of each step that is now known to have been made.
        """
        # A fused optimizer skips inside its kernel, where only ``found_inf`` shows it.
        found_inf = getattr(optimizer, "found_inf", None)
        late = LateValue(found_inf if isinstance(found_inf, torch.Tensor) else 0.0)
        self._steps.append((late, tokens))
        while len(self._steps) > (LAG if late.is_late else 0):
            skipped, tokens = self._steps.popleft()
            if not skipped.wait():
                yield tokens

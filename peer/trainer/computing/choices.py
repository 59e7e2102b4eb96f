"""How this machine trains: devices, precision, compilation, the number of sequences at once.

These choices belong to the machine and never to the run: parameters and exchanged values are fp32,
and a step has the run's ``batch_size``, whatever is chosen here. Everything in this module decides
from facts that ``peer.trainer.computing.device_facts`` has read, and touches no device. The peaks
of devices are here for the figures of speed.

``compile = "auto"`` compiles on CUDA only. There a model of 124 million parameters trains 1.5 to
1.9 times as fast for a minute of compiling. A CPU compiles for minutes, needs a C++ compiler, and
compiles anew for another number of threads, while training waits. It gains nothing in fp32; in bf16
with AMX, passes of 10 million parameters took 0.66 of the processor time. Matrices in fp32 that are
multiplied in bf16 (torch's precision ``medium``) are slower there than either of both types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from peer.quantities import plural
from peer.run_file.sections import GptModel, RunFile

Precision: TypeAlias = Literal["bf16", "fp16", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

FREE_FRACTION = 0.1
"""Part of the memory that is kept free: allocations of later steps differ a little."""

GAIN_MIN = 0.03
"""A larger micro-batch that is not faster by this part is not worth its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Capabilities of a device."""

    kind: str
    """``cpu``, ``cuda`` or ``mps``."""
    name: str
    fast: tuple[Precision, ...]
    """Precisions that the hardware computes in, the preferred one first; fp32 is always there."""
    emulated: tuple[Precision, ...] = ()
    """Precisions that work and are slower than fp32."""
    compiles: bool = False
    """True if ``torch.compile`` is worth its time here."""
    memory_bytes: float = 0.0
    """All memory of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerChoices:
    """Choices of the machine's owner. ``None`` and ``auto`` leave them to the trainer."""

    precision: Precision | Literal["auto"] = "auto"
    micro_batch: int | None = None
    """Sequences at once."""
    compile: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices for training on this machine."""

    precision: Precision = "fp32"
    compile: bool = False
    micro_batch: int
    """Largest number of sequences at once; a step accumulates as many of them as it needs."""
    lean: bool = False
    """True if activations are computed twice and logits in chunks, to save memory."""

    @property
    def text(self) -> str:
        """The choices in words: ``bf16, compiled, 8 sequences at once``."""
        at_once = f"{plural(self.micro_batch, 'sequence')} at once"
        parts = [self.precision, *(["compiled"] if self.compile else []), at_once]
        return ", ".join([*parts, *(["activations recomputed"] if self.lean else [])])


def wishes_from(*, precision: str, micro_batch: str, compile: str) -> OwnerChoices:  # noqa: A002
    """The wishes as options of a command. Raises ``ValueError``."""
    for option, given, known in (
        ("precision", precision, ("auto", *PRECISIONS)),
        ("compile", compile, ("auto", "on", "off")),
    ):
        if given not in known:
            raise ValueError(f"--{option} is {given!r}; it is one of {', '.join(known)}")
    if micro_batch != "auto" and not (micro_batch.isdecimal() and int(micro_batch) >= 1):
        raise ValueError(f"--micro-batch is {micro_batch!r}; it is auto, or a number from 1 on")
    return OwnerChoices(
        precision=precision,  # type: ignore[arg-type]
        micro_batch=None if micro_batch == "auto" else int(micro_batch),
        compile=compile,  # type: ignore[arg-type]
    )


def choose(facts: DeviceFacts, wishes: OwnerChoices, *, batch_size: int) -> Choices:
    """The choices before anything is measured: a whole batch at once.

    Raises ``ValueError`` if the device has no such precision.
    """
    wanted = wishes.precision
    if wanted != "auto" and wanted not in (*facts.fast, *facts.emulated):
        known = ", ".join((*facts.fast, *facts.emulated))
        raise ValueError(
            f"{facts.name} cannot train in {wanted}; pass --precision auto, or {known}"
        )
    return Choices(
        precision=facts.fast[0] if wanted == "auto" else wanted,
        compile=facts.compiles if wishes.compile == "auto" else wishes.compile == "on",
        micro_batch=min(wishes.micro_batch or batch_size, batch_size),
    )


def cuda_precisions(capability: tuple[int, int], *, bf16: bool) -> tuple[Precision, ...]:
    """The fast precisions of a CUDA device, by its compute capability.

    Tensor cores compute in fp16 from 7.0 on, in bf16 and TF32 from 8.0 on. ``bf16``: whether torch
    finds it in hardware.
    """
    if bf16 and capability >= (8, 0):
        return ("bf16", "tf32", "fp16", "fp32")
    if capability >= (7, 0):
        return ("fp16", "fp32")
    return ("fp32",)


def split(count: int, most: int) -> tuple[int, ...]:
    """Sizes of the parts of ``count`` sequences, ``most`` at once: equal ones if possible.

    Each different size is another shape to compile. Equal parts are taken if they are at least half
    as large as ``most``; otherwise the last one is smaller.
    """
    if count <= most:
        return (count,)
    equal = max(size for size in range(1, most + 1) if count % size == 0)
    size = equal if 2 * equal > most else most
    whole, rest = divmod(count, size)
    return (size,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class Probe:
    """A measured micro-batch."""

    size: int
    seconds: float
    """Time of forward and backward pass; infinite if it did not fit."""
    peak_bytes: float
    """Memory that it takes beside what was taken before; infinite if it did not fit."""
    work_s: float = 0.0
    """Processor time of the process meanwhile, which other programs disturb less."""

    @property
    def per_sequence_s(self) -> float:
        return self.seconds / self.size

    def scaled(self, size: int, *, fixed: float = 0.0) -> Probe:
        """The measurement for a micro-batch of another size, in proportion.

        ``fixed``: the part of its memory that is the same for any size.
        """
        by = size / self.size
        fixed = min(fixed, self.peak_bytes)
        peak_bytes = fixed + (self.peak_bytes - fixed) * by
        return Probe(size, self.seconds * by, peak_bytes, self.work_s * by)

    def fitting(self, room_bytes: float, *, fixed: float = 0.0) -> int:
        """Number of sequences that fit into this much memory, in the same proportion."""
        fixed = min(fixed, self.peak_bytes)
        sequence_bytes = (self.peak_bytes - fixed) / self.size
        return int(max(0.0, room_bytes - fixed) / max(1.0, sequence_bytes))


@dataclass(frozen=True, slots=True)
class MicroBatchCost:
    """Time and memory of both passes of a micro-batch, by its number of sequences."""

    sequence_s: float
    fixed_bytes: float
    """Memory for any number: gradients, and copies of weights in another precision."""
    sequence_bytes: float
    """Memory that each sequence adds."""

    def bytes_of(self, sequences: int) -> float:
        return self.fixed_bytes + self.sequence_bytes * sequences

    def fitting(self, room_bytes: float) -> int:
        """Number of sequences whose memory there is."""
        return int(max(0.0, room_bytes - self.fixed_bytes) / max(1.0, self.sequence_bytes))


def next_size(probes: Sequence[Probe], *, start: int, most: int, room_bytes: float) -> int | None:
    """The micro-batch to try next, from ``start`` on; ``None`` if no further one is worth it."""
    if not probes:
        return min(start, most)
    last = probes[-1]
    if last.peak_bytes > room_bytes:
        return 1 if len(probes) == 1 and last.size > 1 else None
    if last.size >= most or (len(probes) > 1 and last.size < probes[-2].size):
        return None
    size = min(2 * last.size, most)
    grown = (
        (last.peak_bytes - probes[-2].peak_bytes) / (last.size - probes[-2].size)
        if len(probes) > 1
        else 0.0
    )
    if last.peak_bytes + max(0.0, grown) * (size - last.size) > room_bytes:
        return None
    slower = len(probes) > 2 and all(
        later.per_sequence_s > (1.0 - GAIN_MIN) * probes[-3].per_sequence_s for later in probes[-2:]
    )
    return None if slower else size


def fastest(probes: Sequence[Probe], *, room_bytes: float) -> Probe | None:
    """The smallest of the fastest micro-batches that fit; ``None`` if none does."""
    fitting = [probe for probe in probes if probe.peak_bytes <= room_bytes]
    if not fitting:
        return None
    best = min(probe.per_sequence_s for probe in fitting)
    return next(probe for probe in fitting if probe.per_sequence_s <= (1.0 + GAIN_MIN) * best)


PEAKS: Mapping[str, Mapping[Precision, float]] = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 80e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "A10G": {"bf16": 70e12, "fp16": 70e12, "tf32": 35e12, "fp32": 35e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "RTX 5090": {"bf16": 209.5e12, "fp16": 209.5e12, "tf32": 104.8e12, "fp32": 104.8e12},
    "RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
}
"""Dense floating-point operations per second by part of the device's name and precision, from the
vendor's data sheets, accumulating in fp32."""


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """The peak of a device; ``None`` if it is not known. The longest matching name decides."""
    words = f" {device_name.replace('-', ' ')} "
    known = [name for name in PEAKS if f" {name} " in words]
    if not known:
        return None
    return PEAKS[max(known, key=len)].get(precision)


def flops_per_token(run: RunFile, parameters: int) -> float:
    """Floating-point operations of forward and backward pass per token (arXiv 2204.02311, B).

    Attention adds operations that no parameter stands for; those of other models are not known.
    """
    model, length = run.model, run.data.sequence_length
    attention = model.layers * model.width * length if isinstance(model, GptModel) else 0
    return 6.0 * parameters + 12.0 * attention


# --- the devices that are named -------------------------------------------------------------------

# Only the names are judged. Whether this machine has such devices is known to torch, which takes
# seconds to import (``peer.island.training``).

DEVICES_MAX = 1024

_NAME = re.compile(r"(cpu|cuda|mps)(?::(0|[1-9][0-9]{0,3}))?")


Wish: TypeAlias = tuple[str, ...] | int
"""Devices by their names, or a number of them; no names: those that the trainer chooses."""


def wished_devices(text: str) -> Wish:
    """The devices that ``--device`` asks for. Raises ``ValueError``."""
    if text == "auto":
        return ()
    if re.fullmatch(r"[1-9][0-9]{0,3}", text) and int(text) <= DEVICES_MAX:
        return int(text)
    named = [_NAME.fullmatch(name.strip()) for name in text.split(",")]
    # The same device has two names, as cuda and cuda:0.
    known = [(match[1], match[2] or "0") for match in named if match is not None]
    is_one_kind = len({kind for kind, _ in known}) == 1
    if len(known) < len(named) or len(set(known)) < len(known) or not is_one_kind:
        raise ValueError(
            f"--device is {text[:100]!r}; it is auto, cpu, cuda, mps, one of several as cuda:1, a "
            f"number from 1 to {DEVICES_MAX}, or different devices of one kind as cuda:0,cuda:1"
        )
    return (text,) if len(known) == 1 else tuple(f"{kind}:{index}" for kind, index in known)

"""Checks before joining: whether this machine is large enough for a run, and what the run costs.

``examine`` counts the memory of the model before building it, because the author of a run file may
be anybody; then it builds the model once and times a few steps. Nothing is downloaded or written.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from averaging.numbers.codecs import codec_named
from peer.errors import MachineTooSmall, OwnProgramNeeded
from peer.guest.enforcement import folder_bytes
from peer.model.recipes import (
    build_model,
    build_optimizer,
    next_token_loss,
)
from peer.model.recipes.counting import size_of
from peer.quantities import bytes_text, count_text, duration_text
from peer.run_file.sections import (
    CustomData,
    CustomInner,
    CustomModel,
    RunFile,
    vocabulary,
)
from peer.trainer.parameters import LayoutUnknown, model_layout

AGENT_BYTES = 450e6
"""Memory of interpreter, libraries and daemon without any parameter."""

AGENT_COPIES = 3.5
"""Largest number of fp32 copies of the model in agent and shared memory."""

OUTER_CHECKPOINTS, INNER_CHECKPOINTS = 3, 2

TIMED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Preflight:
    """Results of the checks. Sizes are in bytes."""

    run: RunFile
    parameters: int
    device: str
    step_time_s: float
    memory_needed: float
    memory_free: float
    disk_needed: float
    disk_free: float
    upload_per_hour: float

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary for people, who decide by it whether to join."""
        run = self.run
        step_tokens = run.inner.batch_size * run.data.sequence_length
        cycle_s = run.outer.steps_per_cycle * self.step_time_s
        model, data = run.model.__struct_config__.tag, run.data.__struct_config__.tag
        licence = run.licence or "not stated"
        return (
            f"Run      {run.name}   id {run.run_id[:16]}...   licence {licence}",
            f"Trains   {model}, {count_text(self.parameters)} parameters; data: {data}; "
            "nothing from the network is executed",
            f"Machine  {self.device}   {count_text(step_tokens / self.step_time_s)} tokens/s   "
            f"memory {bytes_text(self.memory_needed)} of {bytes_text(self.memory_free)} free   "
            f"disk {bytes_text(self.disk_needed)} of {bytes_text(self.disk_free)} free",
            f"Network  sends at most {bytes_text(self.upload_per_hour)} an hour "
            f"({run.outer.codec}); the whole model is exchanged every {duration_text(cycle_s)}",
        )


def problems(
    *, memory_needed: float, memory_free: float, disk_needed: float, disk_free: float
) -> tuple[str, ...]:
    """Reasons why this machine is too small, in words; empty if it is large enough."""
    found = []
    if memory_needed > memory_free:
        found.append(
            f"it needs about {bytes_text(memory_needed)} of memory, {bytes_text(memory_free)} "
            "are free; close other programs or use a larger machine"
        )
    if disk_needed > disk_free:
        found.append(
            f"it needs about {bytes_text(disk_needed)} of disk, {bytes_text(disk_free)} "
            "are free; free some or pass --directory"
        )
    return tuple(found)


def expected_share(step_time_s: float, others: Sequence[float]) -> float:
    """Part of the run's speed that a peer with this step time adds, at equal batch sizes."""
    own = 1.0 / step_time_s
    return own / (own + sum(1.0 / other for other in others if other > 0))


def examine(run: RunFile, *, device: torch.device, pace_s: float, directory: Path) -> Preflight:
    """Measure the step time, and estimate memory, disk and upload.

    Raises ``MachineTooSmall``, ``OwnProgramNeeded``, and what building the model raises.
    """
    for what, is_custom in (
        ("model", isinstance(run.model, CustomModel)),
        ("data", isinstance(run.data, CustomData)),
        ("optimizer", isinstance(run.inner, CustomInner)),
    ):
        if is_custom:
            raise OwnProgramNeeded(run.name, what)
    size = size_of(run)
    count = size.parameters
    on_cpu = device.type == "cpu"
    # Parameters, gradients, two moments, and the logits of a step at least. An accelerator keeps
    # them in memory of its own.
    logits = run.inner.batch_size * run.data.sequence_length * (vocabulary(run.model) or 256)
    training = (16.0 * count + 8.0 * logits if on_cpu else 0.0) + size.buffer_bytes
    room = _room(run, count, training_bytes=training, directory=directory)
    model = build_model(run).to(device)
    layout = model_layout(model, run.outer.fragments)
    step_time_s = max(pace_s, _time_a_step(run, model, device))
    codec = codec_named(run.outer.codec)
    encoded = sum(
        codec.encoded_size([unit.size for unit in fragment.units]) for fragment in layout.fragments
    )
    cycles_per_hour = 3600.0 / (run.outer.steps_per_cycle * step_time_s)
    return Preflight(
        run=run,
        parameters=count,
        device=_device_name(device),
        step_time_s=step_time_s,
        # An exchange sends every value at most twice: own work, and the merged slice.
        upload_per_hour=2.0 * encoded * cycles_per_hour,
        **room,
    )


def check_keeper(run: RunFile, directory: Path) -> None:
    """Check a keeper's part of the run. Raises ``MachineTooSmall`` or ``LayoutUnknown``."""
    if isinstance(run.model, CustomModel):
        raise LayoutUnknown(run.name)
    _room(run, size_of(run).parameters, training_bytes=0.0, directory=directory)


def _room(run: RunFile, count: int, *, training_bytes: float, directory: Path) -> dict[str, float]:
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    disk = 8.0 * count * (OUTER_CHECKPOINTS + 1 + INNER_CHECKPOINTS + 1)
    room = {
        "memory_needed": training_bytes + AGENT_COPIES * 4 * count + AGENT_BYTES,
        "memory_free": float(psutil.virtual_memory().available),
        # A peer that returns has most of it in its folder already.
        "disk_needed": max(0.0, disk - folder_bytes(directory)),
        "disk_free": float(shutil.disk_usage(existing).free),
    }
    for problem in problems(**room):
        raise MachineTooSmall(run.name, problem)
    return room


def _time_a_step(run: RunFile, model: torch.nn.Module, device: torch.device) -> float:
    optimizer = build_optimizer(run, model)
    shape = (run.inner.batch_size, run.data.sequence_length + 1)
    tokens = torch.randint(0, min(256, vocabulary(run.model) or 256), shape, device=device)
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        next_token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)} {bytes_text(memory)}"
    if device.type == "mps":
        return f"Apple {platform.machine()}"
    return f"CPU, {torch.get_num_threads()} threads"

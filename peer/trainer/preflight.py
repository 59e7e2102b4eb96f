"""Checks before joining: whether this machine is large enough for a run, and what the run costs.

``examine`` counts the memory of the model before building it, because the author of a run file may
be anybody; then it builds the model that will be trained, and makes one pass to see how much of a
batch certainly fits. Nothing is downloaded. The best choice is found while training, remembered if
a file for it is given, and not measured again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from averaging.numbers.layout import Layout
from peer.data.files import data_words
from peer.errors import MachineTooSmall, Unusable
from peer.model.recipes.counting import size_of
from peer.quantities import bytes_text, count_text, duration_text
from peer.run_file.places import base_of
from peer.run_file.sections import (
    CustomData,
    CustomInner,
    CustomModel,
    HfModel,
    RunFile,
)
from peer.storage.home import folder_bytes
from peer.trainer.computing.choices import DeviceFacts
from peer.trainer.computing.device_facts import facts_of, free_bytes
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.fitting import (
    Fit,
    Goal,
    Remembered,
    begin,
    key_of,
    least_bytes,
    room_bytes,
)
from peer.trainer.computing.tuning import Tuner
from peer.trainer.loop import TrainerSettings, open_engine, prepare_torch
from peer.trainer.needs import agent_bytes, cycle_bytes, disk_bytes
from peer.trainer.parameters import model_layout

COMPILED = 1.9
"""Speed of compiled code over that of the trial before joining; 1.5 to 1.9 were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The room that a run takes on this machine, and that there is."""

    memory_needed: float
    memory_free: float
    disk_needed: float
    disk_free: float

    def __str__(self) -> str:
        return (
            f"memory {bytes_text(self.memory_needed)} of {bytes_text(self.memory_free)} free   "
            f"disk {bytes_text(self.disk_needed)} of {bytes_text(self.disk_free)} free"
        )

    def check(self, run_name: str) -> None:
        """Raise ``MachineTooSmall`` with the shortage and a remedy."""
        for what, needed, free, remedy in (
            (
                "memory",
                self.memory_needed,
                self.memory_free,
                "close other programs or use a larger machine",
            ),
            ("disk", self.disk_needed, self.disk_free, "free some or pass --directory"),
        ):
            if needed > free:
                text = f"it needs about {bytes_text(needed)} of {what}, {bytes_text(free)} are free"
                raise MachineTooSmall(run_name, f"{text}; {remedy}")


@dataclass(frozen=True, slots=True)
class Preflight:
    """Results of the checks. Sizes are in bytes."""

    run: RunFile
    parameters: int
    engine: Engine | None
    """The model on its device, ready to train; ``None`` in a process that is not to train it."""
    facts: DeviceFacts
    goal: Goal
    """The way to begin to train, and the measurements left to make while training."""
    key: str
    """Key of the measurements in ``Remembered``."""
    devices: int
    frozen_bytes: float
    """Memory of the base below adapters, on each device."""
    step_bytes: float
    """Memory of gradients and activations, beside parameters and moments."""
    step_time_s: float
    room: Room
    upload_per_hour: float

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary for people, who decide by it whether to join."""
        run = self.run
        step_tokens = run.inner.batch_size * run.data.sequence_length
        cycle_s = run.outer.steps_per_cycle * self.step_time_s
        model, data = run.model.__struct_config__.tag, data_words(run)
        measured = self.goal.known is not None
        about, most, by = (
            ("", "at most", "") if measured else ("about ", "about", " by a short trial")
        )
        return (
            *first_lines(run),
            f"Trains   {model}, {count_text(self.parameters)} parameters{_of_base(run)}; data: "
            f"{data}; nothing from the network is executed",
            f"Device   {self._device_text}",
            f"Machine  {about}{count_text(step_tokens / self.step_time_s)} tokens/s   {self.room}",
            f"Network  sends {most} {bytes_text(self.upload_per_hour)} an hour{by} "
            f"({run.outer.codecs_text}); the whole model is exchanged every "
            + (duration_text(cycle_s) if cycle_s >= 60 else f"{cycle_s:.2g} s"),
        )

    @property
    def _device_text(self) -> str:
        count = f"{self.devices} x " if self.devices > 1 else ""
        text = f"{count}{self.facts.name}   {self.goal.text}"
        if self.facts.kind != "cuda":
            return text
        # Parameters and two moments.
        used = 12.0 * self.parameters + self.frozen_bytes + self.step_bytes
        return f"{text}   {bytes_text(used)} of {bytes_text(self.facts.memory_bytes)}"


def _of_base(run: RunFile) -> str:
    base = base_of(run.model)
    if base is None:
        return ""
    adapts = isinstance(run.model, HfModel) and run.model.lora is not None
    return f" of adapters on {base.text}" if adapts else f", which begin as {base.text}"


def first_lines(run: RunFile) -> tuple[str, ...]:
    """The run as its file names it."""
    licence = run.licence or "not stated"
    return (
        f"Run      {run.name}   id {run.run_id[:16]}...   licence {licence}",
        *about_lines(run),
    )


def about_lines(run: RunFile) -> tuple[str, ...]:
    """One line with the addresses of a run's page and people; no line if its file names none."""
    addresses = {"": run.homepage, "contact ": run.contact, "discussion ": run.discussion}
    parts = [f"{what}{where}" for what, where in addresses.items() if where]
    return (f"About    {'   '.join(parts)}",) if parts else ()


def expected_share(step_time_s: float, others: Sequence[float]) -> float:
    """Part of the run's speed that a peer with this step time adds, at equal batch sizes."""
    own = 1.0 / step_time_s
    return own / (own + sum(1.0 / other for other in others if other > 0))


def examine(
    run: RunFile,
    settings: TrainerSettings,
    *,
    pace_s: float,
    directory: Path,
    remembered: Remembered | None = None,
    devices: int = 1,
) -> Preflight:
    """Open the engine, measure what fits, and estimate memory, disk and upload.

    ``devices``: number of devices like this one that share each batch.
    Raises ``MachineTooSmall``, ``Unusable``, and what ``open_engine`` raises.
    """
    for what, is_custom in (
        ("model", isinstance(run.model, CustomModel)),
        ("data", isinstance(run.data, CustomData)),
        ("optimizer", isinstance(run.inner, CustomInner)),
    ):
        if is_custom:
            raise Unusable(
                f"the {what} of run {run.name!r} is 'custom': only a program that provides it to "
                "peer.join can take part; see README.md, 'Your own loop'",
                section="own-program-needed",
            )
    device = prepare_torch(settings)
    size = size_of(run)
    count = size.parameters
    on_cpu = device.type == "cpu"
    least = least_bytes(run, count) + size.frozen_bytes
    training = devices * least if on_cpu else 0.0
    room = _room(run, count, training_bytes=training + size.buffer_bytes, directory=directory)
    if not on_cpu:
        _check_device(run, device, least + size.buffer_bytes)
    engine = open_engine(run, settings)
    facts = facts_of(device)
    key = key_of(run, facts, settings.wishes, devices=devices)
    goal, fit = begin(
        engine,
        facts,
        settings.wishes,
        room=room_bytes(
            engine, others_bytes=agent_bytes(run, count) if on_cpu else 0.0, devices=devices
        ),
        known=None if remembered is None else remembered.get(key),
    )
    engine.tuning = Tuner(engine, goal, keep=partial(_keep, remembered, key))
    if on_cpu:
        room = replace(room, memory_needed=room.memory_needed + devices * fit.step_bytes)
    layout = model_layout(engine.model, run.outer.fragments, buffers=run.outer.buffers)
    sequence_s = fit.sequence_s
    if goal.known is None and goal.choices.compile:
        sequence_s /= COMPILED  # what is sent must not be told too low
    step_time_s = max(pace_s, sequence_s * math.ceil(run.inner.batch_size / devices))
    cycles_per_hour = 3600.0 / (run.outer.steps_per_cycle * step_time_s)
    return Preflight(
        run=run,
        parameters=count,
        engine=engine,
        facts=facts,
        goal=goal,
        key=key,
        devices=devices,
        frozen_bytes=size.frozen_bytes,
        step_bytes=fit.step_bytes,
        step_time_s=step_time_s,
        upload_per_hour=cycle_bytes(run, layout) * cycles_per_hour,
        room=room,
    )


def _keep(remembered: Remembered | None, key: str, found: Fit) -> None:
    if remembered is not None:
        remembered.put(key, found)


def _check_device(run: RunFile, device: torch.device, needed: float) -> None:
    free = free_bytes(device)
    if needed > free:
        raise MachineTooSmall(
            run.name,
            f"it needs at least {bytes_text(needed)} of memory on the device, {bytes_text(free)} "
            "are free; use a larger device, or several as one peer (see 'shoal docs speed')",
        )


def check_keeper(run: RunFile, directory: Path, told: Layout | None = None) -> tuple[str, ...]:
    """The needs of a keeper on this machine, in lines. Raises ``MachineTooSmall``.

    ``told``: the layout of a model that only programs have.
    """
    count = size_of(run).parameters if told is None else told.size
    room = _room(run, count, training_bytes=0.0, directory=directory)
    return (
        *first_lines(run),
        f"Keeps    the state of {count_text(count)} parameters, and serves it; it trains nothing",
        f"Machine  {room}",
    )


def _room(run: RunFile, count: int, *, training_bytes: float, directory: Path) -> Room:
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    room = Room(
        memory_needed=training_bytes + agent_bytes(run, count),
        memory_free=free_bytes(torch.device("cpu")),
        # A peer that returns has most of it in its folder already.
        disk_needed=max(0.0, disk_bytes(run, count) - folder_bytes(directory)),
        disk_free=float(shutil.disk_usage(existing).free),
    )
    room.check(run.name)
    return room

"""Work for the ranks of an island: functions that a spawned process can import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from peer.island.ranks import Place
from peer.island.training import batch_parts, open_rank
from peer.run_file.sections import AdamwInner, GptModel, PythonStdlibData, RunFile
from peer.trainer.choices import Choices
from peer.trainer.fitting import Fit, Goal
from peer.trainer.loop import TrainerSettings, open_engine


def add_up(place: Place) -> int:
    """Each rank adds its number, so that rank 0 ends with a code of all."""
    number = torch.tensor([place.rank + 1])
    dist.all_reduce(number)
    return 40 + int(number)


def add_up_for_ever(place: Place) -> int:
    """Rank 0 ends with 7 once it was asked to; the others see it in the sum."""
    asked: list[int] = []
    if place.rank == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        _note(place, "ready")
    while True:
        number = torch.tensor([len(asked)])
        dist.all_reduce(number)
        if number:
            return 7
        time.sleep(0.01)


def lose_the_second_once(place: Place) -> int:
    """The second rank is killed at its first start."""
    if place.rank == 1 and not _notes(place, "killed"):
        _note(place, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return add_up(place)


def lose_one_device_always(place: Place) -> int:
    """The process on ``cpu:1`` fails whenever it starts."""
    if place.device == "cpu:1":
        raise RuntimeError("this device has fallen off the bus")
    return add_up(place)


def refuse(place: Place) -> int:
    """Rank 0 is refused by the run; the others hear of it."""
    dist.barrier()
    return 4 if place.rank == 0 else 3


def _note(place: Place, name: str) -> None:
    (place.log.parent / name).touch()


def _notes(place: Place, name: str) -> bool:
    return Path(place.log.parent / name).exists()


def compare_gradients(place: Place) -> int:
    """Each rank computes the gradient of its part; code 0 if the sum is that of the whole batch."""
    run = RunFile(
        model=GptModel(layers=1, width=16, heads=2, context=8, vocabulary=32),
        data=PythonStdlibData(sequence_length=8),
        inner=AdamwInner(batch_size=5),
    )
    settings = TrainerSettings(threads=1)
    choices = Choices(micro_batch=2)
    goal = Goal(first=choices, choices=choices, room_bytes=1e9, known=Fit(choices, 1.0, 1.0))
    engine = open_rank(run, settings, goal, place)
    alone = open_engine(run, replace(settings, device="cpu"))
    alone.choose(Choices(micro_batch=5))
    batch = torch.randint(0, 32, (5, 9), generator=torch.Generator().manual_seed(7))
    own = torch.split(batch, list(batch_parts(5, len(place.devices))))[place.rank]
    assert len(own) == engine.batch_size
    engine.gradients(own)
    engine.combine()
    alone.gradients(batch)
    pairs = zip(engine.model.parameters(), alone.model.parameters(), strict=True)
    for summed, whole in pairs:
        assert summed.grad is not None and whole.grad is not None
        torch.testing.assert_close(summed.grad, whole.grad, rtol=1e-4, atol=1e-6)
    return 0

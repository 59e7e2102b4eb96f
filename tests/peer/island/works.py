"""Work for the ranks of an island: functions that a spawned process can import."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import torch
import torch.distributed as dist

from peer.island.ranks import RankPlace
from peer.island.training import SummedGradients, batch_parts, open_rank
from peer.run_file.sections import (
    AdamwInner,
    FilesData,
    FileSource,
    GptModel,
    PythonStdlibData,
    RunFile,
)
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.fitting import Fit, Goal
from peer.trainer.loop import TrainerSettings, open_engine


def add_up(place: RankPlace) -> int:
    """Each rank adds its number, so that rank 0 ends with a code of all."""
    assert os.environ["LOCAL_WORLD_SIZE"] == str(len(place.devices)), "cores are to be shared"
    number = torch.tensor([place.rank + 1])
    dist.all_reduce(number)
    return 40 + int(number)


def add_up_for_ever(place: RankPlace) -> int:
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


def lose_one_device_always(place: RankPlace) -> int:
    """The process on ``cpu:1`` fails whenever it starts."""
    if place.device == "cpu:1":
        raise RuntimeError("this device has fallen off the bus")
    return add_up(place)


def refuse(place: RankPlace) -> int:
    """Rank 0 is refused by the run; the others hear of it."""
    dist.barrier()
    return 4 if place.rank == 0 else 3


def _note(place: RankPlace, name: str) -> None:
    (place.log.parent / name).touch()


RUN = RunFile(
    model=GptModel(layers=2, width=16, heads=2, context=8, vocabulary=32),
    data=PythonStdlibData(sequence_length=8),
    inner=AdamwInner(batch_size=5),
)


ANSWERS = msgspec.structs.replace(
    RUN, data=FilesData(sources=[FileSource(files=["a.jsonl"])], form="chat", sequence_length=8)
)


def rank_engine(
    place: RankPlace, run: RunFile = RUN, batch: torch.Tensor | None = None
) -> tuple[Engine, SummedGradients, torch.Tensor]:
    """An engine with small buckets, and this rank's part of a batch."""
    batch = BATCH if batch is None else batch
    choices = Choices(micro_batch=2)
    goal = Goal(first=choices, choices=choices, room_bytes=1e9, known=Fit(choices, 1.0, 1.0))
    engine = open_rank(run, TrainerSettings(threads=1), goal, place)
    parts = torch.split(batch, list(batch_parts(5, len(place.devices))))
    own = parts[place.rank].to(engine.device)
    assert len(own) == engine.batch_size
    parameters = list(engine.model.parameters())
    summed = SummedGradients(parameters, bucket_values=700)
    engine.combine = summed
    return engine, summed, own


BATCH = torch.randint(0, 32, (5, 9), generator=torch.Generator().manual_seed(7))


def compare_gradients(place: RankPlace) -> int:
    """Each rank computes the gradient of its part; code 0 if the sum is that of the whole batch."""
    return _compared(place, RUN, BATCH)


def compare_gradients_of_answers(place: RankPlace) -> int:
    """The same with sequences of which the first rank predicts fewer tokens than the second."""
    answers = torch.where(torch.arange(9) < torch.tensor([[8], [8], [9], [1], [0]]), ~BATCH, BATCH)
    assert [int((part[:, 1:] >= 0).sum()) for part in answers.split([3, 2])] == [2, 16]
    return _compared(place, ANSWERS, answers)


def _compared(place: RankPlace, run: RunFile, batch: torch.Tensor) -> int:
    engine, summed, own = rank_engine(place, run, batch)
    alone = open_engine(run, TrainerSettings(threads=1, device="cpu"))
    alone.choose(Choices(micro_batch=5))
    for _ in range(2):
        engine.gradients(own)
        assert summed.sent > 3, "buckets were sent during the backward pass"
        summed.finish()
        alone.gradients(batch)
        pairs = zip(engine.model.parameters(), alone.model.parameters(), strict=True)
        for found, whole in pairs:
            assert found.grad is not None and whole.grad is not None
            torch.testing.assert_close(found.grad.cpu(), whole.grad, rtol=1e-4, atol=1e-6)
            found.grad = whole.grad = None
    return 0


def compare_with_a_sum_at_the_end(place: RankPlace) -> int:
    """Code 0 if the sums are those of one operation after the backward pass.

    The second rank runs out of memory in the middle of its last backward pass, and has sent the
    gradients of some buckets by then.
    """
    engine, summed, own = rank_engine(place)
    plain = open_engine(RUN, TrainerSettings(threads=1, device="cpu"))
    plain.choose(Choices(micro_batch=2))
    plain.gradients(own)
    failures: list[int] = []

    def fail_once(gradient: torch.Tensor) -> None:
        if place.rank == 1 and summed.sent and not failures:
            failures.append(summed.sent)
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine.model.get_parameter("blocks.0.attention.out.weight").register_hook(fail_once)
    engine.gradients(own)
    assert bool(failures) == (place.rank == 1)
    summed.finish()
    for found, own_part in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        assert found.grad is not None and own_part.grad is not None
        whole = own_part.grad * (len(own) / len(BATCH))
        dist.all_reduce(whole)
        torch.testing.assert_close(found.grad, whole, rtol=1e-5, atol=1e-7)
    return 0

"""Helpers of own loops: ``peer.autocast`` and ``peer.micro_batches``, the machine's part of a step,
``peer.describe``, the run file of an own model, and the held-out loss of such a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from peer.run_file.presets import NEW_OUTER
from peer.run_file.sections import CustomData, CustomInner, CustomModel, RunFile
from peer.run_file.writing import to_toml
from peer.trainer.computing.choices import Precision
from peer.trainer.computing.device_facts import facts_of
from peer.trainer.computing.engine import autocast as in_precision
from peer.trainer.parameters import trained_parameters
from peer.trainer.rank import Rank

Batch = TypeVar("Batch", Tensor, tuple[Tensor, ...], Mapping[str, Tensor])


FRAGMENTS_MAX = 16
FRAGMENT_PARAMETERS = 100_000
"""Fragments of a model that ``describe`` writes have at least about as many parameters."""


def describe(model: torch.nn.Module, *, name: str = "my-run") -> str:
    """The text of a run file for this model, whose data and optimizer the program brings, too.

    Write it to a file, edit it, and join it: ``peer.join("my.run.toml", model=model, ...)``. Every
    peer has to build the same model.
    """
    count = sum(parameter.numel() for parameter in trained_parameters(model).values())
    fragments = max(1, min(FRAGMENTS_MAX, count // FRAGMENT_PARAMETERS))
    run = RunFile(
        name=name,
        model=CustomModel(),
        data=CustomData(),
        inner=CustomInner(),
        outer=msgspec.structs.replace(NEW_OUTER, fragments=fragments),
    )
    note = f"For a model of {count:,} trained parameters, which a program passes to peer.join."
    return to_toml(run, notes=[note], short=True)


def autocast(run: Rank, precision: Precision | None = None) -> AbstractContextManager[Any]:
    """The context for forward passes in a precision that suits the model's device.

    Unset: bf16 where the hardware computes in it, else no autocast. Never fp16, which needs a
    ``torch.amp.GradScaler`` in the loop.
    """
    device = run.device
    return in_precision(device, _usual(device) if precision is None else precision)


@cache
def _usual(device: torch.device) -> Precision:
    return "bf16" if "bf16" in facts_of(device).fast else "fp32"


def micro_batches(
    batch: Batch, size: int, *, counted: Callable[[Batch], int | Tensor] | None = None
) -> Iterator[tuple[Batch, float | Tensor]]:
    """Parts of at most ``size`` samples, each with the weight of its mean loss in the step.

    ::

        for part, weight in peer.micro_batches(batch, 8):
            (loss_of(part) * weight).backward()

    The gradient is that of the whole batch at once, to rounding. ``batch``: a tensor, or a tuple or
    a mapping of tensors, with samples in the first dimension. ``counted``: the number of values
    that the loss of a part is the mean over, such as tokens that are not ignored; by default each
    sample counts the same. If it returns tensors, nothing is read from the device. Where nothing
    counts, all weights are 0.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a micro-batch has at least one sample")
    parts = _parts(batch, size)
    counts = [_samples(part) if counted is None else counted(part) for part in parts]
    total = sum(counts)
    total = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
    for part, count in zip(parts, counts, strict=True):
        yield part, count / total


def _parts(batch: Any, size: int) -> list[Any]:
    if isinstance(batch, Mapping):
        pieces = zip(*(torch.split(values, size) for values in batch.values()), strict=True)
        return [dict(zip(batch, piece, strict=True)) for piece in pieces]
    if isinstance(batch, Tensor):
        return list(torch.split(batch, size))
    return list(zip(*(torch.split(values, size) for values in batch), strict=True))


def _samples(part: Any) -> int:
    if isinstance(part, Mapping):
        part = next(iter(part.values()))
    return len(part if isinstance(part, Tensor) else part[0])


MeasureModel: TypeAlias = Callable[[Any], tuple[float, int]]
"""Function of a model that returns the mean loss and the number of sequences or samples."""


def in_evaluation(model: torch.nn.Module, measure: MeasureModel) -> Callable[[], tuple[float, int]]:
    """A function for ``run.measure_with`` that measures in evaluation mode and without gradients.

    Afterwards every module is in its earlier mode again.
    """

    def measured() -> tuple[float, int]:
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                return measure(model)
        finally:
            for module in training:
                module.training = True

    return measured


def of_batches(batches: Iterable[Mapping[str, torch.Tensor]]) -> MeasureModel:
    """The mean of the ``loss`` that a transformers model computes for batches with labels."""

    def measure(model: Any) -> tuple[float, int]:
        device = next(model.parameters()).device
        total, count = 0.0, 0
        for batch in batches:
            samples = len(next(iter(batch.values())))
            here = {name: values.to(device) for name, values in batch.items()}
            total += float(model(**here).loss) * samples
            count += samples
        if not count:
            raise ValueError("the held-out data has no batch; give some, or none to measure")
        return total / count, count

    return measure

"""Measuring the held-out loss of a model that the caller's loop trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

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

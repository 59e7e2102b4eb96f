"""Measuring leaves the model as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from peer.trainer.measuring import in_evaluation, of_batches


def test_every_module_is_in_the_mode_that_it_was_in_also_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model.train()
    model[1].eval()  # frozen by its owner
    before = [module.training for module in model.modules()]

    def breaks(found: Any) -> tuple[float, int]:
        assert not any(module.training for module in found.modules())
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_evaluation(model, breaks)()
    assert [module.training for module in model.modules()] == before


def test_batches_count_by_their_samples() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, values: torch.Tensor) -> Any:
            return SimpleNamespace(loss=values.mean())

    batches = [{"values": torch.tensor([1.0, 1.0, 1.0])}, {"values": torch.tensor([5.0])}]
    assert of_batches(batches)(Model()) == (2.0, 4)
    with pytest.raises(ValueError, match="no batch"):
        of_batches([])(Model())

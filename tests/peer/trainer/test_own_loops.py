"""Helpers for own training loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

import peer
from peer.trainer import own_loops
from peer.trainer.own_loops import in_evaluation, of_batches

IGNORED = -100


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(3, 5)


def gradient(model: nn.Module) -> torch.Tensor:
    (weight, _) = model.parameters()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("size", [1, 3, 4, 7, 9])
def test_parts_of_a_batch_add_up_to_its_gradient_also_with_a_smaller_last_one(size: int) -> None:
    whole, divided = model_of(), model_of()
    inputs, classes = torch.randn(7, 3), torch.randint(5, (7,))
    F.cross_entropy(whole(inputs), classes).backward()
    for (some, their), weight in peer.micro_batches((inputs, classes), size):
        (F.cross_entropy(divided(some), their) * weight).backward()
    torch.testing.assert_close(gradient(divided), gradient(whole))


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_a_batch_in_which_nothing_counts_has_no_weight(count: int | torch.Tensor) -> None:
    parts = peer.micro_batches(torch.ones(3, 2), 2, counted=lambda part: count)
    assert [float(weight) for _, weight in parts] == [0.0, 0.0]


def test_a_mean_over_what_is_not_ignored_is_weighted_by_that() -> None:
    whole, divided = model_of(), model_of()
    labels = torch.randint(5, (7, 6))
    labels[0, 1:] = labels[3:5, 2:] = IGNORED
    batch = {"inputs": torch.randn(7, 6, 3), "labels": labels}

    def loss(model: nn.Module, part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part["inputs"]).flatten(0, 1), part["labels"].flatten())

    loss(whole, batch).backward()
    for part, weight in peer.micro_batches(
        batch, 2, counted=lambda part: (part["labels"] != IGNORED).sum()
    ):
        (loss(divided, part) * weight).backward()
    torch.testing.assert_close(gradient(divided), gradient(whole))

    equal = model_of()
    for part, weight in peer.micro_batches(batch, 2):
        (loss(equal, part) * weight).backward()
    assert not torch.allclose(gradient(equal), gradient(whole)), "it makes a difference"


def test_a_micro_batch_has_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        list(peer.micro_batches(torch.ones(3), 0))


def dtype_under(context: Any) -> torch.dtype:
    with context:
        found: torch.dtype = model_of()(torch.ones(2, 3)).dtype
    return found


def test_autocast_computes_in_the_precision_that_was_asked_for_and_keeps_fp32_weights() -> None:
    run: Any = SimpleNamespace(device=torch.device("cpu"))
    assert dtype_under(peer.autocast(run, "bf16")) is torch.bfloat16
    assert dtype_under(peer.autocast(run, "fp32")) is torch.float32
    model = model_of()
    with peer.autocast(run, "bf16"):
        loss = model(torch.ones(2, 3)).float().sum()
    loss.backward()
    assert {gradient(model).dtype, *(p.dtype for p in model.parameters())} == {torch.float32}


@pytest.mark.parametrize(
    ("fast", "expected"),
    [(("bf16", "fp32"), torch.bfloat16), (("fp16", "fp32"), torch.float32)],  # fp16 needs a scaler
)
def test_autocast_takes_bf16_by_itself_where_the_hardware_has_it(
    fast: tuple[str, ...], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(fast=fast)
    monkeypatch.setattr(own_loops, "facts_of", lambda device: facts)
    own_loops._usual.cache_clear()
    run: Any = SimpleNamespace(device=torch.device("cpu"))
    try:
        assert dtype_under(peer.autocast(run)) is expected
    finally:
        own_loops._usual.cache_clear()


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

"""An accelerator's memory, given back while training rests."""

from __future__ import annotations

import copy

import pytest
import torch

from peer.trainer import given_back
from peer.trainer.given_back import GivenBack


def learner() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    optimizer.step()


def test_training_goes_on_with_the_same_tensors_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an accelerator here: every tensor counts as one that is on it."""
    monkeypatch.setattr(given_back, "is_away", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    model, optimizer = learner()
    step(model, optimizer)
    twin, twins = copy.deepcopy((model, optimizer))
    objects = [*map(id, model.parameters())]
    places = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    released = []
    held = GivenBack(model, [optimizer], release=lambda: released.append(True))
    held.give()
    held.give()
    moved = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert not places & moved and released == [True]
    with torch.no_grad():  # what is merged meanwhile
        for each, same in zip(model.parameters(), twin.parameters(), strict=True):
            each.add_(1.0)
            same.add_(1.0)
    held.take()
    held.take()
    assert [*map(id, model.parameters())] == objects
    step(model, optimizer)
    step(twin, twins)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_on_a_processor_there_is_nothing_to_give_back() -> None:
    model, optimizer = learner()
    held = GivenBack(model, [optimizer], release=lambda: pytest.fail("nothing to release"))
    held.give()
    held.take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu_is_free_while_training_rests() -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(8, 4096, device="cuda")
    model(inputs).sum().backward()
    optimizer.step()
    held = GivenBack(model, [optimizer])
    before = torch.cuda.memory_reserved()
    held.give()
    assert torch.cuda.memory_reserved() < before - 4 * 4096**2
    held.take()
    model(inputs).sum().backward()
    optimizer.step()

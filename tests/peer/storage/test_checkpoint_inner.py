from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from peer.model.recipes import build_model, build_optimizer, next_token_loss
from peer.run_file.sections import (
    AdamwInner,
    GptModel,
    MuonInner,
    PythonStdlibData,
    RunFile,
    SgdInner,
)
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.inner_state import InnerStateUnknown, capture, restore_inner, save

SHAPE = GptModel(layers=1, width=32, heads=2, context=16)
ADAMW = RunFile(model=SHAPE, data=PythonStdlibData(sequence_length=16))
SGD = RunFile(model=SHAPE, data=PythonStdlibData(sequence_length=16), inner=SgdInner())

MUON = RunFile(model=SHAPE, data=PythonStdlibData(sequence_length=16), inner=MuonInner())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        batch = torch.randint(0, 256, (4, 17))  # from torch's generator: it is part of the state
        torch.autograd.backward(next_token_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("run", [ADAMW, SGD, MUON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restarted_trainer_continues_exactly(
    tmp_path: Path, run: RunFile, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = build_model(run).to(dtype)
    optimizer = build_optimizer(run, model)
    train(model, optimizer, 3)
    folder = CheckpointFolder(tmp_path)
    inner = capture(model, optimizer, run_id=run.run_id, step=3, data={"position": 12})
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 3)  # before it is written: the capture must be a copy
    save(folder, inner)

    torch.manual_seed(99)
    again = build_model(run).to(dtype)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(parameters[name])
    fresh = build_optimizer(run, again)
    restored = restore_inner(folder, again, fresh, run_id=run.run_id)
    assert restored is not None
    assert not restored.reason
    assert restored.step == 3
    assert restored.data == {"position": 12}
    train(again, fresh, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_settings_of_the_run_override_saved_settings(tmp_path: Path) -> None:
    model = build_model(ADAMW)
    optimizer = build_optimizer(ADAMW, model)
    train(model, optimizer, 1)
    folder = CheckpointFolder(tmp_path)
    save(folder, capture(model, optimizer, run_id=ADAMW.run_id, step=1, data={}))
    slower = build_optimizer(
        RunFile(model=SHAPE, data=ADAMW.data, inner=AdamwInner(learning_rate=1e-5)), model
    )
    assert restore_inner(folder, model, slower, run_id=ADAMW.run_id) is not None
    assert {group["lr"] for group in slower.param_groups} == {1e-5}
    assert len(slower.state) == len(list(model.parameters()))


def test_the_state_of_another_optimizer_is_not_restored(tmp_path: Path) -> None:
    model = build_model(ADAMW)
    optimizer = build_optimizer(ADAMW, model)
    train(model, optimizer, 1)
    folder = CheckpointFolder(tmp_path)
    save(folder, capture(model, optimizer, run_id=ADAMW.run_id, step=5, data={"position": 2}))
    sgd = build_optimizer(SGD, model)
    restored = restore_inner(folder, model, sgd, run_id=ADAMW.run_id)
    assert restored is not None
    assert restored.reason == "it belongs to AdamW, this trainer uses SGD"
    assert restored.data == {"position": 2}
    assert not sgd.state


def test_the_state_of_another_run_or_model_is_not_used(tmp_path: Path) -> None:
    model = build_model(ADAMW)
    optimizer = build_optimizer(ADAMW, model)
    train(model, optimizer, 1)
    folder = CheckpointFolder(tmp_path)
    assert restore_inner(folder, model, optimizer, run_id=ADAMW.run_id) is None
    save(folder, capture(model, optimizer, run_id=ADAMW.run_id, step=1, data={}))
    assert restore_inner(folder, model, optimizer, run_id="other") is None
    wider = RunFile(model=GptModel(layers=1, width=64, heads=2, context=16), data=ADAMW.data)
    other = build_model(wider)
    restored = restore_inner(folder, other, build_optimizer(wider, other), run_id=ADAMW.run_id)
    assert restored is not None
    assert "shape" in restored.reason


def test_a_state_that_would_need_pickle_is_refused(tmp_path: Path) -> None:
    model = build_model(ADAMW)
    optimizer = build_optimizer(ADAMW, model)
    train(model, optimizer, 1)
    next(iter(optimizer.state.values()))["hook"] = object()
    with pytest.raises(InnerStateUnknown, match="'hook' is of type object"):
        capture(model, optimizer, run_id=ADAMW.run_id, step=1, data={})


def test_a_parameter_of_two_optimizers_cannot_be_saved(tmp_path: Path) -> None:
    model = build_model(SGD)
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    torch.autograd.backward(next_token_loss(model, torch.randint(0, 256, (4, 17))))
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(InnerStateUnknown, match="parameter of two optimizers"):
        capture(model, optimizers, run_id="r", step=1, data={})


def test_the_random_state_of_the_model_s_own_gpu_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of torch's current device. A machine without a GPU can pretend to have two."""
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device="cuda:1")])
    optimizer = torch.optim.SGD(model.parameters())
    state = torch.arange(16, dtype=torch.uint8)
    states = {torch.device("cuda:1"): state}
    monkeypatch.setattr("torch.cuda.get_rng_state", states.__getitem__)
    folder = CheckpointFolder(tmp_path)
    save(folder, capture(model, optimizer, run_id="run", step=1, data={}))

    monkeypatch.setattr(
        "torch.cuda.set_rng_state", lambda found, device: states.update({device: found})
    )
    states.clear()
    assert restore_inner(folder, model, optimizer, run_id="run") is not None
    ((device, found),) = states.items()
    assert device == torch.device("cuda:1") and torch.equal(found, state)

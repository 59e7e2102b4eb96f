from __future__ import annotations

import json
from copy import deepcopy
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from peer.model import muon
from peer.model.muon import Muon, batches, orthogonalised
from peer.model.recipes import (
    build_model,
    build_optimizer,
    next_token_loss,
    trained_parameters,
)
from peer.run_file.sections import GptModel, MuonInner, RunFile
from tests.processes import Processes

SMALL = GptModel(layers=2, width=32, heads=2, context=16)
SHAPES = [(24, 24), (16, 64), (64, 16)]


def matrices(count: int, shape: tuple[int, int], seed: int = 0) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    found = [nn.Parameter(torch.randn(shape, generator=source)) for _ in range(count)]
    for parameter in found:
        parameter.grad = torch.randn(shape, generator=source)
    return found


def group(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters, "orthogonal": True}]


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "product_dtype", lambda device: torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_of_an_update_are_about_one(shape: tuple[int, int]) -> None:
    drawn = torch.stack([p.detach() for p in matrices(3, shape)])
    updates = orthogonalised(drawn).float()
    values = torch.linalg.svdvals(updates)
    assert updates.shape == drawn.shape
    # A square matrix of noise has singular values near 0, which five iterations do not lift to 1.
    assert values.max() < 1.3
    assert values.quantile(0.1) > 0.5
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    aligned = torch.linalg.matrix_norm(updates - left @ right) / torch.linalg.matrix_norm(updates)
    assert aligned.max() < 0.4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_size_of_an_update_does_not_depend_on_the_gradient_or_the_shape(
    shape: tuple[int, int],
) -> None:
    for scale in (1e-6, 1.0, 1e6):
        (parameter,) = matrices(1, shape)
        assert parameter.grad is not None
        parameter.grad *= scale
        before = parameter.detach().clone()
        Muon(group([parameter]), lr=0.01, weight_decay=0.0).step()
        rms = (parameter.detach() - before).square().mean().sqrt().item()
        assert 0.7 * 0.2 * 0.01 < rms < 1.2 * 0.2 * 0.01, scale


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_matrices_is_stepped_like_each_alone(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = matrices(5, shape), matrices(5, shape)
    optimizers = [Muon(group(together))]
    for _ in range(3):
        optimizers[0].step()
    monkeypatch.setattr(muon, "BATCH_VALUES", 1)  # no two matrices in one batch
    assert [len(batch) for batch in batches(alone)] == [1] * 5
    optimizers.append(Muon(group(alone)))
    for _ in range(3):
        optimizers[1].step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_batch_has_matrices_of_one_shape_and_a_limited_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muon, "BATCH_VALUES", 2 * 16 * 64)
    mixed = [*matrices(3, (16, 64)), *matrices(2, (64, 16)), *matrices(1, (64, 64))]
    found = [[tuple(each.shape) for each in batch] for batch in batches(mixed)]
    assert sorted(map(len, found)) == [1, 1, 2, 2]
    assert all(len(set(batch)) == 1 for batch in found)
    assert sorted(chain(*found)) == sorted(tuple(each.shape) for each in mixed)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_those_of_torch(shape: tuple[int, int]) -> None:
    ours, theirs = matrices(3, shape), matrices(3, shape)
    optimizers = (
        Muon(group(ours), lr=0.01),
        torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):  # theirs computes in bf16
        torch.testing.assert_close(one, other, rtol=0, atol=3 * 0.01 * 0.2 * 0.2)


@pytest.mark.parametrize("fused", [False, True])
def test_other_parameters_are_stepped_by_adamw(fused: bool) -> None:
    ours, theirs = matrices(2, (8, 4)), matrices(2, (8, 4))
    settings = {"lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizers = (
        Muon(ours, fused=fused, **settings),  # type: ignore[arg-type]
        torch.optim.AdamW(theirs, fused=fused, **settings),  # type: ignore[arg-type]
    )
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert optimizers[0].state[one].keys() == optimizers[1].state[other].keys()


def test_only_matrices_of_blocks_are_orthogonal() -> None:
    for tied in (True, False):
        model = build_model(RunFile(model=GptModel(layers=2, width=32, heads=2, tied_head=tied)))
        optimizer = build_optimizer(RunFile(inner=MuonInner(weight_decay=0.3)), model)
        names = {id(p): name for name, p in trained_parameters(model).items()}
        held = {
            names[id(p)]: (group["orthogonal"], group["weight_decay"])
            for group in optimizer.param_groups
            for p in group["params"]
        }
        assert held.keys() == set(names.values())
        for name, (orthogonal, decay) in held.items():
            matrix = model.get_parameter(name).ndim == 2
            assert orthogonal == (matrix and name.startswith("blocks.")), name
            assert decay == (0.3 if matrix else 0.0), name


def test_a_vector_cannot_be_orthogonal() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\).*another group"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "orthogonal": True}])


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Muon(matrices(1, (4, 4)), **settings)  # type: ignore[arg-type]


def test_a_parameter_without_a_gradient_stays() -> None:
    (parameter,) = matrices(1, (4, 4))
    parameter.grad = None
    before = parameter.detach().clone()
    optimizer = Muon(group([parameter]))
    optimizer.step()
    assert torch.equal(parameter, before)
    assert not optimizer.state


def test_a_state_dict_continues_exactly() -> None:
    run = RunFile(model=SMALL, inner=MuonInner())

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        batch = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(seed))
        torch.autograd.backward(next_token_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    model = build_model(run)
    optimizer = build_optimizer(run, model)
    for seed in range(2):
        stepped(model, optimizer, seed)
    again = build_model(run)
    again.load_state_dict(model.state_dict())
    continued = build_optimizer(run, again)
    continued.load_state_dict(deepcopy(optimizer.state_dict()))
    for seed in range(2, 4):
        stepped(model, optimizer, seed)
        stepped(again, continued, seed)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_a_copy_steps_like_the_original() -> None:
    """Torch copies nothing but state, groups and defaults."""
    parameters = matrices(2, (8, 4))
    optimizer = Muon(group(parameters))
    copy = deepcopy(optimizer)
    for parameter in chain(parameters, copy.param_groups[0]["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    copy.step()
    for mine, its in zip(parameters, copy.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, its)


def test_it_follows_a_scheduler_and_a_closure_as_optimizers_do() -> None:
    (parameter,) = matrices(1, (4, 4))
    optimizer = Muon(group([parameter]), lr=0.5, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure)]
    scheduler.step()
    losses += [optimizer.step(closure), optimizer.step(closure)]
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.slow
def test_processes_with_parts_of_the_matrices_step_like_one_with_all(
    processes: Processes, tmp_path: Path
) -> None:
    island = processes.python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.peer.model.muon_rank", json.dumps({"directory": str(tmp_path)})),
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert island.wait(timeout=200) == 0, processes.output_of(island)[-3000:]
    assert processes.output_of(island).count("equal") == 2


def test_a_scaler_may_divide_the_gradients_in_its_step_and_be_left_out_later() -> None:
    """As a loop does that does not clip, and so does not unscale before the step."""
    run = RunFile(model=SMALL, inner=MuonInner())
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(3))
    found = []
    for scaled in (True, False):
        model = build_model(run)
        optimizer = build_optimizer(run, model)
        assert optimizer.defaults["fused"]
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for _ in range(2):
            scaler.scale(next_token_loss(model, tokens)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.autograd.backward(next_token_loss(model, tokens))
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

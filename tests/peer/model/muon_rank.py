"""A rank that steps a model distributed by FSDP2 with Muon, for tests.

It compares with a whole copy of the model, also after a restart from a checkpoint, and says
``equal`` or fails. Settings come as one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from peer.model.muon import Muon
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.inner_state import capture, restore_inner, save


def net() -> nn.Module:
    """Three matrices of one shape and two of others; two processes do not divide their rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), *(nn.Linear(7, 7) for _ in range(3)), nn.Linear(7, 3))


def muon(model: nn.Module) -> Muon:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return Muon([{"params": matrices, "orthogonal": True}, {"params": vectors}], lr=0.01)


def steps(model: nn.Module, optimizer: Muon, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(model: nn.Module, copy: nn.Module) -> None:
    for parameter, whole in zip(model.parameters(), copy.parameters(), strict=True):
        assert parameter.to_local().numel() < whole.numel()  # type: ignore[attr-defined]
        torch.testing.assert_close(
            parameter.full_tensor(),  # type: ignore[attr-defined]
            whole.detach(),
            rtol=2e-2,
            atol=1e-3,
        )


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    columns = Shard(1)
    model, copy = net(), net()
    fully_shard(model[0], shard_placement_fn=lambda p: columns if p.ndim == 2 else None)  # type: ignore[index]
    fully_shard(model)
    optimizer, whole = muon(model), muon(copy)
    steps(model, optimizer, range(3))
    steps(copy, whole, range(3))
    check(model, copy)

    folder = CheckpointFolder(Path(settings["directory"]) / str(dist.get_rank()))
    save(folder, capture(model, optimizer, run_id="r", step=3, data={}))
    restarted = muon(model)
    restored = restore_inner(folder, model, restarted, run_id="r")
    assert restored is not None
    assert not restored.reason, restored.reason
    steps(model, restarted, range(3, 6))
    steps(copy, whole, range(3, 6))
    check(model, copy)
    sys.stdout.write("equal\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

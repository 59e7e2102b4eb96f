"""A rank of an island, for tests: it trains a small model for some steps, and prints the result.

Settings come as one JSON object; what it says are JSON lines. The agent is the one without a
network (``tests.peer.agent.lone_agent``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import peer.island
import peer.trainer.session
from peer.bridge.agent_process import LineSettings
from peer.run_file.reading import parse
from peer.trainer.session import Run
from tests.peer.agent.lone_agents import AGENT


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Net(nn.Module):
    """A model with sizes that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.frozen


def spread(model: Net, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    assert way == "fsdp2", way
    columns = Shard(1)  # of a matrix, for once: the values of a shard are then not in one run
    fully_shard(model.first, shard_placement_fn=lambda p: columns if p.ndim == 2 else None)
    fully_shard(model)
    return model


def whole(model: nn.Module) -> dict[str, list[float]]:
    """All parameters, gathered by a collective operation."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = full.detach().float().reshape(-1).tolist()
    return found


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    peer.trainer.session.STILL_HERE_S = 0.05  # so that even a short rest needs it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    net = Net().to(dtype)
    if settings.get("different") and rank:
        net.second.weight.requires_grad_(False)
    model = spread(net, settings["way"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = peer.island.join(
        parse(settings["run"]),
        model=model,
        optimizer=optimizer,
        directory=Path(settings["directory"]),
        agent_command=AGENT,
        line=LineSettings(beat_s=0.05, silence_max_s=20.0, restart_first_s=0.05),
    )
    batches = torch.Generator().manual_seed(rank)
    adopted: list[int] = []
    measured: list[int] = []
    stepped_at: list[float] = []
    if settings.get("measures_at") in (None, rank):
        run.measure_with(lambda: measured.append(steps) or (float(whole(model) != {}), 1))  # type: ignore[func-returns-value]
    with run:
        run.schedule(optimizer)
        run.on("adopted", lambda fields: adopted.append(fields["version"]))  # type: ignore[arg-type]
        steps = 0
        rates = []
        while not run.over and steps < settings.get("steps", 100_000):
            model(torch.randn(8, 6, generator=batches).to(dtype)).float().square().mean().backward()
            run.log(tokens=8 + rank)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            stepped_at.append(time.monotonic())
            rates.append(optimizer.param_groups[0]["lr"])
            first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if steps == settings.get("dies_at") and rank == 1 and first_life:
                os._exit(3)
            time.sleep(settings.get("pace_s", 0.005))
        counted = run.status.tokens if isinstance(run, Run) else None
    say(
        rank=rank,
        steps=steps,
        tokens=counted,
        rates=rates,
        peer=run.peer_id,
        adopted=adopted,
        measured=measured,
        longest_s=max(b - a for a, b in pairwise(stepped_at)),
        moments=sorted({int(s["step"]) for s in optimizer.state.values()}),
        values=whole(model),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""Your own checkpoints: start from one, write one with the position in the data, export weights.

A run does not need them: it has its own checkpoints, and a peer that returns gets the parameters
from the run. They are for the use of a model before and after the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from spirals import RUN_FILE, spirals, start
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import peer


def train(run: Any = RUN_FILE, *, steps: int, folder: Path = Path("spirals"), **own: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weights, state = folder / "model.safetensors", folder / "state"
    if weights.exists():
        # Or the folder of a transformers checkpoint. A founder starts with these weights; a peer
        # that joins gets the parameters of the run.
        peer.load_weights(model, weights)
    if state.exists():
        moments = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": moments}, checkpoint_id=state)
        set_optimizer_state_dict(model, optimizer, moments)
    with peer.join(run, model=model, optimizer=optimizer, **own) as part:
        part.schedule(optimizer)
        if state.exists():
            dcp.load({"run": part}, checkpoint_id=state)  # the position in part.data(...)
        for points, arms in (spirals(64) for _ in range(steps)):
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()
            part.log(loss=loss, tokens=len(points))
            optimizer.step()
            optimizer.zero_grad()
            if part.over:
                break
        # Between two steps the state is consistent.
        moments = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": moments, "run": part}, checkpoint_id=state)
        peer.save_weights(model, weights)
    return float(loss.detach())


if __name__ == "__main__":
    start(train)

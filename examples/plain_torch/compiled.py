"""``torch.compile``: pass the compiled model or the bare one; both have the same names in the run.

The run changes parameters in place between steps, so the model is not compiled again.
"""

from __future__ import annotations

from typing import Any

import torch
from spirals import RUN_FILE, spirals, start
from torch import nn

import peer


def train(run: Any = RUN_FILE, *, steps: int, backend: str = "inductor", **own: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    with peer.join(run, model=compiled, optimizer=optimizer, **own) as part:
        part.schedule(optimizer)
        for _ in range(steps):
            points, arms = spirals(64)
            loss = nn.functional.cross_entropy(compiled(points), arms)
            loss.backward()
            part.log(loss=loss, tokens=len(points))
            optimizer.step()
            optimizer.zero_grad()
            if part.over:
                break
    return float(loss.detach())


if __name__ == "__main__":
    start(train)

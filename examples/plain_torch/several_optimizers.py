"""Two optimizers, and parameter groups with different rates.

The last optimizer in the list completes the step: after it, fragments are offered and adopted. The
run's schedule sets all rates, in proportion to the initial rates of the groups.
"""

from __future__ import annotations

from typing import Any

import torch
from spirals import RUN_FILE, spirals, start
from torch import nn

import peer


def train(run: Any = RUN_FILE, *, steps: int, **own: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    head = nn.Linear(64, 3)
    both = nn.ModuleDict({"body": model, "head": head})  # the run knows parameters by these names
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    momentum = torch.optim.SGD(
        [{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.02}], momentum=0.9
    )
    adam = torch.optim.AdamW(head.parameters(), lr=3e-3)

    with peer.join(run, model=both, optimizer=[momentum, adam], **own) as part:
        part.schedule(adam)  # its peak is the run's learning rate
        part.schedule(momentum, peak=0.1)
        for _ in range(steps):
            points, arms = spirals(64)
            loss = nn.functional.cross_entropy(head(model(points)), arms)
            loss.backward()
            part.log(loss=loss, tokens=len(points))
            for optimizer in (momentum, adam):
                optimizer.step()
                optimizer.zero_grad()
            if part.over:
                break
    return float(loss.detach())


if __name__ == "__main__":
    start(train)

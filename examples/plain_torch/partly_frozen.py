"""A frozen part, tied weights, and buffers.

- Parameters without ``requires_grad`` are not exchanged. They must be the same at every peer: here
  because of the seed, otherwise with ``peer.load_weights``.
- Tied weights are one parameter and are exchanged once, under their first name.
- Buffers (running averages of BatchNorm) stay local, as they describe the data of this peer. To
  get buffers for the merged model, run it over data with ``model.train()`` at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from spirals import RUN_FILE, spirals, start
from torch import nn

import peer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(2, 64).requires_grad_(False)
        self.middle = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.middle.weight  # tied
        self.head = nn.Linear(64, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.middle(torch.tanh(5 * self.features(points))).tanh())
        return self.head(self.again(hidden).tanh())


def train(run: Any = RUN_FILE, *, steps: int, **own: Any) -> float:
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    with peer.join(run, model=model, optimizer=optimizer, **own) as part:
        part.schedule(optimizer)
        for _ in range(steps):
            points, arms = spirals(64)
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()
            part.log(loss=loss, tokens=len(points))
            optimizer.step()
            optimizer.zero_grad()
            if part.over:
                break
    return float(loss.detach())


if __name__ == "__main__":
    start(train)

"""A classifier of pairs with accelerate, alone or by ``accelerate launch``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import peer.island
from tests.programs import here


def samples(count: int, source: torch.Generator) -> TensorDataset:
    """Pairs of points, and whether they are on the same side."""
    pairs = torch.randn(count, 2, 8, generator=source)
    same = (pairs[:, 0, 0].sign() == pairs[:, 1, 0].sign()).long()
    return TensorDataset(pairs.reshape(count, 16), same)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    loader = DataLoader(samples(4096, here.generator()), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()
    run = peer.island.open(here.run(), model=model, optimizer=optimizer, settings=here.SETTINGS)
    steps = 0
    while not run.over and steps < here.LAST_STEP:
        for inputs, labels in loader:
            loss = criterion(model(inputs), labels)
            accelerator.backward(loss)
            run.log(loss=loss, tokens=len(labels))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if run.over or steps == here.LAST_STEP:
                break
    run.close()
    inputs, labels = samples(1024, torch.Generator().manual_seed(7)).tensors
    with torch.no_grad():
        here.end(model, float(criterion(accelerator.unwrap_model(model)(inputs), labels)), run)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""A training with Lightning Fabric, whose wrapped model and optimizer are passed as they are."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

import peer
from tests.programs import here
from tests.programs.own_loop import BATCH, LENGTH, Model, loss_of


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(42)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    source = here.generator()
    with peer.join(here.run(), model=model, optimizer=optimizer, settings=here.SETTINGS) as run:
        run.schedule(optimizer)
        for _ in range(here.LAST_STEP):
            batch = here.letters(BATCH, LENGTH + 1, source)
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            run.log(loss=loss, tokens=BATCH * LENGTH)
            optimizer.step()
            optimizer.zero_grad()
            if run.over:
                break
    held_out = here.letters(64, LENGTH + 1, torch.Generator().manual_seed(7))
    model.eval()
    with torch.no_grad():
        here.end(model, float(loss_of(model, held_out)), run)


if __name__ == "__main__":
    main()

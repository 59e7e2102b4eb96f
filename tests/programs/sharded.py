"""The same model whole in one process, or sharded by FSDP2 over those of torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import peer.island
from tests.programs import here
from tests.programs.own_loop import BATCH, LENGTH, Model, loss_of


def main() -> None:
    under_torchrun = "WORLD_SIZE" in os.environ
    if under_torchrun:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    if under_torchrun:
        for layer in model.blocks.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = here.generator()
    with peer.island.join(
        here.run(), model=model, optimizer=optimizer, settings=here.SETTINGS
    ) as run:
        run.schedule(optimizer)
        for _ in range(here.LAST_STEP):
            batch = here.letters(BATCH, LENGTH + 1, source)
            loss = loss_of(model, batch)
            loss.backward()
            run.log(loss=loss, tokens=BATCH * LENGTH)
            optimizer.step()
            optimizer.zero_grad()
            if run.over:
                break
    held_out = here.letters(64, LENGTH + 1, torch.Generator().manual_seed(7))
    with torch.no_grad():
        here.end(model, float(loss_of(model, held_out)), run)
    if under_torchrun:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

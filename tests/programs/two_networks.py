"""An encoder and a decoder with BatchNorm, each with its own optimizer."""

from __future__ import annotations

import torch
from torch import nn

import peer
from tests.programs import here

BATCH = 32


def on_a_curve(count: int, source: torch.Generator) -> torch.Tensor:
    """Points of eight dimensions that one angle tells."""
    angle = 2 * torch.pi * torch.rand(count, 1, generator=source)
    turns = torch.cat([times * angle for times in (1, 2, 3, 4)], dim=1)
    around = torch.cat([turns.cos(), turns.sin()], dim=1)
    return around + 0.02 * torch.randn(count, 8, generator=source)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs)
    )


def main() -> None:
    torch.manual_seed(0)
    encoder, decoder = network(8, 2), network(2, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (encoder, decoder)]
    source = here.generator()
    with peer.join(here.run(), model=model, optimizer=optimizers, settings=here.SETTINGS) as run:
        for _ in range(here.LAST_STEP):
            points = on_a_curve(BATCH, source)
            loss = (decoder(encoder(points)) - points).square().mean()
            loss.backward()
            run.log(loss=loss, tokens=BATCH)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if run.over:
                break
    model.eval()
    with torch.no_grad():
        points = on_a_curve(512, torch.Generator().manual_seed(7))
        here.end(model, float((decoder(encoder(points)) - points).square().mean()), run)


if __name__ == "__main__":
    main()

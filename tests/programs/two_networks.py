"""A generator and a discriminator with BatchNorm, each with its own optimizer."""

from __future__ import annotations

import torch
from torch import nn

import peer
from tests.programs import here

BATCH = 32


def real(count: int, source: torch.Generator) -> torch.Tensor:
    """Points on a ring."""
    angle = 2 * torch.pi * torch.rand(count, generator=source)
    around = torch.stack([angle.cos(), angle.sin()], dim=1)
    return around + 0.02 * torch.randn(count, 2, generator=source)


def main() -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(4, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
    discriminator = nn.Sequential(
        nn.Linear(2, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
    )
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    criterion = nn.BCEWithLogitsLoss()
    of_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    source = here.generator()
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    with peer.join(here.run(), model=model, optimizer=[of_d, of_g], settings=here.SETTINGS) as run:
        for _ in range(here.LAST_STEP):
            made = generator(torch.randn(BATCH, 4, generator=source))
            of_d.zero_grad()
            loss_d = criterion(discriminator(real(BATCH, source)), ones) + criterion(
                discriminator(made.detach()), zeros
            )
            loss_d.backward()
            of_d.step()
            of_g.zero_grad()
            loss_g = criterion(discriminator(made), ones)
            loss_g.backward()
            run.log(loss=loss_d, tokens=BATCH)
            of_g.step()
            if run.over:
                break
    model.eval()
    with torch.no_grad():
        made = generator(torch.randn(512, 4, generator=torch.Generator().manual_seed(7)))
        here.end(model, float((made.norm(dim=1) - 1).abs().mean()), run)


if __name__ == "__main__":
    main()

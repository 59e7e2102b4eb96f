"""Your own training loop in a run: the lines marked with numbers are the additions.

    python examples/own_loop.py                     # founds a run and prints its link
    python examples/own_loop.py 'shoal://...'       # a second terminal or machine: joins it

Model, optimizer, data and loop are your own, as in training alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import peer  # 1

RUN_FILE = Path(__file__).parent / "own_loop.toml"


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on the three arms of a spiral, with the number of the arm; random for each learner."""
    arm = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    noise = 0.1 * torch.randn(count, generator=generator)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + noise
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", nargs="?", default=str(RUN_FILE))
    arguments.add_argument("--directory", type=Path, help="folder for this peer's files")
    arguments.add_argument("--steps", type=int, default=6000)
    arguments.add_argument("--pace", type=float, default=0.01, help="minimum seconds per step")
    chosen = arguments.parse_args()

    torch.manual_seed(0)  # every founder starts with the same parameters
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator()
    generator.seed()

    with peer.join(  # 2
        chosen.run,
        model=model,
        optimizer=optimizer,
        directory=chosen.directory,
        pace_s=chosen.pace,
    ) as run:
        run.schedule(optimizer)  # the learning rate depends on the tokens of the whole run
        run.on("round", lambda fields: print(f"  merged with {fields['contributors']} peers"))
        for step in range(chosen.steps):
            points, arms = spirals(64, generator)
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()
            run.log(loss=loss, tokens=len(points))  # 3
            optimizer.step()
            optimizer.zero_grad()
            if step % 200 == 0:
                print(f"step {step}  loss {loss.item():.3f}  peers {run.peers}")
            if run.over:
                break
        blocked = run.status.blocked_fraction
    print(f"done; the loop was blocked for {blocked:.2%} of its time")


if __name__ == "__main__":
    main()

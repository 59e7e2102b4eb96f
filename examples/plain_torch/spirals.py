"""Data and command line of the training loops in this folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import peer

RUN_FILE = Path(__file__).parent / "run.toml"


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on the three arms of a spiral, with the number of the arm."""
    arm = torch.randint(3, (count,))
    radius = torch.rand(count)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def start(train: Callable[..., float]) -> None:
    """Call ``train`` with the arguments of the command line."""
    arguments = argparse.ArgumentParser(description=train.__doc__)
    arguments.add_argument("run", nargs="?", help="a link or a run file; unset: found a run")
    arguments.add_argument("--directory", type=Path, help="folder for this peer's files")
    arguments.add_argument("--steps", type=int, default=6000)
    chosen = arguments.parse_args()
    run = chosen.run
    if run is None:  # the models of the loops differ, so each has a run of its own
        name = f"plain-torch-{Path(sys.argv[0]).stem.replace('_', '-')}"
        run = msgspec.structs.replace(peer.read_run(str(RUN_FILE)), name=name)
    own: dict[str, Any] = {"directory": chosen.directory, "pace_s": 0.005}
    print(f"loss {train(run, steps=chosen.steps, **own):.3f}")

"""Data and command line of the training loops in this folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
    arguments.add_argument("run", nargs="?", default=str(RUN_FILE), help="a run file or a link")
    arguments.add_argument("--directory", type=Path, help="one per learner on this machine")
    arguments.add_argument("--steps", type=int, default=2000)
    chosen = arguments.parse_args()
    own: dict[str, Any] = {"directory": chosen.directory, "pace_s": 0.005}
    print(f"loss {train(chosen.run, steps=chosen.steps, **own):.3f}")

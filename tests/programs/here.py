"""The place of a program of this folder, which its test sets, and what it says at its end."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from peer.model.naming import named_parameters
from peer.trainer.session import Run
from peer.trainer.settings import JoinSettings
from tests.programs.pair import CYCLE

DIRECTORY = Path(os.environ["PROGRAM_DIRECTORY"])
LAST_STEP = int(os.environ.get("PROGRAM_STEPS", "1000000"))
"""A program alone ends after so many steps; in a run its end comes before."""

SAME_SEED = bool(os.environ.get("PROGRAM_SAME_SEED"))
"""Every peer draws the same batches: the mistake that is told."""

FIRST_STEPS = 2 * CYCLE
"""Steps that the founder makes before the other peer is there."""

SETTINGS = JoinSettings(
    directory=DIRECTORY / "peer", listen=("/ip4/127.0.0.1/tcp/0",), page=None, pace_s=0.03
)

torch.set_num_threads(1)
_stepped_at: dict[int, list[float]] = {}
"""Times of the steps of each optimizer."""


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _stepped_at.setdefault(id(optimizer), []).append(time.monotonic())


register_optimizer_step_post_hook(_stepped)


def _steps() -> list[float]:
    return max(_stepped_at.values(), key=len, default=[])


def _wait(*_: Any) -> None:
    """Train on when the other peer is there, whose start takes as long as it takes."""
    if len(_steps()) < FIRST_STEPS:
        return
    gate = os.environ.pop("PROGRAM_GATE", None)
    while gate is not None and not Path(gate).exists():
        time.sleep(0.05)


register_optimizer_step_pre_hook(_wait)


def run() -> str:
    """The run file, or the link to a founder as soon as there is one."""
    where = Path(sys.argv[1])
    while where.suffix == ".link" and not where.exists():
        time.sleep(0.05)
    return where.read_text(encoding="utf-8") if where.suffix == ".link" else str(where)


def generator() -> torch.Generator:
    """Random numbers of this peer's own."""
    own = torch.Generator()
    own.seed()
    return own


def letters(count: int, length: int, source: torch.Generator | None = None) -> torch.Tensor:
    """Made-up texts: each token follows from the one before, mostly."""
    tokens = torch.randint(32, (count, length), generator=source)
    noise = torch.rand(count, length, generator=source) < 0.1
    for place in range(1, length):
        follows = (5 * tokens[:, place - 1] + 3) % 32
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], follows)
    return tokens


def _whole(values: Any) -> torch.Tensor:
    whole: torch.Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return whole.detach().float().contiguous()


def end(model: nn.Module, loss: float, run: Any = None) -> None:
    """Say what came out: the digest of all trained parameters, and the held-out loss."""
    hasher = hashlib.sha256()
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            hasher.update(name.encode() + _whole(parameter).numpy().tobytes())
    said: dict[str, Any] = {"digest": hasher.hexdigest()[:16], "loss": loss}
    said["steps"] = len(_steps())
    since = _steps()[FIRST_STEPS:]
    spans = [b - a for a, b in zip(since, since[CYCLE:], strict=False)]
    said["slowest_cycle_s"] = max(spans, default=0.0)
    if isinstance(run, Run):
        said |= {"finished": run.finished, "fates": dict(run.status.fates)}
        said |= {"blocked": run.status.blocked_fraction}
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    sys.stdout.write(f"end {json.dumps({'rank': rank, **said})}\n")
    sys.stdout.flush()

"""One learner without a run: the baseline that a swarm is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dht.identity import PeerId
from peer.data.sources import open_data
from peer.model.recipes import (
    build_model,
    build_optimizer,
    clip_gradients,
    held_out_loss,
    next_token_loss,
)
from peer.run_file.schedule import learning_rate
from peer.run_file.sections import RunFile


@dataclass(frozen=True, slots=True)
class SoloResult:
    """Held-out losses of a finished training."""

    loss_start: float
    loss_end: float


def train_alone(
    run: RunFile, *, steps: int, learners: int = 1, cache_dir: Path, data_dir: Path
) -> SoloResult:
    """Train ``steps`` steps, each on one batch, from first weights that the run draws.

    It is the baseline that a run is compared with: the same run file, model, data, optimizer and
    schedule, in one process without other peers.

    ``learners``: number of learners of the run that this one is compared with. The learning rate
    follows the tokens of so many, and so decays as far as theirs in as many steps.
    """
    data = open_data(run, peer_id=PeerId("alone"), cache_dir=cache_dir, data_dir=data_dir)
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    loss_start = held_out_loss(model, data.held_out)
    step_tokens = learners * run.inner.batch_size * run.data.sequence_length
    for step in range(steps):
        rate = learning_rate(run, step * step_tokens)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(data.train.next(run.inner.batch_size))
        torch.autograd.backward(next_token_loss(model, batch))
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()
    return SoloResult(loss_start, held_out_loss(model, data.held_out))

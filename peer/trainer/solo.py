"""Training without other peers: the baselines that a run is compared with.

The same run file, model, data, optimizer and schedule, in one process:

- ``learners=1``: one learner alone;
- ``learners=M``: the data-parallel reference. Each step averages the gradients of M
  learners' batches, read from M shards: the data of M peers over as many steps, with perfect
  communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dht.identity import PeerId
from peer.data.base_models import base_folder
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
class Measurement:
    """Held-out loss after ``step`` steps."""

    step: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class SoloResult:
    """A finished training with its last parameters."""

    measured: tuple[Measurement, ...]
    """The first is before any step, the last after all of them."""
    elapsed_s: float
    """Training time, without measuring."""
    model: torch.nn.Module

    @property
    def loss_start(self) -> float:
        return self.measured[0].loss

    @property
    def loss_end(self) -> float:
        return self.measured[-1].loss


def train_alone(
    run: RunFile,
    *,
    steps: int,
    learners: int | Sequence[PeerId] = 1,
    schedule_learners: int | None = None,
    measure_every: int | None = None,
    cache_dir: Path,
    data_dir: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SoloResult:
    """Train ``steps`` steps from the run's first weights, each on one batch of every learner.

    ``learners``: their number, or the peers whose shards they read.

    ``schedule_learners`` scales the tokens that the learning rate follows (default: ``learners``).
    For a fair comparison give a lone learner the number of learners of the run that it is compared
    with: its rate then decays as far as theirs in as many steps. ``on_step`` gets the number and
    the training loss of each step.
    """
    peers = (
        [PeerId(f"learner-{n}") for n in range(learners)] if isinstance(learners, int) else learners
    )
    count = len(peers)
    if steps < 1 or count < 1:
        raise ValueError(f"steps is {steps} and learners is {count}; both are at least 1")
    opened = [
        open_data(run, peer_id=peer, cache_dir=cache_dir, data_dir=data_dir) for peer in peers
    ]
    held_out = opened[0].held_out
    model = build_model(run, base=base_folder(run, cache_dir=cache_dir, data_dir=data_dir))
    optimizer = build_optimizer(run, model)
    step_tokens = count * run.inner.batch_size * run.data.sequence_length
    follow = (schedule_learners or count) * step_tokens // count
    measured = [Measurement(0, 0, held_out_loss(model, held_out))]
    elapsed_s = 0.0
    for step in range(1, steps + 1):
        began = time.perf_counter()
        rate = learning_rate(run, (step - 1) * follow)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = 0.0
        for data in opened:
            batch = torch.from_numpy(data.train.next(run.inner.batch_size))
            share = next_token_loss(model, batch) / count
            torch.autograd.backward(share)
            loss += share.item()
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()
        elapsed_s += time.perf_counter() - began
        on_step(step, loss)
        if step == steps or (measure_every is not None and step % measure_every == 0):
            measured.append(Measurement(step, step * step_tokens, held_out_loss(model, held_out)))
    return SoloResult(tuple(measured), elapsed_s, model)

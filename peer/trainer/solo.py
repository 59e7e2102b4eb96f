"""Training without a swarm: the baselines that a run is compared with.

The same run file, model, data, optimizer and schedule, in one process:

- ``learners=1``: one learner alone, as each peer would be without the others;
- ``learners=M``: the data-parallel reference. Each step averages the gradients of M
  learners' batches, read from M shards, so it sees what a swarm of M sees in as many
  steps, with perfect communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
class Measured:
    """Held-out loss after some steps."""

    step: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class SoloResult:
    """A finished training and the parameters it ended with."""

    measured: tuple[Measured, ...]
    """The first is before any step, the last after all of them."""
    elapsed_s: float
    """Without the time for measuring."""
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
    learners: int = 1,
    schedule_learners: int | None = None,
    shards: Sequence[PeerId] | None = None,
    measure_every: int | None = None,
    cache_dir: Path,
    data_dir: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SoloResult:
    """Train ``steps`` steps of ``learners`` batches each, from the run's first weights.

    ``schedule_learners`` scales the tokens that the learning rate follows (default: ``learners``).
    Give a lone learner the number of a swarm's learners, and after as many steps its rate has
    come down as far as theirs: the fair comparison, as its budget is smaller.
    ``shards`` are the peers whose data is read (default: named after their number);
    ``on_step`` gets each step's number and training loss.
    """
    if steps < 1 or learners < 1:
        raise ValueError(f"steps is {steps} and learners is {learners}; both are at least 1")
    peers = [PeerId(f"learner-{n}") for n in range(learners)] if shards is None else list(shards)
    if len(peers) != learners:
        raise ValueError(f"{len(peers)} shards for {learners} learners; each learner reads one")
    opened = [
        open_data(run, peer_id=peer, cache_dir=cache_dir, data_dir=data_dir) for peer in peers
    ]
    held_out = opened[0].held_out
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    step_tokens = learners * run.inner.batch_size * run.data.sequence_length
    follow = (schedule_learners or learners) * step_tokens // learners
    measured = [Measured(0, 0, held_out_loss(model, held_out))]
    elapsed_s = 0.0
    for step in range(1, steps + 1):
        began = time.perf_counter()
        rate = learning_rate(run, (step - 1) * follow)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = 0.0
        for data in opened:
            batch = torch.from_numpy(data.train.next(run.inner.batch_size))
            share = next_token_loss(model, batch) / learners
            torch.autograd.backward(share)
            loss += share.item()
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()
        elapsed_s += time.perf_counter() - began
        on_step(step, loss)
        if step == steps or (measure_every is not None and step % measure_every == 0):
            measured.append(Measured(step, step * step_tokens, held_out_loss(model, held_out)))
    return SoloResult(tuple(measured), elapsed_s, model)

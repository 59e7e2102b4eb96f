"""Half precision with a ``GradScaler``, and steps of several micro-batches, the last one smaller.

A step is an optimizer step, with the tokens of all its parts. If the scaler skips a step because
a gradient overflowed, its tokens count in the next one.
"""

from __future__ import annotations

from typing import Any

import torch
from spirals import RUN_FILE, spirals, start
from torch import nn

import peer

MICRO_BATCH = 24


def train(run: Any = RUN_FILE, *, steps: int, **own: Any) -> float:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device)
    part = peer.join(run, model=model, optimizer=optimizer, **own)
    part.keep_scaler(scaler)  # a restart goes on with its scale
    with part:
        part.schedule(optimizer)
        for _ in range(steps):
            points, arms = (values.to(device) for values in spirals(64))
            for (some, their_arms), weight in peer.micro_batches((points, arms), MICRO_BATCH):
                with peer.autocast(part, "fp16"):  # without "fp16": bf16 where the device has it
                    loss = nn.functional.cross_entropy(model(some), their_arms)
                scaler.scale(loss * weight).backward()
                part.log(loss=loss, tokens=len(some))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # the hook after the optimizer's step is the safe point
            scaler.update()
            optimizer.zero_grad()
            if part.over:
                break
    return float(loss.detach())


if __name__ == "__main__":
    start(train)

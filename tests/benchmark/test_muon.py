"""Gain of Muon in loss per token, and its cost in time per step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from peer.demo.report import train_alone
from peer.model.recipes import build_model, build_optimizer, next_token_loss
from peer.run_file.reading import parse
from peer.run_file.sections import AdamwInner, GptModel, Inner, MuonInner, RunFile

BYTES = """
name = "muon"
[model]
layers = 4
width = 96
heads = 4
context = 64
[data]
sequence_length = 64
[inner]
optimizer = "{optimizer}"
learning_rate = {rate}
batch_size = 16
[schedule]
warmup_tokens = 20000
[end]
tokens = {tokens}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_muon_learns_more_than_adamw_from_the_same_tokens(tmp_path: Path) -> None:
    steps = 300
    losses = {}
    for optimizer in ("adamw", "muon"):
        text = BYTES.format(optimizer=optimizer, rate=2e-3, tokens=steps * 16 * 64)
        _, losses[optimizer] = train_alone(
            parse(text), steps=steps, cache_dir=tmp_path, data_dir=tmp_path
        )
    print(f"held-out loss after {steps} steps: {losses}")
    assert losses["muon"] < 0.97 * losses["adamw"]


def step_seconds(inner: Inner, model: nn.Module, batch: Tensor, turns: int) -> Callable[[], float]:
    """A function that measures the mean time of some training steps."""
    optimizer = build_optimizer(RunFile(inner=inner), model)

    def measure() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(turns):
            with torch.autocast("cuda", torch.bfloat16):
                loss = next_token_loss(cast(nn.Module, compiled), batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / turns

    compiled = torch.compile(model)
    measure()
    return measure


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1200)
def test_muon_takes_less_than_a_twelfth_of_a_step_with_124_million_parameters() -> None:
    shape = GptModel(layers=12, width=768, heads=12, context=1024, vocabulary=50304)
    batch = torch.randint(50304, (32, 1025), device="cuda")
    model = build_model(RunFile(model=shape)).cuda()
    measures = {
        inner.__struct_config__.tag: step_seconds(inner, model, batch, 10)
        for inner in (AdamwInner(), MuonInner())
    }
    turns = [{name: measure() for name, measure in measures.items()} for _ in range(5)]
    share = statistics.median(1 - turn["adamw"] / turn["muon"] for turn in turns)
    print(f"steps {turns}; share of Muon {share:.1%}")
    assert share < 0.08

"""Measures the cost of shoal per training step: ``python -m tests.benchmark.device_steps``.

The same model trains with and without shoal, alternating. Everything between the trainer and its
agent is real (hook, shared memory, side stream, a separate process that simulates rounds). There
are no other peers (``tests.peer.agent.lone_agent``), as a trainer never waits for them. Times are
measured over whole turns, with the device idle before and after each.

    python -m tests.benchmark.device_steps --size 124M --device cuda
    python -m tests.benchmark.device_steps --size 1B --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import peer
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from tests.peer.agent.lone_agents import AGENT

CYCLE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a model, its batches and its fragments."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    fragments: int

    def run_file(self) -> RunFile:
        return parse(
            f"""
            name = "device-steps"
            [model]
            recipe = "gpt"
            layers = {self.layers}
            width = {self.width}
            heads = {self.heads}
            vocabulary = {self.vocabulary}
            context = {self.context}
            mlp = "gelu"
            [data]
            recipe = "custom"
            sequence_length = {self.context}
            [inner]
            learning_rate = 1e-4
            [outer]
            fragments = {self.fragments}
            steps_per_cycle = {CYCLE}
            """
        )


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocabulary=256, context=32, batch=4, fragments=4),
    "124M": Size(
        layers=12, width=768, heads=12, vocabulary=50304, context=1024, batch=8, fragments=12
    ),
    "1B": Size(
        layers=24, width=1792, heads=14, vocabulary=50304, context=1024, batch=8, fragments=24
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Medians over the turns."""

    parameters: int
    device: str
    dtype: str
    step_ms: float
    step_with_shoal_ms: float
    blocked_p99_ms: float
    """The largest of all turns."""
    blocked_share: float
    adopted: int
    """Fragments adopted during the measured time of all turns."""
    peak_bytes: int
    peak_with_shoal_bytes: int
    """Peak use of the device's memory; 0 on a CPU."""


class _Training:
    """A model that is trained on noise."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.run_file = size.run_file()
        self.device = device
        self.model = peer.build_model(self.run_file).to(device=device, dtype=dtype)
        self.optimizer = peer.build_optimizer(self.run_file, self.model)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)

    def steps(self, count: int, run: peer.Run | None = None) -> float:
        """Mean duration of ``count`` steps, in seconds."""
        self._rest()
        began = time.perf_counter()
        for _ in range(count):
            loss = peer.next_token_loss(self.model, self.tokens)
            loss.backward()
            if run is not None:
                run.log(loss=loss, tokens=self.tokens[:, 1:].numel())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._rest()
        return (time.perf_counter() - began) / count

    def peak_bytes(self) -> int:
        """Peak use of the device's memory since the last call."""
        if self.device.type != "cuda":
            return 0
        most = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return most

    def _rest(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@contextmanager
def _rounds_every(steps: int) -> Iterator[None]:
    """Let agents that are started inside merge a round every ``steps`` steps."""
    name = "LONE_AGENT_EVERY"
    before = os.environ.get(name)
    os.environ[name] = str(steps)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def measure(size: Size, *, device: str, dtype: str, turns: int, steps: int) -> Found:
    training = _Training(size, torch.device(device), getattr(torch, dtype))
    training.steps(3)
    training.peak_bytes()
    without_s, with_s, blocked, peaks = [], [], [], [(0, 0)]
    adopted = 0
    for _ in range(turns):
        without_s.append(training.steps(steps))
        peak = training.peak_bytes()
        with tempfile.TemporaryDirectory() as folder, _rounds_every(CYCLE):
            joined = peer.join(
                training.run_file,
                model=training.model,
                optimizer=training.optimizer,
                directory=Path(folder),
                agent_command=AGENT,
            )
            with joined as run:
                training.steps(CYCLE, run)  # until the first round is requested
                before = sum(run.versions)
                with_s.append(training.steps(steps, run))
                adopted += sum(run.versions) - before
                blocked.append(run.status)
        peaks.append((peak, training.peak_bytes()))
    return Found(
        parameters=sum(p.numel() for p in training.model.parameters()),
        device=torch.cuda.get_device_name() if training.device.type == "cuda" else device,
        dtype=dtype,
        step_ms=1e3 * statistics.median(without_s),
        step_with_shoal_ms=1e3 * statistics.median(with_s),
        blocked_p99_ms=max(each.blocked_p99_ms for each in blocked),
        blocked_share=statistics.median(each.blocked_fraction for each in blocked),
        adopted=adopted,
        peak_bytes=max(peak for peak, _ in peaks),
        peak_with_shoal_bytes=max(peak for _, peak in peaks),
    )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--size", choices=sorted(SIZES), default="tiny")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=4 * CYCLE)
    chosen = arguments.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # the agent has the others
    found = measure(
        SIZES[chosen.size],
        device=chosen.device,
        dtype=chosen.dtype,
        turns=chosen.turns,
        steps=chosen.steps,
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()

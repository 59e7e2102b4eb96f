"""The problem ``text_gpt``: the built-in decoder, very small, on Python's standard library.

Model, data, optimizer and clipping are those of a run file's recipes, so that a run of real
processes can be repeated in virtual time. The results are equal to the bit on the same machine,
unless learners compute on a GPU, which makes models of ten million parameters possible: there,
steps are compiled and in bf16, as in the built-in trainer, and their gradients are one CUDA graph,
since to start its kernels one by one takes several times as long as to run them. On request a CPU
computes in bf16: where it has matrix instructions for it, twice as fast.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from msgspec.structs import replace

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import TensorSpec
from dht.identity import PeerId
from peer.data.batches.sequences import Sequences, TokenStream
from peer.data.sources import check_data, open_data
from peer.errors import DataUnavailable
from peer.model.recipes import (
    build_model,
    build_optimizer,
    clip_gradients,
    embedding_names,
    held_out_loss,
    next_token_loss,
    trained_parameters,
)
from peer.run_file.sections import (
    AdamwInner,
    Data,
    Evaluation,
    GptModel,
    MuonInner,
    PythonStdlibData,
    RunFile,
    TextData,
)
from peer.simulate.problems.problem import LocalTraining
from peer.trainer.computing.choices import Precision
from peer.trainer.computing.compiling import Loss, compiled
from peer.trainer.computing.device_facts import choose_device
from peer.trainer.computing.engine import autocast

ROOT = Path("/")
"""Patterns of text files are relative to it."""


@dataclass(frozen=True)
class TextGpt:
    """70 000 parameters, 256 tokens a step."""

    layers: int = 1
    width: int = 64
    length: int = 32
    batch: int = 8
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] | None = None
    """``None``: fp32 on the CPU, bf16 on a GPU."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    momentum: float | None = None
    """Muon's momentum, or AdamW's beta1; ``None``: the default of a run file."""
    text: str | None = None
    """A pattern of text files to learn from; ``None``: Python's standard library, 10 MB."""
    name: str = "text_gpt"
    heads: Collection[str] = ()
    """The output head is the embedding."""
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "shoal-simulate")

    def __post_init__(self) -> None:
        choose_device(self.device)  # raises ValueError where it is missing
        try:
            check_data(self.run(0), ROOT, cache_dir=self.cache)
        except DataUnavailable as error:
            raise ValueError(str(error)) from error
        torch.set_num_threads(1)  # a fixed order of additions, and no slower for a small model

    @property
    def step_tokens(self) -> int:
        return self.batch * self.length

    def run(self, seed: int) -> RunFile:
        """The run file that this problem simulates."""
        inner = {"adamw": AdamwInner, "muon": MuonInner}[self.optimizer](
            learning_rate=self.learning_rate, batch_size=self.batch
        )
        if self.momentum is not None:
            setting = "momentum" if self.optimizer == "muon" else "beta1"
            inner = replace(inner, **{setting: self.momentum})
        data: Data = PythonStdlibData(sequence_length=self.length)
        if self.text is not None:
            pattern = Path(self.text).absolute().relative_to(ROOT).as_posix()
            data = TextData(files=[pattern], sequence_length=self.length)
        return RunFile(
            name="text-gpt",
            random_seed=seed,
            model=GptModel(layers=self.layers, width=self.width, context=self.length),
            data=data,
            inner=inner,
            evaluation=Evaluation(sequences=256),
        )

    @cached_property
    def _judge(self) -> torch.nn.Module:
        return build_model(self.run(0)).to(self.device)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        named = trained_parameters(self._judge)
        return tuple(TensorSpec(name, tuple(p.shape)) for name, p in named.items())

    @cached_property
    def embeddings(self) -> Collection[str]:
        return embedding_names(self._judge)

    @cached_property
    def _held_out(self) -> Sequences:
        return open_data(
            self.run(0), peer_id=PeerId("judge"), cache_dir=self.cache, data_dir=ROOT
        ).held_out

    def first_values(self, seed: int) -> Float32s:
        return _flattened(build_model(self.run(seed)))

    def learner(self, peers: Sequence[int], *, seed: int) -> LocalTraining:
        return _GptTraining(self, peers, seed)

    def stream(self, peer: int, seed: int) -> TokenStream:
        """This peer's endless sequences: the same for every optimizer."""
        # They follow from the run's id.
        of_data = replace(self.run(seed), inner=AdamwInner())
        return open_data(
            of_data, peer_id=PeerId(f"simulated-{peer}"), cache_dir=self.cache, data_dir=ROOT
        ).train

    def evaluate(self, values: Float32s) -> float:
        with torch.no_grad():
            for parameter, part in _parts(self._judge, torch.from_numpy(values)):
                parameter.copy_(part)
        return held_out_loss(self._judge, self._held_out)


def _flattened(model: torch.nn.Module) -> Float32s:
    parts = [p.detach().flatten() for p in trained_parameters(model).values()]
    values: Float32s = torch.cat(parts).numpy()
    return values


def _parts(
    model: torch.nn.Module, flat: torch.Tensor
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter with a view of its part of the flat vector."""
    at, parts = 0, []
    for parameter in trained_parameters(model).values():
        part = flat[at : at + parameter.numel()].view(parameter.shape)
        parts.append((parameter, part))
        at += parameter.numel()
    return parts


class _GptTraining:
    """A learner whose parameters are views of one flat vector on its device."""

    def __init__(self, problem: TextGpt, peers: Sequence[int], seed: int) -> None:
        self._run = problem.run(seed)
        self._model = build_model(self._run)
        shared = torch.from_numpy(_flattened(self._model))
        on_cuda = torch.device(problem.device).type == "cuda"
        # A swarm reads and changes the values several times a cycle: copies of pinned memory take a
        # fraction of the time.
        self._shared = shared.pin_memory() if on_cuda else shared
        self.values: Float32s = self._shared.numpy()
        # On the CPU this is the same memory.
        self._flat = self._shared.to(problem.device)
        self._precision: Precision = problem.precision or ("bf16" if on_cuda else "fp32")
        self._model.to(problem.device)
        self._loss: Loss = next_token_loss
        if on_cuda:
            self._loss = compiled(next_token_loss, self._model, "inductor")
        for parameter, part in _parts(self._model, self._flat):
            parameter.data = part
        self._optimizer = build_optimizer(self._run, self._model)
        self._graph: _Graph | None = None
        self._streams = [problem.stream(peer, seed) for peer in peers]

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate * self._run.inner.learning_rate
        device, streams = self._flat.device, self._streams
        self._flat.copy_(self._shared)
        total = torch.zeros((), device=device, dtype=torch.float64)
        for _ in range(steps):
            parts = [stream.next(self._run.inner.batch_size) for stream in streams]
            total += self._gradients(torch.from_numpy(np.stack(parts)))
            self._optimizer.step()
        self._shared.copy_(self._flat)
        return float(total) / steps

    def _gradients(self, batches: torch.Tensor) -> torch.Tensor:
        """Compute the clipped gradients of the mean loss of ``batches``; returns this loss."""
        if self._flat.device.type == "cpu":
            return self._compute(batches)
        if self._graph is None:
            self._graph = _Graph(self._compute, batches.to(self._flat.device))
        return self._graph.replay(batches)

    def _compute(self, batches: torch.Tensor) -> torch.Tensor:
        device = self._flat.device
        self._optimizer.zero_grad()
        total = torch.zeros((), device=device, dtype=torch.float64)
        for batch in batches:
            with autocast(device, self._precision):
                share = self._loss(self._model, batch) / len(batches)
            torch.autograd.backward(share)
            total += share.detach()
        clip_gradients(self._run, self._model)
        return total


class _Graph:
    """The kernels of a computation, recorded once: they are all started at once."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> None:
        self._input = like
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiled and tuned before it is recorded
            for _ in range(3):
                compute(self._input)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = compute(self._input)

    def replay(self, batches: torch.Tensor) -> torch.Tensor:
        self._input.copy_(batches)
        self._graph.replay()
        return self._output

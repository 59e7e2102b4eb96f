"""A problem to simulate: predict the next byte of Python source from the sixteen before it.

200 000 parameters, AdamW, and the sources of this Python's standard library. It makes thousands of
steps a second, yet merging, momentum and precision matter as in larger models. The results are
equal to the bit for the same version of torch on the same machine.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import TensorSpec
from dht.identity import PeerId
from peer.data.batches.sequences import TokenStream
from peer.data.sources import open_data
from peer.model.weights import draw
from peer.run_file.sections import Evaluation, PythonStdlibData, RunFile
from peer.simulate.problems.problem import LocalTraining


@dataclass(frozen=True)
class TextMlp:
    """An embedding, two hidden layers (the second one residual), and a head."""

    context: int = 16
    features: int = 16
    width: int = 256
    batch: int = 64
    """Number of predictions in one step."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    held_out: int = 4096
    name: str = "text_mlp"
    embeddings: Collection[str] = ("embedding",)
    heads: Collection[str] = ("head",)
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "shoal-simulate")

    def __post_init__(self) -> None:
        # Small products are slower on two threads, and the result depends on the order of addition.
        torch.set_num_threads(1)

    @property
    def step_tokens(self) -> int:
        return self.batch

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("embedding", (256, self.features)),
            TensorSpec("first.weight", (self.width, self.context * self.features)),
            TensorSpec("first.bias", (self.width,)),
            TensorSpec("second.weight", (self.width, self.width)),
            TensorSpec("second.bias", (self.width,)),
            TensorSpec("head", (256, self.width)),
        )

    def first_values(self, seed: int) -> Float32s:
        drawn = []
        for spec in self.specs:
            deviation = 1.0 if spec.name == "embedding" else 1 / math.sqrt(spec.shape[-1])
            if len(spec.shape) == 1:
                deviation = 0.0
            if spec.name == "head":
                deviation /= 4  # begins near the uniform guess
            drawn.append(draw(spec.shape, deviation, random_seed=seed, name=spec.name).flatten())
        values: Float32s = torch.cat(drawn).numpy()
        return values

    def learner(self, peers: Sequence[int], *, seed: int) -> LocalTraining:
        return _TextTraining(self, peers, seed)

    def stream(self, peer: int, seed: int) -> TokenStream:
        """This peer's endless sequences: the bytes of the context, then the byte to predict."""
        return open_data(
            self._run(seed),
            peer_id=PeerId(f"simulated-{peer}"),
            cache_dir=self.cache,
            data_dir=self.cache,
        ).train

    def evaluate(self, values: Float32s) -> float:
        with torch.no_grad():
            return float(self.loss(self.tensors(torch.from_numpy(values)), self._held_out))

    def loss_of_step(self, values: Float32s, peer: int, seed: int, step: int) -> float:
        """The loss on the batch that a peer has in one of its steps (``ChecksOthers``)."""
        known, batches = self._read.setdefault(
            (peer, seed), ([], _Batches(self.stream(peer, seed), self.batch))
        )
        while len(known) <= step:
            known.append(batches.next())
        with torch.no_grad():
            return float(self.loss(self.tensors(torch.from_numpy(values)), known[step]))

    @cached_property
    def _read(self) -> dict[tuple[int, int], tuple[list[torch.Tensor], _Batches]]:
        """The batches of peers that were read for checks, from the first one on."""
        return {}

    @cached_property
    def _held_out(self) -> torch.Tensor:
        data = open_data(
            self._run(0), peer_id=PeerId("judge"), cache_dir=self.cache, data_dir=self.cache
        )
        return torch.from_numpy(data.held_out)

    def _run(self, seed: int) -> RunFile:
        return RunFile(
            name="text-mlp",
            random_seed=seed,
            data=PythonStdlibData(sequence_length=self.context),
            evaluation=Evaluation(sequences=self.held_out),
        )

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the flat vector, one for each spec."""
        parts = torch.split(flat, [spec.size for spec in self.specs])
        return [part.view(spec.shape) for part, spec in zip(parts, self.specs, strict=True)]

    def loss(self, tensors: Sequence[torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats, of the last byte of each sequence after the others."""
        embedding, first, first_bias, second, second_bias, head = tensors
        seen = F.embedding(sequences[:, :-1], embedding).flatten(1)
        hidden = F.silu(F.linear(seen, first, first_bias))
        hidden = hidden + F.silu(F.linear(hidden, second, second_bias))
        return F.cross_entropy(F.linear(hidden, head), sequences[:, -1])


class _Batches:
    """A peer's batches, drawn many at a time: that costs little more than drawing one."""

    _AT_ONCE = 64

    def __init__(self, stream: TokenStream, size: int) -> None:
        self._stream, self._size = stream, size
        self._drawn: deque[torch.Tensor] = deque()

    def next(self) -> torch.Tensor:
        if not self._drawn:
            many = torch.from_numpy(self._stream.next(self._AT_ONCE * self._size))
            self._drawn.extend(torch.split(many, self._size))
        return self._drawn.popleft()


class _TextTraining:
    """AdamW on views of one flat vector."""

    def __init__(self, problem: TextMlp, peers: Sequence[int], seed: int) -> None:
        self.values = problem.first_values(seed)
        self._problem = problem
        self._batches = [_Batches(problem.stream(peer, seed), problem.batch) for peer in peers]
        # Autograd adds into views of one flat gradient, so that one call clears it.
        self._gradient = torch.zeros(self.values.size)
        flat = torch.from_numpy(self.values)
        self._tensors = [t.requires_grad_() for t in problem.tensors(flat)]
        for tensor, gradient in zip(self._tensors, problem.tensors(self._gradient), strict=True):
            tensor.grad = gradient
        matrices = [t for t in self._tensors if t.ndim > 1]
        vectors = [t for t in self._tensors if t.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=problem.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=problem.weight_decay,
            fused=True,
        )

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate * self._problem.learning_rate
        total = 0.0
        for _ in range(steps):
            total += float(self._step())
        return total / steps

    def _step(self) -> torch.Tensor:
        sequences = torch.cat([batches.next() for batches in self._batches])
        loss = self._problem.loss(self._tensors, sequences)
        self._gradient.zero_()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()

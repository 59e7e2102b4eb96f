"""The problem ``quadratic``: a weighted distance to an optimum, minimised with noisy gradients.

It needs numpy alone, and any number of steps costs the same: a thousand peers are cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import TensorSpec
from peer.simulate.problems.problem import LocalTraining


@dataclass(frozen=True)
class Quadratic:
    """Every peer minimises a weighted distance to an optimum of its own, with noisy gradients.

    The loss is 0.5 * mean(curvature * (x - optimum)^2); the peers' optima scatter around a common
    one. Curvatures span a factor of ten.
    """

    tensors: int = 8
    rows: int = 8
    columns: int = 16
    spread: float = 1.0
    """Standard deviation of the peers' optima; the start is at a distance of 3."""
    noise: float = 1.0
    """Standard deviation of the gradient's noise where the curvature is 1."""
    learning_rate: float = 0.1
    step_tokens: int = 64
    name: str = "quadratic"
    embeddings: Collection[str] = ()
    heads: Collection[str] = ()

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        shape = (self.rows, self.columns)
        return tuple(TensorSpec(f"matrix.{index:03}", shape) for index in range(self.tensors))

    @cached_property
    def curvature(self) -> Float32s:
        count = self.tensors * self.rows * self.columns
        generator = np.random.Generator(np.random.Philox(key=1))
        return np.asarray(10.0 ** -generator.random(count), np.float32)

    def first_values(self, seed: int) -> Float32s:
        return np.full(self.curvature.size, 3.0, np.float32)

    def learner(self, peers: Sequence[int], *, seed: int) -> LocalTraining:
        return _QuadraticTraining(self, peers, seed)

    def evaluate(self, values: Float32s) -> float:
        return 0.5 * float(np.mean(self.curvature * np.square(values), dtype=np.float64))


class _QuadraticTraining:
    """Plain gradient descent in closed form: each value decays towards its optimum."""

    def __init__(self, problem: Quadratic, peers: Sequence[int], seed: int) -> None:
        self.values = problem.first_values(seed)
        self._problem = problem
        self._noise = problem.noise / len(peers) ** 0.5
        size = self.values.size
        optima = np.zeros(size, np.float32)
        for peer in peers:
            optima += _generator(seed, peer, part=0).standard_normal(size, np.float32)
        self._optimum = optima * np.float32(problem.spread / len(peers))
        self._generator = _generator(seed, peers[0], part=1)

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        if not rate:
            return self._problem.evaluate(self.values - self._optimum)
        shrink = np.float32(self._problem.learning_rate * rate) * self._problem.curvature
        kept = 1 - shrink
        all_kept = kept**steps
        # The noise of each step, shrunk by those after it, adds up to a normal variable again.
        deviation = shrink * np.sqrt((1 - all_kept * all_kept) / (1 - kept * kept))
        drawn = self._generator.standard_normal(self.values.size, np.float32)
        self.values -= self._optimum
        self.values *= all_kept
        self.values += self._optimum + np.float32(self._noise) * deviation * drawn
        return self._problem.evaluate(self.values - self._optimum)


def _generator(seed: int, peer: int, *, part: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, peer, part]))

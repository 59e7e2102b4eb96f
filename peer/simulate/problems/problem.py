"""The interface of a training problem, and of one learner that works on it.

Parameters are one flat fp32 vector: the tensors of ``specs`` one after the other. A
``LocalTraining`` is one learner with its parameters, inner optimizer and data. The simulator
changes ``values`` between two calls of ``train``, as a swarm does between two steps; ``Places``
finds the values of a fragment in the vector.

The data-parallel reference is a learner with the data of several peers: each of its steps takes
their mean gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec


@runtime_checkable
class ChecksOthers(Protocol):
    """A problem that can say what the data of one peer's step were."""

    def loss_of_step(self, values: Float32s, peer: int, seed: int, step: int) -> float:
        """The loss of these parameters on the batch that a peer has in one of its steps."""
        ...


class LocalTraining(Protocol):
    """One learner. Equal problems, seeds, peers and changes of ``values`` give equal results."""

    @property
    def values(self) -> Float32s:
        """The parameters, always in the same array: change it in place, between steps."""
        ...

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        """Make optimizer steps at the share ``rate`` of the peak learning rate.

        Returns their mean training loss. The state of optimizer and data stream is kept.
        """
        ...


class Problem(Protocol):
    """A model, its data and its inner optimizer."""

    @property
    def name(self) -> str: ...

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in the order of the flat vector."""
        ...

    @property
    def embeddings(self) -> Collection[str]: ...

    @property
    def heads(self) -> Collection[str]: ...

    @property
    def step_tokens(self) -> int:
        """Tokens in one step of a learner with one peer's data."""
        ...

    def first_values(self, seed: int) -> Float32s:
        """The first parameters of a run with this seed."""
        ...

    def learner(self, peers: Sequence[int], *, seed: int) -> LocalTraining:
        """A learner at ``first_values`` with the data of one peer, or of several (the reference).

        A peer's data depends on its number and the seed alone.
        """
        ...

    def evaluate(self, values: Float32s) -> float:
        """The loss on held-out data."""
        ...


def layout_of(problem: Problem, fragments: int) -> Layout:
    """The division of the problem's tensors into fragments."""
    return Layout.build(
        problem.specs, fragments, embeddings=problem.embeddings, heads=problem.heads
    )


class Places:
    """Positions of each fragment's values in a problem's flat vector."""

    def __init__(self, layout: Layout, specs: Sequence[TensorSpec]) -> None:
        starts, at = {}, 0
        for spec in specs:
            starts[spec.name] = at
            at += spec.size
        self._sizes = [fragment.size for fragment in layout.fragments]
        self._pieces = [
            [
                (slice(starts[u.tensor] + u.start, starts[u.tensor] + u.end), u.values)
                for u in fragment.units
            ]
            for fragment in layout.fragments
        ]

    def read(self, fragment: int, values: Float32s) -> Float32s:
        out = np.empty(self._sizes[fragment], np.float32)
        for here, there in self._pieces[fragment]:
            out[there] = values[here]
        return out

    def write(self, fragment: int, values: Float32s, new: Float32s) -> None:
        for here, there in self._pieces[fragment]:
            values[here] = new[there]

    def add(self, fragment: int, values: Float32s, difference: Float32s) -> None:
        for here, there in self._pieces[fragment]:
            values[here] += difference[there]

    def join(self, thetas: Sequence[Float32s]) -> Float32s:
        """The flat vector of all fragments, such as for ``Problem.evaluate``."""
        out = np.empty(sum(self._sizes), np.float32)
        for fragment, theta in enumerate(thetas):
            self.write(fragment, out, theta)
        return out


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

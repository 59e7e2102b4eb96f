"""What a simulated swarm trains: a problem, and one learner's way of working on it.

Parameters are one flat fp32 vector, the tensors of ``specs`` one after the other. A
``LocalTraining`` is one learner: its parameters, inner optimizer and data. Whoever simulates
changes ``values`` between two calls of ``train``, as a swarm does at a learner's safe
points; ``Places`` finds a fragment's values in it.

- ``quadratic``: an own optimum for each peer, noise, numpy alone. A thousand peers are cheap.
- ``text_mlp``: bytes of the Python standard library (``peer.lab.simulate.problems.text_mlp``; needs
  torch).
- ``text_gpt``: the built-in transformer, very small, on the same
  (``peer.lab.simulate.problems.text_gpt``).

A data-parallel reference is a learner with the data of several peers: each of its steps takes the
mean gradient of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec


class LocalTraining(Protocol):
    """One learner. A function of problem, seed, peers, and of what was done with ``values``."""

    @property
    def values(self) -> Float32s:
        """The parameters. The same array for ever: change it in place, between steps."""
        ...

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        """Make so many optimizer steps, at this share of the peak learning rate.

        Returns the mean training loss of them. Inner optimizer and place in the data are kept.
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
        """What every founder of the run with this seed starts from."""
        ...

    def learner(self, peers: Sequence[int], *, seed: int) -> LocalTraining:
        """A learner at ``first_values`` with these peers' data: one, or several for the reference.

        The same peer of the same seed has the same data, whoever else there is.
        """
        ...

    def evaluate(self, values: Float32s) -> float:
        """The loss on what nobody trains on."""
        ...


def layout_of(problem: Problem, fragments: int) -> Layout:
    """How the problem's tensors become fragments."""
    return Layout.build(
        problem.specs, fragments, embeddings=problem.embeddings, heads=problem.heads
    )


class Places:
    """Where each fragment's values are in a problem's flat vector."""

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
        """A copy of the fragment's values."""
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
        """The flat vector of a whole set of fragments, such as for ``Problem.evaluate``."""
        out = np.empty(sum(self._sizes), np.float32)
        for fragment, theta in enumerate(thetas):
            self.write(fragment, out, theta)
        return out

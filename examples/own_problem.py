"""A problem of your own in a simulated swarm: a logistic regression on data of each peer's own.

    cd examples
    shoal simulate --set problem.name=own_problem:Logistic --set peers.count=4,16

A problem has tensors, first values, a held-out loss, and learners with the data of one peer. A
learner's data may depend on its number and the seed, and on nothing else.

For simulations only: in a run, your own training loop joins with `peer.join` (own_loop.py).
"""

from collections.abc import Sequence

import numpy as np

from peer.simulate import Float32s, TensorSpec


class Logistic:
    """Find the signs of a fixed direction, from points that each peer draws around its own."""

    name, step_tokens, embeddings, heads = "logistic", 32, (), ()
    specs = (TensorSpec("weights", (64, 16)),)
    true = np.random.default_rng(7).standard_normal(64 * 16).astype(np.float32)

    def first_values(self, seed: int) -> Float32s:
        return np.zeros_like(self.true)

    def learner(self, peers: Sequence[int], *, seed: int) -> "Learner":
        return Learner(self, np.random.default_rng([seed, *peers]))

    def gradient(self, values: Float32s, rng: np.random.Generator) -> tuple[float, Float32s]:
        points = rng.standard_normal((self.step_tokens, values.size), np.float32)
        signs = np.sign(points @ self.true)
        odds = np.exp(-signs * (points @ values))
        return float(np.log1p(odds).mean()), -(points.T @ (signs * odds / (1 + odds))) / len(points)

    def evaluate(self, values: Float32s) -> float:
        return float(
            np.mean([self.gradient(values, np.random.default_rng(n))[0] for n in range(8)])
        )


class Learner:
    """Plain gradient descent."""

    def __init__(self, problem: Logistic, rng: np.random.Generator) -> None:
        self.values, self.problem, self.rng = problem.first_values(0), problem, rng

    def train(self, steps: int, *, rate: float = 1.0) -> float:
        for _ in range(steps):
            loss, gradient = self.problem.gradient(self.values, self.rng)
            self.values -= np.float32(0.5 * rate) * gradient
        return loss

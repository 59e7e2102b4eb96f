"""Decoupled DiLoCo as its paper states it, in one place and with one copy of everything.

A page of numpy after arXiv 2604.21428: no slices, no reducers, no
encoded bytes. What groups of peers compute is compared with this, bit for bit.

    Delta_m = Theta_p - theta_m,p
    w_m     = tokens_m * (tokens_m / steps_m)
    Delta   = RDA_w(Delta_m)   or, for embeddings,  sum(w_m Delta_m) / sum(w_m)
    b <- mu*b + Delta ;  Theta_p <- Theta_p - eta*(Delta + mu*b)          # fp32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Rule = Callable[[Sequence[Vector], Sequence[float]], Vector]
Through = Callable[[Vector], Vector]


@dataclass
class Work:
    """One learner's work of a cycle."""

    theta: Vector
    tokens: int
    steps: int


def weights(work: Sequence[Work]) -> list[float]:
    """Normalised, no share above max(2/M, 1/4): with equal machines the cap never acts."""
    raw = [w.tokens * w.tokens / w.steps for w in work]
    return [value / sum(raw) for value in raw]


def mean(deltas: Sequence[Vector], shares: Sequence[float]) -> Vector:
    total = np.zeros_like(deltas[0])
    for delta, share in zip(deltas, shares, strict=True):
        total = total + delta * np.float32(share)
    return total


def rda(deltas: Sequence[Vector], shares: Sequence[float]) -> Vector:
    """(sum w ||v|| / sum w) * phi(sum w phi(v) / sum w), in float64: a yardstick, not bits."""
    wide = [delta.astype(np.float64) for delta in deltas]
    norms = [float(np.sqrt(np.sum(v * v))) for v in wide]
    direction = np.sum([s * v / n for s, v, n in zip(shares, wide, norms, strict=True)], axis=0)
    length = sum(s * n for s, n in zip(shares, norms, strict=True)) / sum(shares)
    result: Vector = (length * direction / np.sqrt(np.sum(direction**2))).astype(np.float32)
    return result


class Syncer:
    """The central one that Shoal does without."""

    def __init__(self, theta: Vector, *, eta: float, mu: float) -> None:
        self.theta: Vector = theta.copy()
        self.momentum: Vector = np.zeros_like(theta)
        self.eta = np.float32(eta)
        self.mu = np.float32(mu)

    def merge(
        self,
        work: Sequence[Work],
        rule: Rule = mean,
        through: Through = lambda vector: vector,
    ) -> None:
        """One merge. ``through`` is what a lossy wire does to whatever crosses it."""
        deltas = [through(self.theta - w.theta) for w in work]
        delta = through(rule(deltas, weights(work)))
        self.momentum = self.mu * self.momentum + delta
        step = self.eta * (delta + self.mu * self.momentum)
        self.theta = (self.theta - step).astype(np.float32)

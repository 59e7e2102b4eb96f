"""The outer optimizer: Nesterov momentum on merged displacements, with the same bits everywhere.

    b <- mu*b + Delta ;  theta <- theta - eta*(Delta + mu*b)

(Decoupled DiLoCo, arXiv 2604.21428; DiLoCo, arXiv 2311.08105.) Everything is fp32, and every
multiply and every add is a ufunc call of its own: a fused multiply-add would round once where
another machine rounds twice. With mu = 0 no step needs momentum, and states have none
(``keeps_momentum``).

The default is mu = 0 (``averaging.rules.policy``). Momentum lengthens outer steps, as a higher
inner learning rate lengthens all steps: it gains where that rate is low for the number of merges,
and overshoots at the rate that is best for one machine alone, where eight members end 1% (Muon) to
10% (AdamW) higher with mu = 0.5 (docs/research/results-momentum.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from averaging.numbers.arrays import Buffer, Float32s, arithmetic
from averaging.numbers.codec import Codec, Scratch


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Learning rate and momentum of the outer optimizer. Both are rounded to fp32 before use."""

    eta: float
    mu: float


def keeps_momentum(mu: float) -> bool:
    """True if states have momentum. Without it theirs is an empty vector, wherever it goes."""
    return mu > 0


class Step(NamedTuple):
    """The vectors of an outer step: ``theta`` is filled, ``momentum`` updated in place.

    ``before`` may be ``theta``. To step a part of a fragment, take that part of all three.
    """

    before: Float32s
    theta: Float32s
    momentum: Float32s

    def of(self, part: slice) -> Step:
        return Step(self.before[part], self.theta[part], self.momentum[part])


class StepsFused(ABC):
    """Base of a codec that decodes a displacement and takes the outer step in one pass."""

    @abstractmethod
    def step_fused(
        self, made: Step, payload: Buffer, sizes: Sequence[int], optimizer: Nesterov
    ) -> None:
        """Do what ``step_encoded`` does."""


class OuterStep(Protocol):
    """An outer optimizer of an experiment's own, with one vector of memory."""

    def step(self, before: Float32s, moved: Float32s, momentum: Float32s, theta: Float32s) -> None:
        """Fill ``theta`` and update ``momentum``, value by value; ``before`` may be ``theta``.

        ``moved``: the merged displacement, by which parameters fall. It is called with parts of a
        fragment: a value may depend on the other values at its place, and on nothing else.
        """
        ...


_own: OuterStep | None = None


@contextmanager
def stepping(own: OuterStep) -> Iterator[None]:
    """Have every outer step of this process taken by ``own``: for simulations alone.

    No commit says so, and peers in other processes would not know.
    """
    global _own  # noqa: PLW0603
    before, _own = _own, own
    try:
        yield
    finally:
        _own = before


def step_encoded(
    made: Step,
    codec: Codec,
    payload: Buffer,
    sizes: Sequence[int],
    optimizer: Nesterov,
    scratch: Scratch,
) -> None:
    """Take one outer step with an encoded displacement, which is decoded a tile at a time.

    ``payload`` has been checked. The bits do not depend on how the work is divided, so threads may
    share it.
    """
    if _own is None and isinstance(codec, StepsFused):
        codec.step_fused(made, payload, sizes, optimizer)
        return
    with arithmetic():
        for part, delta in codec.pieces(payload, sizes, 1.0, scratch):
            if _own is not None:
                here = made.of(part)
                _own.step(here.before, delta, here.momentum, here.theta)
            else:
                _step_tile(made.of(part), delta, optimizer, scratch.second)


def _step_tile(made: Step, delta: Float32s, optimizer: Nesterov, spare: Float32s) -> None:
    eta, mu = np.float32(optimizer.eta), np.float32(optimizer.mu)
    work = spare[: delta.size]
    if mu == 0:
        moved = delta
    else:
        np.multiply(made.momentum, mu, out=made.momentum)
        np.add(made.momentum, delta, out=made.momentum)
        np.multiply(made.momentum, mu, out=work)
        np.add(work, delta, out=work)
        moved = work
    if eta != 1:  # multiplying by one is exact, and a fifth of the work
        np.multiply(moved, eta, out=work)
        moved = work
    np.subtract(made.before, moved, out=made.theta)

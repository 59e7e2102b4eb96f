"""The work of eight members over fifty rounds, the same in every test of exactness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec

MEMBERS = 8
ROUNDS = 50
ETA, MU = 0.7, 0.9

LAYOUT = Layout.build(
    [
        TensorSpec("up", (96, 33)),
        TensorSpec("down", (33, 96)),
        TensorSpec("norm", (33,)),
        TensorSpec("bias", (33,)),
        TensorSpec("gain", ()),
    ],
    1,
)
FRAGMENT = LAYOUT.fragments[0]


@dataclass
class Done:
    """A learner's work since its last merge."""

    tokens: int
    steps: int


def work(round_index: int) -> list[Done]:
    """Machines of two speeds; nobody does so much more that the cap would act."""
    rng = np.random.default_rng((1, round_index))
    return [
        Done(int(rng.integers(900, 1200)), 24 if member % 2 else 20) for member in range(MEMBERS)
    ]


def trained(theta: Float32s, member: int, round_index: int) -> Float32s:
    """Parameters after a cycle of a learner's own steps."""
    rng = np.random.default_rng((2, member, round_index))
    step = rng.standard_normal(theta.size).astype(np.float32)
    moved: Float32s = theta - np.float32(0.01) * (theta + step)
    return moved

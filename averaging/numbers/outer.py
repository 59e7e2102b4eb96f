"""The outer optimizer: Nesterov momentum on merged displacements, bit for bit the same everywhere.

    b <- mu*b + Delta ;  theta <- theta - eta*(Delta + mu*b)

(Decoupled DiLoCo, arXiv 2604.21428; DiLoCo, 2311.08105.) With mu = 0 there is no momentum, and
b stays as it is. All in fp32, every
multiply and every add a ufunc of its own: a fused one would round once where another machine
rounds twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from averaging.numbers.arrays import Buffer, Float32s, arithmetic
from averaging.numbers.codec import TILE, Codec, Scratch


def step(
    theta: Float32s,
    momentum: Float32s,
    delta: Float32s,
    *,
    eta: float,
    mu: float,
    scratch: Scratch,
    into: Float32s | None = None,
) -> None:
    """One outer step, in place. ``eta`` and ``mu`` are rounded to fp32 first.

    With ``into`` the new theta goes there, and ``theta`` stays as it is.
    """
    target = theta if into is None else into
    with arithmetic():
        for start in range(0, theta.size, TILE):
            part = slice(start, min(start + TILE, theta.size))
            _step_tile(
                theta[part], momentum[part], delta[part], target[part], eta, mu, scratch.second
            )


def _step_tile(
    theta: Float32s,
    momentum: Float32s,
    delta: Float32s,
    target: Float32s,
    eta: float,
    mu: float,
    room: Float32s,
) -> None:
    eta32, mu32 = np.float32(eta), np.float32(mu)
    work = room[: delta.size]
    if mu32 == 0:  # nobody asks for momentum, and memory is what takes time here
        moved = delta
    else:
        np.multiply(momentum, mu32, out=momentum)
        np.add(momentum, delta, out=momentum)
        np.multiply(momentum, mu32, out=work)
        np.add(work, delta, out=work)
        moved = work
    if eta32 != 1:  # times one is exact, and a fifth of the work
        np.multiply(moved, eta32, out=work)
        moved = work
    np.subtract(theta, moved, out=target)


def step_encoded(
    theta: Float32s,
    momentum: Float32s,
    codec: Codec,
    payload: Buffer,
    sizes: Sequence[int],
    *,
    eta: float,
    mu: float,
    scratch: Scratch,
    into: Float32s | None = None,
) -> None:
    """``step`` with a displacement that is still encoded, decoded a tile at a time, in place.

    ``payload`` has been checked. For part of a fragment give the parts of all three:
    the bits do not depend on it, so threads may share the work.
    """
    target = theta if into is None else into
    with arithmetic():
        for part, delta in codec.pieces(payload, sizes, 1.0, scratch):
            _step_tile(theta[part], momentum[part], delta, target[part], eta, mu, scratch.second)

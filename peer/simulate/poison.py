"""Uploads of a member that poisons a simulated run.

It takes part and trains as any other one does, and keeps its own parameters. Only the values that
it uploads are made up. Each unit of them is as long as the unit of its true displacement, or a
given multiple of it, so norms alone betray nothing:

- ``sign``: back along its own displacement;
- ``noise``: a random direction, another one for each upload;
- ``drift``: a fixed direction for the whole run, the same for all such members.

A member that merges falsely passes the first contribution to a slice off as the mean, which is
within any bound on norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Merge

Poison: TypeAlias = Literal["sign", "noise", "drift"]


def poisoned(
    base: Float32s,
    values: Float32s,
    *,
    direction: Float32s | None,
    length: float,
    sizes: Sequence[int],
) -> Float32s:
    """The values to upload instead of ``values``.

    ``direction``: where they point from the base; ``None``: back along the own displacement.
    ``length``: norm of each unit's displacement, as a multiple of the true one's. ``sizes``: number
    of values in each unit.
    """
    moved = values - base
    if direction is None:
        return base - np.float32(length) * moved
    out, at = base.copy(), 0
    for size in sizes:
        unit = slice(at, at + size)
        norm = float(np.linalg.norm(direction[unit]))
        if norm > 0.0:
            factor = length * float(np.linalg.norm(moved[unit])) / norm
            out[unit] += np.float32(factor) * direction[unit]
        at += size
    return out


def directions(
    kind: Poison, size: int, *, seed: int, fragment: int, peer: int, life: int
) -> Callable[[], Float32s | None]:
    """A function that gives the direction of each next upload; ``None``: back along one's own."""
    if kind == "sign":
        return lambda: None
    if kind == "noise":
        rng = np.random.default_rng([seed, 4, fragment, peer, life])
        return lambda: rng.standard_normal(size, np.float32)
    fixed = np.random.default_rng([seed, 5, fragment]).standard_normal(size, np.float32)
    return lambda: fixed


def merged_falsely(merge: Merge) -> Merge:
    """The merge that a false reducer carries out instead."""
    if len(merge.contributors) < 2:
        return merge
    weights = (1.0, *[0.0] * (len(merge.weights) - 1))
    return msgspec.structs.replace(merge, weights=weights)

"""The values of a unit that a process holds, when a tensor is sharded over several processes.

A unit (``averaging.numbers.layout``) is a range of a flattened tensor, and a process holds a box of
the tensor. This module computes places only; it copies nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = slice | NDArray[np.int64]
"""Indices of values in a flat vector."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that a process holds: ``shape`` values beginning at ``offset``."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.offset) == len(self.shape):
            raise ValueError(f"{self}: full, offset and shape have different numbers of dimensions")

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full


@dataclass(frozen=True, slots=True)
class Overlap:
    """The values of a unit that are in a box, by their places in both."""

    in_unit: Places
    in_box: Places
    size: int


def overlap(box: Box, start: int, end: int) -> Overlap | None:
    """Return the places of values ``start`` to ``end`` of the tensor in a box, or ``None``.

    Both lists of places are in the tensor's order, so one side can write what the other side reads.
    """
    runs, length = _runs(box)
    begin = np.maximum(runs, start)
    stop = np.minimum(runs + length, end)
    kept = np.flatnonzero(begin < stop)
    if not kept.size:
        return None
    begin, stop = begin[kept], stop[kept]
    in_box = kept * length + (begin - runs[kept])
    if kept.size == 1:
        size = int(stop[0] - begin[0])
        first, own = int(begin[0]) - start, int(in_box[0])
        return Overlap(slice(first, first + size), slice(own, own + size), size)
    sizes = stop - begin
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Overlap(
        np.repeat(begin - start, sizes) + within,
        np.repeat(in_box, sizes) + within,
        int(sizes.sum()),
    )


def _runs(box: Box) -> tuple[NDArray[np.int64], int]:
    """Return the starts of the box's runs of consecutive values, and their length."""
    if not math.prod(box.shape):
        return np.empty(0, np.int64), 0
    # All dimensions after this one are whole, so a run extends through it and them.
    through = len(box.full) - 1
    while through > 0 and box.shape[through] == box.full[through]:
        through -= 1
    starts = np.zeros(1, np.int64)
    stride, length = math.prod(box.full), 1
    for dimension, (extent, offset, shape) in enumerate(
        zip(box.full, box.offset, box.shape, strict=True)
    ):
        stride //= extent
        if dimension < through:
            places = offset + np.arange(shape, dtype=np.int64)
            starts = (starts[:, None] + places * stride).reshape(-1)
        elif dimension == through:
            starts = starts + offset * stride
            length = shape * stride
    return starts, length


def owners(boxes: list[Box]) -> list[int]:
    """Return the processes, lowest first, that together hold each value once."""
    chosen: list[int] = []
    for number, box in enumerate(boxes):
        if math.prod(box.shape) and box not in (boxes[other] for other in chosen):
            chosen.append(number)
    return chosen

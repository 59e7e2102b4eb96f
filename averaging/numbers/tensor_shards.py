"""Which values of a unit a process holds, when a tensor is spread over several.

Units (``averaging.numbers.layout``) are ranges of a flattened tensor; a process holds a box of it.
Both are only numbers here: nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = slice | NDArray[np.int64]
"""Of values in something flat."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that a process holds: from ``offset``, so many in each dimension."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.offset) == len(self.shape):
            raise ValueError(f"{self} has dimensions that are not the same in number")

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full


@dataclass(frozen=True, slots=True)
class Overlap:
    """The values of a unit that are in a box."""

    in_unit: Places
    in_box: Places
    size: int


def overlap(box: Box, start: int, end: int) -> Overlap | None:
    """Where values ``start`` to ``end`` of the flattened tensor are in a box; ``None``: nowhere.

    Both are in the tensor's order, so that what one side reads the other can write.
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
    """Where the box's runs of consecutive values begin in the flattened tensor; their length."""
    if not math.prod(box.shape):
        return np.empty(0, np.int64), 0
    # All dimensions behind this one are whole: a run goes through it and them.
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
    """Processes, lowest first, that together hold everything once; the others hold copies."""
    chosen: list[int] = []
    for number, box in enumerate(boxes):
        if math.prod(box.shape) and box not in (boxes[other] for other in chosen):
            chosen.append(number)
    return chosen

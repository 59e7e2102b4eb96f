"""Payloads of several columns, each in a codec of its own: a displacement, and perhaps a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Chunk
from averaging.numbers.codec import Codec, Scratch
from averaging.numbers.norm_bounds import squares_at_most
from averaging.numbers.outer import Nesterov, Step, step_encoded

_FULL_STEP = Nesterov(eta=1.0, mu=0.0)
"""The outer step that subtracts a displacement, and does nothing to the momentum."""
_NO_MOMENTUM = np.empty(0, np.float32)


class Group(NamedTuple):
    """Units of a chunk that are encoded together: all of their first column, then of the next."""

    first: int
    """Index of the first unit in the chunk."""
    sizes: tuple[int, ...]
    values: slice
    columns: list[memoryview]


class Columns:
    """One way of a round's bytes: contributions up to reducers, or merged slices back.

    The first column is the displacement. Where others follow it, each unit is a group of its own,
    so that a slice may end where a unit ends.
    """

    def __init__(self, *codecs: Codec) -> None:
        self.codecs = codecs

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return sum(codec.encoded_size(sizes) for codec in self.codecs)

    def groups(self, chunk: Chunk, data: memoryview) -> Iterator[Group]:
        """Yield the groups of a chunk, each with its range of values and its bytes."""
        if len(self.codecs) == 1:
            yield Group(0, chunk.sizes, chunk.values, [data])
            return
        start, at = chunk.values.start, 0
        for index, size in enumerate(chunk.sizes):
            ends = accumulate((codec.encoded_size((size,)) for codec in self.codecs), initial=at)
            places = list(pairwise(ends))
            columns = [data[begin:end] for begin, end in places]
            yield Group(index, (size,), slice(start, start + size), columns)
            start, at = start + size, places[-1][1]

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless the bytes decode to finite values."""
        for group in self.groups(chunk, data):
            for codec, column in zip(self.codecs, group.columns, strict=True):
                codec.check(column, group.sizes, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        """Return for each unit an upper bound on the sum of squares of its displacement.

        Used to compare contributions with each other and with what earlier merges moved, so it is
        cheap: for block codecs it reads scales and no codes. The bytes have been checked.
        """
        found = [
            squares_at_most(self.codecs[0], group.columns[0], group.sizes)
            for group in self.groups(chunk, data)
        ]
        return np.concatenate(found)

    def subtract(
        self, chunk: Chunk, data: memoryview, base: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        """Set the chunk's part of ``out`` to base less the decoded displacement."""
        for group in self.groups(chunk, data):
            made = Step(base, out, _NO_MOMENTUM).of(group.values)
            step_encoded(made, self.codecs[0], group.columns[0], group.sizes, _FULL_STEP, scratch)

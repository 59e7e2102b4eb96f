"""Payloads of several columns (displacement, theta, momentum), each in a codec of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from averaging.errors import NotFinite
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Chunk
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.merge import MergeRule, Units, merge_encoded
from averaging.numbers.norm_bounds import squares_at_most
from averaging.numbers.outer import Nesterov, Step, step_encoded

_FULL_STEP = Nesterov(eta=1.0, mu=0.0)
"""The outer step that subtracts a displacement, and does nothing to the momentum."""
_NO_MOMENTUM = np.empty(0, np.float32)


class Displacements:
    """Encoded displacements, in one codec: the payloads of a merge."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self.codec.encoded_size(sizes)

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        self.codec.check(data, chunk.sizes, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        return squares_at_most(self.codec, data, chunk.sizes)

    def subtract(
        self, chunk: Chunk, data: memoryview, base: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        """Set the chunk's part of ``out`` to base less the decoded displacement."""
        made = Step(base, out, _NO_MOMENTUM).of(chunk.values)
        step_encoded(made, self.codec, data, chunk.sizes, _FULL_STEP, scratch)


class Columns:
    """A displacement and other encoded columns, each unit in one codec after the other."""

    def __init__(self, *codecs: Codec) -> None:
        self._codecs = codecs

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return sum(codec.encoded_size(sizes) for codec in self._codecs)

    def units(self, chunk: Chunk, data: memoryview) -> list[tuple[slice, list[memoryview]]]:
        """Return, for each unit of the chunk, its range of values and its bytes in each column."""
        units = []
        start, at = chunk.values.start, 0
        for size in chunk.sizes:
            parts = []
            for codec in self._codecs:
                end = at + codec.encoded_size((size,))
                parts.append(data[at:end])
                at = end
            units.append((slice(start, start + size), parts))
            start += size
        return units

    def encode(
        self, chunk: Chunk, vectors: Mapping[int, Float32s], out: memoryview, scratch: Scratch
    ) -> None:
        """Encode vectors into the columns that they are given for."""
        for index, (part, targets) in enumerate(self.units(chunk, out)):
            size = (part.stop - part.start,)
            try:
                for column, vector in vectors.items():
                    self._codecs[column].encode(vector[part], size, targets[column], scratch)
            except NotFinite:
                raise NotFinite(index) from None

    def decode(
        self, chunk: Chunk, data: memoryview, vectors: Mapping[int, Float32s], scratch: Scratch
    ) -> None:
        """Decode columns into the vectors that are given for them."""
        for part, sources in self.units(chunk, data):
            for column, vector in vectors.items():
                size = (part.stop - part.start,)
                self._codecs[column].decode(sources[column], size, vector[part], scratch)

    def subtract(
        self, chunk: Chunk, data: memoryview, base: Float32s, out: Float32s, scratch: Scratch
    ) -> None:
        """Set the chunk's part of ``out`` to base less the decoded first column."""
        for part, (moved, *_) in self.units(chunk, data):
            size = (part.stop - part.start,)
            made = Step(base, out, _NO_MOMENTUM).of(part)
            step_encoded(made, self._codecs[0], moved, size, _FULL_STEP, scratch)

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        for size, (_, parts) in zip(chunk.sizes, self.units(chunk, data), strict=True):
            for codec, part in zip(self._codecs, parts, strict=True):
                codec.check(part, (size,), scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        codec = self._codecs[0]
        found = (
            squares_at_most(codec, parts[0], (size,))[0]
            for size, (_, parts) in zip(chunk.sizes, self.units(chunk, data), strict=True)
        )
        return np.fromiter(found, np.float64, len(chunk.sizes))

    def merge(
        self,
        chunk: Chunk,
        payloads: Sequence[memoryview],
        ways: Sequence[tuple[MergeRule, Sequence[float]]],
        out: memoryview,
        scratch: Scratch,
        *,
        into: Columns,
        rest: Float32s | None = None,
    ) -> None:
        """Merge each column by a rule and weights of its own (``ways``), into ``into``'s codecs.

        ``rest``: set to what encoding loses of the first column.
        """
        given = [self.units(chunk, payload) for payload in payloads]
        for index, (values, targets) in enumerate(into.units(chunk, out)):
            unit = Units((chunk.sizes[index],), (chunk.kinds[index],))
            for column, (rule, weights) in enumerate(ways):
                parts = Addends([units[index][1][column] for units in given], weights)
                codec, to = self._codecs[column], into._codecs[column]
                lost = None
                if rest is not None and column == 0:
                    start = values.start - chunk.values.start
                    lost = rest[start : start + chunk.sizes[index]]
                target = targets[column]
                merge_encoded(rule, codec, parts, unit, target, scratch, into=to, rest=lost)


def shares_by_heads(payloads: Sequence[memoryview], members: Sequence[int] | None) -> list[float]:
    """Return weights by which each member counts the same.

    ``members`` holds the number of members in each payload; ``None``: one each.
    """
    counts = members or [1] * len(payloads)
    return [count / sum(counts) for count in counts]

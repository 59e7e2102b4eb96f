"""Error feedback for the way down: what encoding loses of a slice that this peer merges.

Nobody else knows what the merged slice was before it was encoded, so its reducer passes the loss
on: it becomes part of the displacement that it offers next, divided by its weight in the merge. No
message and no other peer's arithmetic depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from averaging.numbers.arrays import Float32s, arithmetic
from averaging.numbers.chunks import Chunk, Cutting


@dataclass(frozen=True, slots=True)
class Rest:
    """What encoding loses of one merged slice."""

    place: slice
    """The slice's values in the fragment."""
    values: Float32s

    def of(self, chunk: Chunk) -> Float32s:
        """Return the part of a chunk of the slice."""
        start = self.place.start
        return self.values[chunk.values.start - start : chunk.values.stop - start]


class Rests:
    """What encoding lost of the slices that a peer merged in one round."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._kept: dict[int, Rest] = {}

    def __repr__(self) -> str:
        return f"Rests(slices={sorted(self._kept)})"

    def room(self, index: int) -> Rest:
        """Return uninitialised memory for the rest of a slice."""
        piece = self._cutting.slices[index]
        return Rest(piece.values, np.empty(piece.size, np.float32))

    def keep(self, index: int, rest: Rest) -> None:
        """The slice has been merged, and this is its rest."""
        self._kept[index] = rest

    def leave(self, offered: Float32s, *, weight: float, contributors: int) -> None:
        """Leave the rests in the learner's parameters.

        ``offered``: the values of the fragment relative to which the learner adopts the version.
        ``weight``: of the own contribution among those of ``contributors`` members. One of less
        weight than the mean may have more the next time, and would then bring too much, so it
        counts as one of the mean weight.
        """
        factor = np.float32(1 / max(weight, 1 / contributors))
        with arithmetic():
            for rest in self._kept.values():
                part = offered[rest.place]
                np.multiply(rest.values, factor, out=rest.values)
                np.add(part, rest.values, out=part)
        self._kept.clear()

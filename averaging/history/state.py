"""The whole state of a fragment: the numbers and the history they come from."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage, bound, origin
from averaging.history.merged_map import MergedMap
from averaging.messages import Link
from averaging.numbers.arrays import Float32s


@dataclass(frozen=True, slots=True, eq=False)
class FragmentState:
    """A fragment's state at one version. Equal lineages have equal bits.

    All of it travels together. The arrays belong to the code that made the state; nothing else
    writes to them.
    """

    fragment: int
    version: int
    lineage: Lineage
    chain: Chain
    theta: Float32s
    momentum: Float32s
    merged: MergedMap
    history: bytes = b""
    """The lineage is this and the merged map (``lineage.bound``). Empty: not known, and no other
    peer takes the state."""

    @classmethod
    def founded(cls, layout_hash: bytes, fragment: int, theta: Float32s) -> FragmentState:
        """Return version 0 of a run: a founder's own parameters, no momentum, nothing merged."""
        history = origin(layout_hash, fragment, _bytes_digest(theta))
        nothing = MergedMap()
        lineage = bound(history, nothing.digest())
        chain = Chain([Link(0, lineage, 0)])
        return cls(fragment, 0, lineage, chain, theta, np.zeros_like(theta), nothing, history)

    def follows(self, version: int, lineage: Lineage) -> bool:
        """Return whether this is that state, or a later one of its history."""
        return lineage == self.lineage or self.chain.find(version, lineage) is not None

    def digest(self) -> bytes:
        """Return a digest over every bit, to compare with other peers on the same lineage."""
        return bits_digest(self.lineage, self.theta, self.momentum, self.merged)


def bits_digest(lineage: Lineage, theta: Float32s, momentum: Float32s, merged: MergedMap) -> bytes:
    """Return the blake3 digest of lineage, numbers (little-endian) and merged map."""
    hasher = blake3.blake3(derive_key_context="shoal 2026-11 fragment state")
    hasher.update(lineage)
    for vector in (theta, momentum):
        hasher.update(_bytes_digest(vector))
    hasher.update(merged.digest())
    return hasher.digest()


def _bytes_digest(vector: Float32s) -> bytes:
    data = np.ascontiguousarray(vector, dtype="<f4")
    return blake3.blake3(data.view(np.uint8).data).digest()

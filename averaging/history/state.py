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
from averaging.numbers.layout import Fragment
from averaging.numbers.outer import keeps_momentum

PIECE_BYTES = 512 << 10
"""Size of a piece, which never straddles the two vectors. Digests depend on it."""

PIECE_DIGEST_BYTES = 32

_STATE = "shoal 2026-11 fragment state"


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
    def founded(
        cls, layout_hash: bytes, fragment: int, theta: Float32s, momentum: int
    ) -> FragmentState:
        """Return version 0 of a run: a founder's own parameters, nothing merged.

        ``momentum``: its number of values, all zeros (``Pieces``).
        """
        history = origin(layout_hash, fragment, blake3.blake3(as_bytes(theta)).digest())
        nothing = MergedMap()
        lineage = bound(history, nothing.digest())
        chain = Chain([Link(0, lineage, 0)])
        zeros = np.zeros(momentum, np.float32)
        return cls(fragment, 0, lineage, chain, theta, zeros, nothing, history)

    @property
    def vectors(self) -> tuple[Float32s, ...]:
        """Theta, and momentum where the run has it."""
        return (self.theta, self.momentum) if self.momentum.size else (self.theta,)

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.theta.size, self.momentum.size)

    def follows(self, version: int, lineage: Lineage) -> bool:
        """Return whether this is that state, or a later one of its history."""
        return lineage == self.lineage or self.chain.find(version, lineage) is not None

    def piece_digests(self) -> bytes:
        """The digest of each piece of theta, then of each piece of momentum. It reads every byte:
        work for a thread."""
        pieces, vectors = self.pieces, (as_bytes(self.theta), as_bytes(self.momentum))
        views = (pieces.view(index, *vectors) for index in range(pieces.count))
        return b"".join(blake3.blake3(view).digest() for view in views)

    def digest(self) -> bytes:
        """Return a digest over every bit, to compare with other peers on the same lineage."""
        said = self.lineage + self.merged.digest() + self.piece_digests()
        return blake3.blake3(said, derive_key_context=_STATE).digest()


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a fragment's two vectors, by their numbers of values."""

    theta: int
    momentum: int

    @classmethod
    def of(cls, fragment: Fragment, mu: float) -> Pieces:
        """Those of a run with this outer momentum. Statistics have no outer optimizer."""
        has_momentum = keeps_momentum(mu) and not fragment.has_statistics
        return cls(fragment.size, fragment.size * has_momentum)

    @property
    def of_theta(self) -> int:
        """Number of pieces of theta, which come first."""
        return -(-self.theta * 4 // PIECE_BYTES)

    @property
    def count(self) -> int:
        return self.of_theta + -(-self.momentum * 4 // PIECE_BYTES)

    @property
    def size_bytes(self) -> int:
        return 4 * (self.theta + self.momentum)

    def view(self, index: int, theta: memoryview, momentum: memoryview) -> memoryview:
        """Return piece ``index`` of the two vectors' bytes."""
        vector, at = (theta, index) if index < self.of_theta else (momentum, index - self.of_theta)
        return vector[at * PIECE_BYTES : (at + 1) * PIECE_BYTES]


def value_bytes(mu: float) -> int:
    """Bytes of a state for each value of the model."""
    return 4 * (1 + keeps_momentum(mu))


def as_bytes(vector: Float32s) -> memoryview:
    """Return a vector's little-endian bytes, without copying on little-endian machines."""
    return np.ascontiguousarray(vector, dtype="<f4").view(np.uint8).data

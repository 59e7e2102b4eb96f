"""Drift corrected instead of mixed away, as NoLoCo does: for comparison, in simulations only.

Members of a round exchange their slow weights beside their displacements, as in a meld, but not
their momentum. Everybody steps on its own weights, and how far it is from the mean of the round
goes into its momentum (arXiv 2506.10911, restated):

    b <- mu*b + eta*Delta + gamma*(Theta_own - mean Theta);   Theta_own <- Theta_own - b

So peers are pulled together over several rounds and never hold equal bits: nobody could replay a
payload, or be told by a digest that its machine is broken. No live peer does this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from averaging.messages import Commit
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Chunk
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.columns import Columns, shares_by_heads
from averaging.numbers.merge import rule_named


class CorrectedNumbers:
    """For each unit the displacement, then theta. ``base`` and ``values`` are as in a merge."""

    def __init__(
        self, *, codec: str, theta: str, merge: str, eta: float, mu: float, gamma: float
    ) -> None:
        self._displacement, self._theta = codec_named(codec), codec_named(theta)
        self._columns = Columns(self._displacement, self._theta)
        self._rule = rule_named(merge)
        self._eta, self._mu, self._gamma = map(np.float32, (eta, mu, gamma))
        self._own: Float32s | None = None

    @classmethod
    def of(cls, commit: Commit, *, theta: str, gamma: float) -> CorrectedNumbers:
        return cls(
            codec=commit.codec,
            theta=theta,
            merge=commit.merge,
            eta=commit.eta,
            mu=commit.mu,
            gamma=gamma,
        )

    def carry(self, theta: Float32s) -> None:
        """What this peer brings along to be averaged. Comes before ``encode``."""
        self._own = theta

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._columns.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        assert self._own is not None, "carry() comes before encode()"
        for part, (moved, theta) in self._columns.units(chunk, out):
            size = (part.stop - part.start,)
            self._displacement.encode_difference(base[part], values[part], size, moved, scratch)
            self._theta.encode(self._own[part], size, theta, scratch)

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        self._columns.check(chunk, data, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        return self._columns.squares_of_first(chunk, data)

    def merge(
        self,
        chunk: Chunk,
        payloads: Sequence[memoryview],
        weights: Sequence[float],
        out: memoryview,
        scratch: Scratch,
        *,
        members: Sequence[int] | None = None,
    ) -> None:
        equal = rule_named("mean"), shares_by_heads(payloads, members)
        self._columns.merge(chunk, payloads, ((self._rule, weights), equal), out, scratch)

    def step(
        self,
        chunk: Chunk,
        data: memoryview,
        before: Float32s,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        for part, (moved, theta_data) in self._columns.units(chunk, data):
            size = (part.stop - part.start,)
            delta, middle = np.empty(size, np.float32), np.empty(size, np.float32)
            self._displacement.decode(moved, size, delta, scratch)
            self._theta.decode(theta_data, size, middle, scratch)
            momentum[part] = (
                self._mu * momentum[part]
                + self._eta * delta
                + self._gamma * (before[part] - middle)
            )
            theta[part] = before[part] - momentum[part]

"""The arithmetic of each kind of round, chunk by chunk: encode, check, merge, step.

- A ``merge`` exchanges displacements in the codec of its commit.
- A ``mix`` exchanges theta in f32 and momentum in f16, and takes the weighted mean of both.
- A ``meld`` exchanges displacement, theta and momentum, and takes the outer step on the means.

The bytes do not depend on how units are grouped into chunks. Every function here is work for a
thread, not for an event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from averaging.errors import NotFinite
from averaging.messages import Commit
from averaging.numbers.arrays import Float32s, Float64s, squared_norm
from averaging.numbers.chunks import Chunk
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.columns import Columns, shares_by_heads
from averaging.numbers.merge import merge_encoded, rule_named
from averaging.numbers.norm_bounds import squares_at_most
from averaging.numbers.outer import Nesterov, step_encoded


class Numbers(Protocol):
    """The arithmetic of one kind of round."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        """Encode a contribution. Raises ``NotFinite``; its unit is counted in the chunk."""
        ...

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless the bytes decode to finite values."""
        ...

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        """Return for each unit an upper bound on the sum of squares of its displacement.

        Used to compare contributions with each other and with what earlier merges moved, so it is
        cheap: for block codecs it reads scales and no codes. The bytes have been checked.
        """
        ...

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
        """Merge the members' bytes into ``out``.

        ``members`` holds the number of members that each payload stands for; ``None``: one each.
        """
        ...

    def step(
        self,
        chunk: Chunk,
        data: memoryview,
        before: Float32s,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        """Fill the chunk's part of ``theta`` from ``before``, and update ``momentum`` in place."""
        ...


class MergeNumbers:
    """Arithmetic of a merge: the displacement ``base - values`` of each member."""

    def __init__(self, *, codec: str, merge: str, eta: float, mu: float) -> None:
        self._codec = codec_named(codec)
        self._rule = rule_named(merge)
        self._optimizer = Nesterov(eta, mu)

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._codec.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        part = chunk.values
        self._codec.encode_difference(base[part], values[part], chunk.sizes, out, scratch)

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        self._codec.check(data, chunk.sizes, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        return squares_at_most(self._codec, data, chunk.sizes)

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
        merge_encoded(
            self._rule, self._codec, payloads, weights, chunk.sizes, chunk.kinds, out, scratch
        )

    def step(
        self,
        chunk: Chunk,
        data: memoryview,
        before: Float32s,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        part = chunk.values
        step_encoded(
            before[part],
            momentum[part],
            self._codec,
            data,
            chunk.sizes,
            self._optimizer,
            scratch=scratch,
            into=theta[part],
        )


class MixNumbers:
    """Arithmetic of a mix: theta in f32, then momentum in f16.

    In ``encode``, ``base`` is the momentum and ``values`` are theta.
    """

    def __init__(self) -> None:
        self._columns = Columns(codec_named("f32"), codec_named("f16"))

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._columns.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        self._columns.encode(chunk, {0: values, 1: base}, out, scratch)

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        self._columns.check(chunk, data, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        return np.zeros(len(chunk.sizes))  # a mix sends no displacement

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
        mean = rule_named("mean"), weights
        self._columns.merge(chunk, payloads, (mean, mean), out, scratch)

    def step(
        self,
        chunk: Chunk,
        data: memoryview,
        before: Float32s,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        self._columns.decode(chunk, data, {0: theta, 1: momentum}, scratch)


class MeldNumbers:
    """Arithmetic of a meld: displacement, theta and momentum of each member.

    ``codec`` names three codecs, such as ``int4/f32/f16``. In ``encode``, ``base`` and ``values``
    are as in a merge; ``carry`` must be called before. Taking the outer step first and averaging
    afterwards equals averaging everything and taking one step, for merge rules that are means
    (``test_mixing.py`` checks it), so all members leave with the same bits.
    """

    def __init__(self, *, codec: str, merge: str, eta: float, mu: float) -> None:
        names = codec.split("/")
        if len(names) != 3:
            raise ValueError(f"codec is {codec!r}; a meld has three, such as 'int4/f32/f16'")
        self._displacement = codec_named(names[0])
        self._columns = Columns(*map(codec_named, names))
        self._rule = rule_named(merge)
        self._optimizer = Nesterov(eta, mu)
        self._own: tuple[Float32s, Float32s] | None = None
        self._distance = 0.0
        self.norm = 0.0
        """Squared norm of the mean theta."""

    @property
    def dispersion(self) -> float:
        """Distance of this peer's theta from the mean, relative. Valid after all steps."""
        return math.sqrt(self._distance / self.norm) if self.norm > 0 else 0.0

    def carry(self, theta: Float32s, momentum: Float32s) -> None:
        """Set the theta and momentum that this peer contributes."""
        self._own = theta, momentum

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._columns.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        self.encode_own(chunk, out, scratch)
        self.encode_moved(chunk, base, values, out, scratch)

    # The parts of encode(): members on the same lineage share the bytes of encode_own

    def encode_own(self, chunk: Chunk, out: memoryview, scratch: Scratch) -> None:
        """Encode theta and momentum."""
        assert self._own is not None, "carry() comes before encode()"
        theta, momentum = self._own
        self._columns.encode(chunk, {1: theta, 2: momentum}, out, scratch)

    def encode_moved(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        """Encode the displacement."""
        for index, (part, (moved, _, _)) in enumerate(self._columns.units(chunk, out)):
            size = (part.stop - part.start,)
            try:
                self._displacement.encode_difference(base[part], values[part], size, moved, scratch)
            except NotFinite:
                raise NotFinite(index) from None

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
        self._columns.merge(chunk, payloads, ((self._rule, weights), equal, equal), out, scratch)

    def step(
        self,
        chunk: Chunk,
        data: memoryview,
        before: Float32s,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        self.decode(chunk, data, theta, momentum, scratch)
        self.measure_mean(chunk, theta)
        self.measure(chunk, before, theta)
        self.move(chunk, data, theta, momentum, scratch)

    # The parts of step(): all but measure() give the same result at every member

    def decode(
        self,
        chunk: Chunk,
        data: memoryview,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        """Decode the means of theta and momentum."""
        self._columns.decode(chunk, data, {1: theta, 2: momentum}, scratch)

    def measure_mean(self, chunk: Chunk, mean: Float32s) -> None:
        """Add this chunk's squared norm of the mean."""
        for part in _values_of(chunk):
            self.norm += squared_norm(mean[part])

    def measure(self, chunk: Chunk, before: Float32s, mean: Float32s) -> None:
        """Add this chunk's squared distance of theta from the mean."""
        for part in _values_of(chunk):
            self._distance += squared_norm(before[part] - mean[part])

    def move(
        self,
        chunk: Chunk,
        data: memoryview,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        """Take the outer step on the means, in place."""
        for part, (moved, _, _) in self._columns.units(chunk, data):
            size = (part.stop - part.start,)
            step_encoded(
                theta[part],
                momentum[part],
                self._displacement,
                moved,
                size,
                self._optimizer,
                scratch=scratch,
            )


def _values_of(chunk: Chunk) -> Iterator[slice]:
    """Yield the range of the values of each unit."""
    ends = accumulate(chunk.sizes, initial=chunk.values.start)
    return (slice(start, end) for start, end in pairwise(ends))


def encoded_size(codec: str, sizes: Sequence[int]) -> int:
    """Return the bytes of a contribution in the codec that a commit names; a meld's names three."""
    return sum(codec_named(name).encoded_size(sizes) for name in codec.split("/"))


def numbers_of(commit: Commit) -> Numbers:
    """Return a commit's arithmetic. Raises ``ValueError`` for an unknown codec or rule."""
    if commit.kind == "mix":
        return MixNumbers()
    if commit.kind == "meld":
        return MeldNumbers(codec=commit.codec, merge=commit.merge, eta=commit.eta, mu=commit.mu)
    return MergeNumbers(codec=commit.codec, merge=commit.merge, eta=commit.eta, mu=commit.mu)

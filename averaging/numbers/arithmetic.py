"""The arithmetic of each kind of round, chunk by chunk: encode, check, merge, step.

- A ``merge`` exchanges displacements in the codecs of its commit, one for each way.
- A ``meld`` exchanges displacement, theta and momentum, and takes the outer step on the means.

The bytes do not depend on how units are grouped into chunks. Every function here is work for a
thread, not for an event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from averaging.errors import NotFinite
from averaging.messages import Commit
from averaging.numbers.arrays import Float32s, Float64s, arithmetic, squared_norm
from averaging.numbers.chunks import Chunk, Cutting
from averaging.numbers.codec import Addends, LeavesRest, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.columns import Columns, Displacements, shares_by_heads
from averaging.numbers.layout import Fragment
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov, Step, step_encoded


class Leg(Protocol):
    """One way of a round's bytes: contributions up to reducers, or merged slices back."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless the bytes decode to finite values."""
        ...

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        """Return for each unit an upper bound on the sum of squares of its displacement.

        Used to compare contributions with each other and with what earlier merges moved, so it is
        cheap: for block codecs it reads scales and no codes. The bytes have been checked.
        """
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """A contribution's arrays: ``share`` of ``base - values`` is encoded."""

    base: Float32s
    values: Float32s
    share: float = field(default=1.0, kw_only=True)
    """Factor on the displacement (``averaging.rules.weights``)."""
    feedback: bool = field(default=False, kw_only=True)
    """Encoding changes ``values`` into those that the encoded contribution stands for: a learner
    that adopts the merged version relative to them keeps the rest, which encoding lost, in its
    parameters, so it is part of what the learner offers next."""

    def shortened(self, part: slice) -> Float32s:
        """The values that are the given share of the way from ``base``."""
        if self.share == 1.0:
            return self.values[part]
        with arithmetic():
            moved = self.values[part] - self.base[part]
            moved *= np.float32(self.share)
            moved += self.base[part]
        return moved

    def lengthen(self, part: slice) -> None:
        """Undo ``shortened``, in place."""
        if self.share == 1.0:
            return
        with arithmetic():
            moved = self.values[part] - self.base[part]
            moved /= np.float32(self.share)
            np.add(self.base[part], moved, out=self.values[part])


@dataclass(frozen=True, slots=True)
class Weighted(Addends):
    """Contributions of several members, encoded."""

    payloads: Sequence[memoryview]
    members: Sequence[int] | None = None
    """Number of members that each payload stands for; ``None``: one each."""
    again: bool = False
    """The result is a contribution itself, which other reducers merge."""


class Numbers(Protocol):
    """The arithmetic of one kind of round."""

    @property
    def up(self) -> Leg: ...

    @property
    def down(self) -> Leg: ...

    def encode(self, chunk: Chunk, given: Moved, out: memoryview, scratch: Scratch) -> None:
        """Encode a contribution. Raises ``NotFinite``; its unit is counted in the chunk."""
        ...

    def leave_rest(self, chunk: Chunk, given: Moved, data: memoryview, scratch: Scratch) -> None:
        """Change the values into those that the encoded contribution stands for."""
        ...

    def merge(
        self,
        chunk: Chunk,
        given: Weighted,
        out: memoryview,
        scratch: Scratch,
        *,
        rest: Float32s | None = None,
    ) -> None:
        """Merge the members' bytes into ``out``.

        ``rest``, a vector of the chunk's size, is set to the part of the merged displacement that
        encoding it loses.
        """
        ...

    def step(self, chunk: Chunk, data: memoryview, made: Step, scratch: Scratch) -> None:
        """Take the outer step on the chunk's part of the vectors."""
        ...


class MergeNumbers:
    """Arithmetic of a merge: the displacement ``base - values`` of each member.

    ``codec_down``: of merged slices, if that is another one.
    """

    def __init__(
        self, *, codec: str, codec_down: str | None = None, merge: str, eta: float, mu: float
    ) -> None:
        self.up = Displacements(codec_named(codec))
        self.down = Displacements(codec_named(codec_down or codec))
        self._rule = rule_named(merge)
        self._optimizer = Nesterov(eta, mu)

    def encode(self, chunk: Chunk, given: Moved, out: memoryview, scratch: Scratch) -> None:
        codec, start, end = self.up.codec, given.base[chunk.values], given.shortened(chunk.values)
        if given.feedback and given.share == 1.0 and isinstance(codec, LeavesRest):
            codec.encode_leaving_rest(start, end, chunk.sizes, out)
            return
        codec.encode_difference(start, end, chunk.sizes, out, scratch)
        if given.feedback:
            self.leave_rest(chunk, given, out, scratch)

    def leave_rest(self, chunk: Chunk, given: Moved, data: memoryview, scratch: Scratch) -> None:
        self.up.subtract(chunk, data, given.base, given.values, scratch)
        given.lengthen(chunk.values)

    def merge(
        self,
        chunk: Chunk,
        given: Weighted,
        out: memoryview,
        scratch: Scratch,
        *,
        rest: Float32s | None = None,
    ) -> None:
        units, into = Units(chunk.sizes, chunk.kinds), self.up if given.again else self.down
        codec = self.up.codec
        merge_encoded(self._rule, codec, given, units, out, scratch, into=into.codec, rest=rest)

    def step(self, chunk: Chunk, data: memoryview, made: Step, scratch: Scratch) -> None:
        part, codec = made.of(chunk.values), self.down.codec
        step_encoded(part, codec, data, chunk.sizes, self._optimizer, scratch)


class MeldNumbers:
    """Arithmetic of a meld: displacement, theta and momentum of each member.

    ``codec`` names three codecs, such as ``int4/f32/f16``; ``codec_down`` is that of the merged
    displacement, if it is another one. ``carry`` must be called before ``encode``. Taking the outer
    step first and averaging afterwards equals averaging everything and taking one step, for merge
    rules that are means (``test_mixing.py`` checks it), so all members leave with the same bits.
    """

    def __init__(
        self, *, codec: str, codec_down: str | None = None, merge: str, eta: float, mu: float
    ) -> None:
        names = codec.split("/")
        if len(names) != 3:
            raise ValueError(f"codec is {codec!r}; a meld has three, such as 'int4/f32/f16'")
        moved, *states = map(codec_named, names)
        merged = codec_named(codec_down or names[0])
        self._displacement, self._merged = moved, merged
        self.up = Columns(moved, *states)
        self.down = Columns(merged, *states)
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

    def encode(self, chunk: Chunk, given: Moved, out: memoryview, scratch: Scratch) -> None:
        assert self._own is not None, "carry() comes before encode()"
        theta, momentum = self._own
        self.up.encode(chunk, {1: theta, 2: momentum}, out, scratch)
        for index, (part, (moved, _, _)) in enumerate(self.up.units(chunk, out)):
            size = (part.stop - part.start,)
            try:
                start, end = given.base[part], given.shortened(part)
                self._displacement.encode_difference(start, end, size, moved, scratch)
            except NotFinite:
                raise NotFinite(index) from None
        if given.feedback:
            self.leave_rest(chunk, given, out, scratch)

    def leave_rest(self, chunk: Chunk, given: Moved, data: memoryview, scratch: Scratch) -> None:
        self.up.subtract(chunk, data, given.base, given.values, scratch)
        given.lengthen(chunk.values)

    def merge(
        self,
        chunk: Chunk,
        given: Weighted,
        out: memoryview,
        scratch: Scratch,
        *,
        rest: Float32s | None = None,
    ) -> None:
        equal = rule_named("mean"), shares_by_heads(given.payloads, given.members)
        ways = (self._rule, given.weights), equal, equal
        into = self.up if given.again else self.down
        self.up.merge(chunk, given.payloads, ways, out, scratch, into=into, rest=rest)

    def step(self, chunk: Chunk, data: memoryview, made: Step, scratch: Scratch) -> None:
        self.down.decode(chunk, data, {1: made.theta, 2: made.momentum}, scratch)
        for part in _values_of(chunk):
            self.norm += squared_norm(made.theta[part])
            self._distance += squared_norm(made.before[part] - made.theta[part])
        for part, (moved, _, _) in self.down.units(chunk, data):
            size = (part.stop - part.start,)
            stepped = Step(made.theta, made.theta, made.momentum).of(part)
            step_encoded(stepped, self._merged, moved, size, self._optimizer, scratch)


def _values_of(chunk: Chunk) -> Iterator[slice]:
    """Yield the range of the values of each unit."""
    ends = accumulate(chunk.sizes, initial=chunk.values.start)
    return (slice(start, end) for start, end in pairwise(ends))


def encoded_size(codec: str, sizes: Sequence[int]) -> int:
    """Return the bytes of a contribution in the codec that a commit names; a meld's names three."""
    return sum(codec_named(name).encoded_size(sizes) for name in codec.split("/"))


def cutting_of(commit: Commit, fragment: Fragment, numbers: Numbers) -> Cutting:
    """Return how a round cuts its fragment into slices, chunks and pieces."""
    return Cutting(fragment, numbers, commit.shares)


def numbers_of(commit: Commit) -> Numbers:
    """Return a commit's arithmetic. Raises ``ValueError`` for an unknown codec or rule."""
    kind = MeldNumbers if commit.melds else MergeNumbers
    return kind(
        codec=commit.codec,
        codec_down=commit.codec_down,
        merge=commit.merge,
        eta=commit.eta,
        mu=commit.mu,
    )

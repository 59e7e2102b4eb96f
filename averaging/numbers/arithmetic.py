"""The arithmetic of a round, chunk by chunk: encode, check, merge, step.

Members exchange displacements in the codecs of their commit, one for each way. Where they stand on
several states, their theta and momentum travel besides, and the outer step is taken on the means.

The bytes do not depend on how units are grouped into chunks. Every function here is work for a
thread, not for an event loop.

Norms are compared by upper bounds that are read from a payload's scales, without decoding its codes
(``squares_at_most``): with each other, and with what earlier merges moved
(``averaging.rules.usual_norms``). So judging an upload costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from averaging.errors import NotFinite
from averaging.messages import Commit
from averaging.numbers.arrays import Float32s, Float64s, arithmetic, squared_norm
from averaging.numbers.chunks import Chunk, Cutting
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Fragment
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov, Step, keeps_momentum, step_encoded
from averaging.numbers.tiles import peaks_of, plan_of, row_starts, view_of


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
    carried: tuple[Float32s, ...] = field(default=(), kw_only=True)
    """The vectors of the own state, where states travel."""

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

    @property
    def is_alone(self) -> bool:
        """True if nobody else's work is merged with this one's, so it is not encoded again."""
        return self.again and len(self.payloads) == 1

    def shares_by_heads(self) -> list[float]:
        """Return weights by which each member counts the same."""
        counts = self.members or [1] * len(self.payloads)
        return [count / sum(counts) for count in counts]


class Numbers:
    """The arithmetic of one round.

    ``codec``: of contributions, one name, or where states travel one for each vector, such as
    ``int4/f32/f16``, for displacement, theta and momentum. ``codec_down``: of the merged
    displacement, if it is another one. Taking the outer step first and averaging states afterwards
    equals averaging everything and taking one step, for merge rules that are means
    (``test_mixing.py`` checks it), so all members leave with the same bits.
    """

    def __init__(
        self, *, codec: str, codec_down: str | None = None, merge: str, eta: float, mu: float
    ) -> None:
        moved, *states = map(codec_named, codec.split("/"))
        if len(states) not in (0, 1 + keeps_momentum(mu)):
            count = 2 + keeps_momentum(mu)
            raise ValueError(f"codec is {codec!r}; where states travel it has {count} names")
        self.up = Columns(moved, *states)
        self.down = Columns(codec_named(codec_down) if codec_down else moved, *states)
        self._states = states
        self._rule = rule_named(merge)
        self._optimizer = Nesterov(eta, mu)
        self._distance = 0.0
        self.norm = 0.0
        """Squared norm of the mean theta, where states travel."""

    @property
    def dispersion(self) -> float:
        """Distance of this peer's theta from the mean, relative. Valid after all steps."""
        return math.sqrt(self._distance / self.norm) if self.norm > 0 else 0.0

    def encode(self, chunk: Chunk, given: Moved, out: memoryview, scratch: Scratch) -> None:
        """Encode a contribution. Raises ``NotFinite``; its unit is counted in the chunk."""
        codec, in_one_pass = self.up.codecs[0], given.feedback and given.share == 1.0
        for group in self.up.groups(chunk, out):
            moved, *states = group.columns
            start, end = given.base[group.values], given.shortened(group.values)
            try:
                for state, vector, target in zip(self._states, given.carried, states, strict=True):
                    state.encode(vector[group.values], group.sizes, target, scratch)
                codec.encode(end, group.sizes, moved, scratch, base=start, leaves_rest=in_one_pass)
            except NotFinite as error:
                raise NotFinite(group.first + error.unit) from None
        if given.feedback and not in_one_pass:
            self.leave_rest(chunk, given, out, scratch)

    def leave_rest(self, chunk: Chunk, given: Moved, data: memoryview, scratch: Scratch) -> None:
        """Change the values into those that the encoded contribution stands for."""
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
        """Merge the members' bytes into ``out``.

        ``rest``, a vector of the chunk's size, is set to the part of the merged displacement that
        encoding it loses; what ``is_alone`` loses nothing.
        """
        if given.is_alone:
            out[:] = given.payloads[0]
            return
        into, begin = self.up if given.again else self.down, chunk.values.start
        equal = rule_named("mean"), given.shares_by_heads()
        ways = [(self._rule, given.weights), *[equal for _ in self._states]]
        uploads = [list(self.up.groups(chunk, payload)) for payload in given.payloads]
        together = zip(into.groups(chunk, out), zip(*uploads, strict=True), strict=True)
        for group, parts in together:
            kinds = chunk.kinds[group.first : group.first + len(group.sizes)]
            units = Units(group.sizes, kinds)
            for column, (rule, weights) in enumerate(ways):
                addends = Addends([part.columns[column] for part in parts], weights)
                lost = None
                if rest is not None and column == 0:
                    lost = rest[group.values.start - begin : group.values.stop - begin]
                codec, to = self.up.codecs[column], into.codecs[column]
                target = group.columns[column]
                merge_encoded(rule, codec, addends, units, target, scratch, into=to, rest=lost)

    def step(self, chunk: Chunk, data: memoryview, made: Step, scratch: Scratch) -> None:
        """Take the outer step on the chunk's part of the vectors."""
        for group in self.down.groups(chunk, data):
            part, (moved, *states) = made.of(group.values), group.columns
            if states:
                vectors = part[1 : 1 + len(self._states)]
                for codec, column, vector in zip(self._states, states, vectors, strict=True):
                    codec.decode(column, group.sizes, vector, scratch)
                self.norm += squared_norm(part.theta)
                self._distance += squared_norm(part.before - part.theta)
                part = Step(part.theta, part.theta, part.momentum)
            step_encoded(part, self.down.codecs[0], moved, group.sizes, self._optimizer, scratch)


def encoded_size(codec: str, sizes: Sequence[int]) -> int:
    """Return the bytes of a contribution in the codec that a commit names, a meld's in several."""
    return sum(codec_named(name).encoded_size(sizes) for name in codec.split("/"))


def cutting_of(commit: Commit, fragment: Fragment, numbers: Numbers) -> Cutting:
    """Return how a round cuts its fragment into slices, chunks and pieces."""
    return Cutting(fragment, numbers.up, numbers.down, commit.shares)


def numbers_of(commit: Commit) -> Numbers:
    """Return a commit's arithmetic. Raises ``ValueError`` for an unknown codec or rule."""
    if commit.melds != ("/" in commit.codec):
        raise ValueError(f"codec is {commit.codec!r}; one of several names is where states travel")
    return Numbers(
        codec=commit.codec,
        codec_down=commit.codec_down,
        merge=commit.merge,
        eta=commit.eta,
        mu=commit.mu,
    )


# Payloads of several columns


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
            part = group.values
            self.codecs[0].decode_subtract(
                group.columns[0], group.sizes, base[part], out[part], scratch
            )


# Bounds on norms


def squares_at_most(codec: Codec, data: memoryview, sizes: Sequence[int]) -> Float64s:
    """Return for each unit an upper bound on its sum of squares, about ten times the sum itself.

    Only scales are read, as if every value of a block were as large as the scale allows. Raw fp32
    has no scales; there the largest value of each block is used.
    """
    octets = np.frombuffer(data, np.uint8)
    squares = np.zeros(len(sizes))
    for tile in plan_of(codec, tuple(sizes)).tiles:
        peaks, codes = view_of(codec, octets, tile)
        if not codec.scale_bytes:
            peaks = peaks_of(codes.reshape(-1).view("<f4"), row_starts(tile.rows, tile.columns))
        most = np.square(codec.peak_of_scale * peaks.astype(np.float64)) * tile.columns
        squares[tile.units] += most if tile.record else np.add.reduce(most)
    return squares


def norm_at_most(values: Float32s, sizes: Sequence[int]) -> float:
    """Return ``squares_at_most`` as a norm, for values that have not been encoded."""
    data = values.data.cast("B")
    return math.sqrt(float(squares_at_most(codec_named("f32"), data, sizes).sum()))

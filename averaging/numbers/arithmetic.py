"""The arithmetic of a round, chunk by chunk: what is encoded, how it is merged, what a step does.

A ``merge`` moves displacements in the codec of its commit; a ``mix`` moves theta in f32 and
momentum in f16, and takes the weighted mean of both; a ``meld`` moves all three, and steps on the
means. Chunks are ranges of units; the bytes do not
depend on how units are grouped into chunks. Every function here is work for a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from averaging.errors import NotFinite
from averaging.messages import Commit
from averaging.numbers.arrays import Float32s, Float64s, squared_norm
from averaging.numbers.codec import BLOCK, Codec, Scratch, codec_named
from averaging.numbers.layout import Fragment, Kind
from averaging.numbers.merge import MergeRule, merge_encoded, rule_named
from averaging.numbers.outer import step_encoded
from averaging.numbers.slices import Slice

CHUNK_VALUES = 1 << 20
"""Values worked on between two looks at the clock: a millisecond or so, 4 MB."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few units of a fragment: where their values and their encoded bytes are."""

    first_unit: int
    end_unit: int
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    values: slice
    data: slice


class Numbers(Protocol):
    """What one kind of round does with numbers."""

    def encoded_size(self, sizes: Sequence[int]) -> int: ...

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        """Encode what a member gives. Raises ``NotFinite`` (its unit counts in the chunk)."""
        ...

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        """Raise ``BadPayload`` unless the bytes decode to finite values."""
        ...

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        """A bound on each unit's sum of squares of the displacement in checked bytes.

        To compare contributions with each other and with what merges moved: a cheap one, that reads
        the scales of a block-wise codec and not its codes.
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
        """``members``: for how many each payload stands; ``None``: each for one."""
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
        """Fill the chunk's part of ``theta`` from ``before``; ``momentum`` is moved in place."""
        ...


class MergeNumbers:
    """Displacements: base - values."""

    def __init__(self, *, codec: str, merge: str, eta: float, mu: float) -> None:
        self._codec = codec_named(codec)
        self._rule = rule_named(merge)
        self._eta = eta
        self._mu = mu

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
            eta=self._eta,
            mu=self._mu,
            scratch=scratch,
            into=theta[part],
        )


class Columns:
    """Several codecs side by side: for each unit its bytes in one after the other."""

    def __init__(self, *codecs: Codec) -> None:
        self._codecs = codecs

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return sum(codec.encoded_size(sizes) for codec in self._codecs)

    def units(self, chunk: Chunk, data: memoryview) -> list[tuple[slice, list[memoryview]]]:
        """For each unit of the chunk where its values are, and its bytes in each column."""
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

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        for size, (_, parts) in zip(chunk.sizes, self.units(chunk, data), strict=True):
            for codec, part in zip(self._codecs, parts, strict=True):
                codec.check(part, (size,), scratch)

    def squares_of_first(self, chunk: Chunk, data: memoryview) -> Float64s:
        """``squares_at_most`` of the first column's units."""
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
    ) -> None:
        """``ways``: for each column by which rule and with which weights."""
        given = [self.units(chunk, payload) for payload in payloads]
        for index, (_, targets) in enumerate(self.units(chunk, out)):
            sizes, kinds = (chunk.sizes[index],), (chunk.kinds[index],)
            for column, (codec, (rule, weights)) in enumerate(zip(self._codecs, ways, strict=True)):
                parts = [units[index][1][column] for units in given]
                merge_encoded(rule, codec, parts, weights, sizes, kinds, targets[column], scratch)


def shares_by_heads(payloads: Sequence[memoryview], members: Sequence[int] | None) -> list[float]:
    """Each member counts the same. ``members``: how many are in each payload; one if not set."""
    counts = members or [1] * len(payloads)
    return [count / sum(counts) for count in counts]


class MixNumbers:
    """States: theta in f32, then momentum in f16.

    For ``encode``, ``base`` is the momentum and ``values`` are theta.
    """

    def __init__(self) -> None:
        self._theta = codec_named("f32")
        self._momentum = codec_named("f16")
        self._columns = Columns(self._theta, self._momentum)

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._columns.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        for index, (part, (theta, momentum)) in enumerate(self._columns.units(chunk, out)):
            size = (part.stop - part.start,)
            try:
                self._theta.encode(values[part], size, theta, scratch)
                self._momentum.encode(base[part], size, momentum, scratch)
            except NotFinite:
                raise NotFinite(index) from None

    def check(self, chunk: Chunk, data: memoryview, scratch: Scratch) -> None:
        self._columns.check(chunk, data, scratch)

    def squares(self, chunk: Chunk, data: memoryview) -> Float64s:
        return np.zeros(len(chunk.sizes))  # no displacement travels

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
        for part, (theta_data, momentum_data) in self._columns.units(chunk, data):
            size = (part.stop - part.start,)
            self._theta.decode(theta_data, size, theta[part], scratch)
            self._momentum.decode(momentum_data, size, momentum[part], scratch)


class MeldNumbers:
    """Displacement, theta and momentum of each member.

    ``codec`` names three codecs, such as ``int4/f32/f16``. For ``encode``, ``base`` and ``values``
    are as in a merge; ``carry`` comes before it. The identity that this rests on: stepping first
    and averaging then is the same as averaging everything and taking one step (REFERENCE 2.1), for
    merge rules that are means.
    """

    def __init__(self, *, codec: str, merge: str, eta: float, mu: float) -> None:
        names = codec.split("/")
        if len(names) != 3:
            raise ValueError(f"codec is {codec!r}; a meld has three, such as 'int4/f32/f16'")
        self._displacement, self._theta, self._momentum = map(codec_named, names)
        self._columns = Columns(self._displacement, self._theta, self._momentum)
        self._rule = rule_named(merge)
        self._eta = eta
        self._mu = mu
        self._own: tuple[Float32s, Float32s] | None = None
        self._distance = 0.0
        self.norm = 0.0
        """Of the mean, squared."""

    @property
    def dispersion(self) -> float:
        """After all steps: how far this peer's theta was from the mean, over the mean's norm."""
        return math.sqrt(self._distance / self.norm) if self.norm > 0 else 0.0

    def carry(self, theta: Float32s, momentum: Float32s) -> None:
        """What this peer brings along to be averaged."""
        self._own = theta, momentum

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return self._columns.encoded_size(sizes)

    def encode(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        self.encode_own(chunk, out, scratch)
        self.encode_moved(chunk, base, values, out, scratch)

    # What a member gives, one thing at a time: its own state is the same at all who stand there

    def encode_own(self, chunk: Chunk, out: memoryview, scratch: Scratch) -> None:
        """Theta and momentum."""
        assert self._own is not None, "carry() comes before encode()"
        own_theta, own_momentum = self._own
        for index, (part, (_, theta, momentum)) in enumerate(self._columns.units(chunk, out)):
            size = (part.stop - part.start,)
            try:
                self._theta.encode(own_theta[part], size, theta, scratch)
                self._momentum.encode(own_momentum[part], size, momentum, scratch)
            except NotFinite:
                raise NotFinite(index) from None

    def encode_moved(
        self, chunk: Chunk, base: Float32s, values: Float32s, out: memoryview, scratch: Scratch
    ) -> None:
        """The displacement."""
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

    # A step, one thing at a time: all but the last measuring is the same at all members

    def decode(
        self,
        chunk: Chunk,
        data: memoryview,
        theta: Float32s,
        momentum: Float32s,
        scratch: Scratch,
    ) -> None:
        """The means of both."""
        for part, (_, theta_data, momentum_data) in self._columns.units(chunk, data):
            size = (part.stop - part.start,)
            self._theta.decode(theta_data, size, theta[part], scratch)
            self._momentum.decode(momentum_data, size, momentum[part], scratch)

    def measure_mean(self, chunk: Chunk, mean: Float32s) -> None:
        for part in _values_of(chunk):
            self.norm += squared_norm(mean[part])

    def measure(self, chunk: Chunk, before: Float32s, mean: Float32s) -> None:
        """How far theta was from the mean."""
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
        for part, (moved, _, _) in self._columns.units(chunk, data):
            size = (part.stop - part.start,)
            step_encoded(
                theta[part],
                momentum[part],
                self._displacement,
                moved,
                size,
                eta=self._eta,
                mu=self._mu,
                scratch=scratch,
            )


def _values_of(chunk: Chunk) -> Iterator[slice]:
    """Where the values of each unit are."""
    ends = accumulate(chunk.sizes, initial=chunk.values.start)
    return (slice(start, end) for start, end in pairwise(ends))


def encoded_size(codec: str, sizes: Sequence[int]) -> int:
    """Of a contribution under the codec that a commit names: a meld's names three."""
    return sum(codec_named(name).encoded_size(sizes) for name in codec.split("/"))


def squares_at_most(codec: Codec, data: memoryview, sizes: Sequence[int]) -> Float64s:
    """For each unit at least the sum of squares of what ``data`` decodes to, ten times it or so.

    From the scales alone, as if all of a block were as large as its largest may be: every unit
    begins with a scale for each of its blocks. Raw fp32 has none; there the largest itself is read.
    """
    octets = np.frombuffer(data, np.uint8)
    blocks = _blocks(codec.name, tuple(sizes))
    if not blocks.counts.size:
        return np.zeros(len(sizes))
    if codec.name == "f32":
        values = octets.view("<f4")
        highest = np.maximum.reduceat(values, blocks.starts)
        peaks = np.maximum(highest, -np.minimum.reduceat(values, blocks.starts))
    else:
        peaks = octets[blocks.scales_at].reshape(-1).view("<f4")
    squares = np.square(codec.peak_of_scale * peaks.astype(np.float64)) * blocks.counts
    return np.bincount(blocks.units, squares, minlength=len(sizes)).astype(np.float64)


def norm_at_most(values: Float32s, sizes: Sequence[int]) -> float:
    """How long values would be by ``squares_at_most``, to compare with what was encoded."""
    data = values.data.cast("B")
    return math.sqrt(float(squares_at_most(codec_named("f32"), data, sizes).sum()))


class _Blocks(NamedTuple):
    """The blocks of a range of units, one after the other."""

    starts: NDArray[np.intp]
    """Where the values of each begin ..."""
    scales_at: NDArray[np.intp] | slice
    """... and the bytes of its scale, where there are scales; those of one unit are one range."""
    counts: NDArray[np.intp]
    units: NDArray[np.intp]


@lru_cache(maxsize=256)
def _blocks(name: str, sizes: tuple[int, ...]) -> _Blocks:
    codec = codec_named(name)
    starts, scales_at, counts, units = [], [], [], []
    value = at = 0
    for unit, size in enumerate(sizes):
        for number, start in enumerate(range(0, size, BLOCK)):
            starts.append(value + start)
            scales_at.append(at + 4 * number)
            counts.append(min(BLOCK, size - start))
            units.append(unit)
        value += size
        at += codec.encoded_size((size,))
    where: NDArray[np.intp] | slice = np.array(scales_at, np.intp)[:, None] + np.arange(4)
    if len(set(units)) == 1:
        where = slice(scales_at[0], scales_at[-1] + 4)
    return _Blocks(
        np.array(starts, np.intp), where, np.array(counts, np.intp), np.array(units, np.intp)
    )


def numbers_of(commit: Commit) -> Numbers:
    """The arithmetic that a commit asks for. Raises ``ValueError`` for what is not known here."""
    if commit.kind == "mix":
        return MixNumbers()
    if commit.kind == "meld":
        return MeldNumbers(codec=commit.codec, merge=commit.merge, eta=commit.eta, mu=commit.mu)
    return MergeNumbers(codec=commit.codec, merge=commit.merge, eta=commit.eta, mu=commit.mu)


class Cutting:
    """Where each slice and each chunk of a fragment lies in its payload."""

    def __init__(self, fragment: Fragment, numbers: Numbers, shares: Sequence[int]) -> None:
        self.fragment = fragment
        self.slices: tuple[Slice, ...] = fragment.slices(shares)
        self._ends = list(
            accumulate((numbers.encoded_size((size,)) for size in fragment.unit_sizes), initial=0)
        )
        self.data_size = self._ends[-1]
        self._starts = list(accumulate(fragment.unit_sizes, initial=0))
        self.chunks: tuple[tuple[Chunk, ...], ...] = tuple(
            tuple(self._chunks(piece.first_unit, piece.end_unit)) for piece in self.slices
        )

        self.all_chunks = [chunk for chunks in self.chunks for chunk in chunks]
        """Of all slices, in their order."""

    def data_of(self, index: int) -> slice:
        """The bytes of slice ``index`` in the payload."""
        piece = self.slices[index]
        return slice(self._ends[piece.first_unit], self._ends[piece.end_unit])

    def _chunks(self, first: int, end: int) -> list[Chunk]:
        made = []
        while first < end:
            last = first + 1
            count = self.fragment.unit_sizes[first]
            while last < end and count + self.fragment.unit_sizes[last] <= CHUNK_VALUES:
                count += self.fragment.unit_sizes[last]
                last += 1
            made.append(
                Chunk(
                    first,
                    last,
                    self.fragment.unit_sizes[first:last],
                    self.fragment.kinds[first:last],
                    slice(self._starts[first], self._starts[last]),
                    slice(self._ends[first], self._ends[last]),
                )
            )
            first = last
        return made

    def tensor_at(self, unit: int) -> str:
        return self.fragment.units[unit].tensor


def room(size: int) -> memoryview:
    """Uninitialised bytes. A bytearray would be zeroed first: that touches every page twice."""
    return np.empty(size, np.uint8).data

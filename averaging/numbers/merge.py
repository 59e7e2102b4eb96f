"""Merge rules: how a reducer makes one displacement of many.

A merge is a pure function of the encoded contributions, their order and their weights, so a
successor of a dead reducer computes the same bytes. A weighted mean goes tile by tile through the
processor's cache. Other rules go unit by unit, so beside the encoded contributions they hold one
unit in fp32 (4 MB at most), CenteredClip four; and small units of all contributors (another 4 MB),
which are decoded once.

A rule is a class with ``merge``, which fills in one unit; ``register`` gives it a name that run
files can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from averaging.errors import NotFinite
from averaging.numbers.arrays import (
    SUM_TILE,
    Buffer,
    Float32Rows,
    Float32s,
    Float64s,
    arithmetic,
    norms,
)
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.layout import Kind
from averaging.numbers.tiles import BLOCK

NORM_MIN = 2.0**-100
"""A vector shorter than this has no direction."""

DIRECTION_MIN = 1e-6
"""A mean of unit vectors shorter than this has no direction."""


BATCH_VALUES = 1 << 18
"""Values in a batch of small units that are only added."""

MANY_VALUES = 1 << 16
"""Values in a batch of small units of one size that a rule merges together."""

KEPT_VALUES = 1 << 20
"""Values of all contributions to a batch that are decoded once: a rule may need them seven times.
"""

TOGETHER_VALUES = 1 << 17
"""Values of several contributions that are worked on together, in the cache."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """One unit, as each contributor sent it, in the order of the roster.

    A rule that is a ``MergesMany`` may get several small units of one size and kind. For those it
    uses ``norms`` and ``lengths``, and gives ``sum`` weights with an entry per unit.
    """

    kind: Kind
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    codec: Codec
    payloads: tuple[memoryview, ...]
    scratch: Scratch
    _decoded: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.sizes)

    def rows(self, vector: Float32s) -> Float32Rows:
        """Return a vector of all units, or several of them, as a matrix with one row per unit."""
        matrix: Float32Rows = vector.reshape(-1, self.sizes[0])
        return matrix

    def decode(self, index: int, out: Float32s) -> None:
        self.codec.decode(self.payloads[index], self.sizes, out, self.scratch)

    def values(self) -> Iterator[tuple[slice, Float32Rows]]:
        """Yield the values of contributions, a few at a time, and which they are.

        Nobody changes them, and they are valid until the next ones are requested.
        """
        together = max(1, TOGETHER_VALUES // self.size)
        keeps = len(self) * self.size <= KEPT_VALUES
        held = self.matrix(_VALUES, len(self) if keeps else together)
        for first in range(0, len(self), together):
            part = slice(first, min(first + together, len(self)))
            some = held[part] if keeps else held[: part.stop - first]
            if not (keeps and first in self._decoded):
                for index, vector in enumerate(some, first):
                    self.decode(index, vector)
                self._decoded.add(first)
            yield part, some

    def matrix(self, index: int, rows: int) -> Float32Rows:
        """Return work memory for so many vectors of all units."""
        made: Float32Rows = self.scratch.vector(index, rows * self.size).reshape(rows, -1)
        return made

    def norms(self) -> Float64s:
        """Return the Euclidean norms: a row for each contributor, a column for each unit."""
        return np.concatenate([self.lengths(values) for _, values in self.values()])

    def lengths(self, vectors: Float32Rows) -> Float64s:
        """Return the Euclidean norms of the units in vectors: a row for each vector."""
        found: Float64s = norms(self.rows(vectors), self.scratch.sums).reshape(-1, self.count)
        return found

    def sum(self, weights: Sequence[float] | Float64s, accumulator: Float32s) -> None:
        """Set the accumulator to the weighted sum, added in order from zero."""
        accumulator.fill(0)
        for payload, weight in zip(self.payloads, weights, strict=True):
            self.codec.decode_add(payload, self.sizes, weight, accumulator, self.scratch)

    def spare(self) -> Float32s:
        """Return a work vector for all units, other than the accumulator."""
        return self.scratch.vector(_SPARE, self.size)


_MERGED, _SPARE, _VALUES, _AWAY = range(1, 5)
"""Vectors of a thread's scratch memory."""


class MergeRule(Protocol):
    """A rule by which a unit is merged."""

    @property
    def name(self) -> str: ...

    def only_adds(self, kind: Kind) -> bool:
        """Return whether units of this kind get the weighted sum, value by value.

        If so, ``merge`` is not called: the sum is made tile by tile and for many units together.
        """
        ...

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        """Fill ``accumulator`` with the unit's merged displacement."""
        ...


class MergesMany:
    """Base of a rule whose ``merge`` takes several small units of one size and kind at once."""


_rules: dict[str, MergeRule] = {}


def register(rule: MergeRule) -> None:
    """Add a rule to the table. Raises ``ValueError`` if its name is taken."""
    if rule.name in _rules:
        raise ValueError(f"a merge rule is named {rule.name!r} already")
    _rules[rule.name] = rule


def rule_named(name: str) -> MergeRule:
    try:
        return _rules[name]
    except KeyError:
        raise ValueError(f"no merge rule is named {name!r}; there are {rule_names()}") from None


def rule_names() -> tuple[str, ...]:
    return tuple(_rules)


class Units(NamedTuple):
    """A range of units, in order."""

    sizes: Sequence[int]
    kinds: Sequence[Kind]


def merge_encoded(
    rule: MergeRule,
    codec: Codec,
    given: Addends,
    units: Units,
    out: Buffer,
    scratch: Scratch,
    *,
    into: Codec | None = None,
    rest: Float32s | None = None,
) -> None:
    """Merge a range of units into ``out``, encoded with the codec ``into`` (``None``: the same).

    ``rest`` is set to what encoding loses: the merged values less those that ``out`` decodes to.
    The payloads have been checked. The range may be divided among threads, each with its part of
    the payloads and of ``out``, and the rest may be asked for or not: the bytes are the same.
    Raises ``NotFinite`` only if absurdly large contributions add up to infinity.
    """
    payloads, weights = given.payloads, given.weights
    if not payloads or len(payloads) != len(weights):
        raise ValueError(f"{len(weights)} weights for {len(payloads)} contributions")
    sizes, kinds = units
    views = [memoryview(payload).cast("B") for payload in payloads]
    target = memoryview(out).cast("B")
    coder = into or codec
    at = start = values = 0
    for first, last in _batches(rule, sizes, kinds):
        batch = tuple(sizes[first:last])
        end, stop = at + codec.encoded_size(batch), start + coder.encoded_size(batch)
        encoded = tuple(view[at:end] for view in views)
        try:
            left = None if rest is None else rest[values : values + sum(batch)]
            if rule.only_adds(kinds[first]):
                added = Addends(encoded, weights)
                coder.encode_sum(codec, added, batch, target[start:stop], scratch, rest=left)
            else:
                unit = Contributions(kinds[first], batch, tuple(weights), codec, encoded, scratch)
                merged = scratch.vector(_MERGED, unit.size) if left is None else left
                with arithmetic():
                    rule.merge(unit, merged)
                coder.encode(merged, batch, target[start:stop], scratch)
                if left is not None:
                    coder.decode_subtract(target[start:stop], batch, left, left, scratch)
        except NotFinite as error:
            raise NotFinite(first + error.unit) from None
        at, start, values = end, stop, values + sum(batch)


def _batches(
    rule: MergeRule, sizes: Sequence[int], kinds: Sequence[Kind]
) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(sizes):
        size, kind = sizes[first], kinds[first]
        count, last = size, first + 1
        if rule.only_adds(kind):
            while (
                last < len(sizes)
                and count + sizes[last] <= BATCH_VALUES
                and rule.only_adds(kinds[last])
            ):
                count += sizes[last]
                last += 1
        elif isinstance(rule, MergesMany) and _is_small(size):
            while (
                last < len(sizes)
                and count + size <= MANY_VALUES
                and (sizes[last], kinds[last]) == (size, kind)
            ):
                count += size
                last += 1
        yield first, last
        first = last


def _is_small(size: int) -> bool:
    """Return whether one tile holds a unit: norms of many such units are taken at once."""
    return size <= BLOCK or (size <= SUM_TILE and size % BLOCK == 0)


def medians(values: Float64s) -> Float64s:
    """Return the median of each column; of an even number of rows, the mean of the middle two."""
    ordered = np.sort(values, axis=0)
    middle = len(ordered) // 2
    middles: Float64s = ordered[middle]
    if not len(ordered) % 2:
        middles = (ordered[middle - 1] + middles) * 0.5
    return middles


# Rules


class WeightedMean:
    """sum(w v), the default."""

    name = "mean"

    def only_adds(self, kind: Kind) -> bool:
        return True

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        unit.sum(unit.weights, accumulator)


class RadialDirectional(MergesMany):
    """The mean length in the mean direction (RDA; arXiv 2604.21428), for matrices only.

    In a plain mean nearly orthogonal displacements shrink by 1/sqrt(n); here they do not.
    Embeddings, head and vectors get the plain mean, and so does a matrix whose mean has no
    direction.
    """

    name = "rda"

    def only_adds(self, kind: Kind) -> bool:
        return kind != "matrix"

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        norms = unit.norms()
        shares = np.array(unit.weights)[:, None]
        unit.sum(_quotient(shares, norms, norms >= NORM_MIN, 0.0), accumulator)
        (lengths,) = unit.lengths(accumulator)
        targets = np.zeros(unit.count)
        for weighted in shares * norms:
            targets += weighted
        has_direction = lengths >= DIRECTION_MIN
        rows = unit.rows(accumulator)
        factors = _quotient(targets, lengths, has_direction, 1.0).astype(np.float32)
        np.multiply(rows, factors[:, None], out=rows)
        if not has_direction.all():
            plain = unit.spare()
            unit.sum(unit.weights, plain)
            rows[~has_direction] = unit.rows(plain)[~has_direction]


class CenteredClip(MergesMany):
    """v <- v + sum(w (x - v) min(1, c / ||x - v||)), three times (arXiv 2106.11257).

    It starts at the mean of contributions, each clipped to the median of their norms; c is the
    median distance from v. One peer moves the result by at most its weight times c in each
    iteration.
    """

    name = "centered_clip"
    iterations = 3

    def only_adds(self, kind: Kind) -> bool:
        return False

    def merge(self, unit: Contributions, accumulator: Float32s) -> None:
        shares = np.array(unit.weights)[:, None]
        norms = unit.norms()
        unit.sum(shares * _clips(norms), accumulator)
        move = unit.spare()
        for _ in range(self.iterations):
            distances = [unit.lengths(away) for _, away in self._from_center(unit, accumulator)]
            pulls = (shares * _clips(np.concatenate(distances))).astype(np.float32)
            move.fill(0)
            for part, away in self._from_center(unit, accumulator):
                rows = unit.rows(away)
                np.multiply(rows, pulls[part].reshape(-1, 1), out=rows)
                for vector in away:
                    np.add(move, vector, out=move)
            np.add(accumulator, move, out=accumulator)

    @staticmethod
    def _from_center(unit: Contributions, center: Float32s) -> Iterator[tuple[slice, Float32Rows]]:
        for part, values in unit.values():
            away = unit.matrix(_AWAY, len(values))
            np.subtract(values, center, out=away)
            yield part, away


def _clips(lengths: Float64s) -> Float64s:
    """Return the factors by which lengths are clipped to the median of their column."""
    limits = medians(lengths)
    return _quotient(limits, lengths, lengths > limits, 1.0)


def _quotient(
    above: Float64s, below: Float64s, where: NDArray[np.bool_], otherwise: float
) -> Float64s:
    """Return above / below at the places in ``where``, and ``otherwise`` elsewhere."""
    quotients = np.full(below.shape, otherwise)
    np.divide(above, below, out=quotients, where=where)
    return quotients


for _rule in (WeightedMean(), RadialDirectional(), CenteredClip()):
    register(_rule)

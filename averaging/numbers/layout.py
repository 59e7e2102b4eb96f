"""The cutting of a model's tensors into fragments: flat fp32 vectors of nearly equal size.

A **fragment** is merged as a whole. It consists of **units**: whole tensors, or consecutive rows of
a large one. Codec blocks start anew at each unit, norms are taken over units, and slices end where
units end. Every peer computes the same layout from the same names and shapes, whatever order or
dtype it holds its tensors in; equal hashes prove it.

The partition follows Decoupled DiLoCo (arXiv 2604.21428): whole tensors go into the lightest
fragment, largest first, and a tensor larger than a fragment is split by rows. Embeddings and the
output head get fragments of their own, as in the paper, but only where they fill at least half of
one. With a vocabulary of bytes and four fragments the paper's rule made three large fragments and a
tiny one: as many rounds for a fraction of the bytes. Merge rules, norms and codecs go by the kind
of a unit, which does not depend on this.

Buffers (such as the running statistics of a BatchNorm) are in a layout only as **statistics**. They
form a last fragment of their own, because all values of a fragment share an outer optimizer and a
codec, on which peers must agree to the bit in merge, meld, replay, rewind and audit alike.
Statistics want a plain mean, because Nesterov momentum takes a variance that falls from 1 to 0.01
below zero, and f32, because the error of int4 is a fifteenth of the largest displacement in a block
(``RoundPolicy.of_statistics``). A learner takes them in by setting them
(``averaging.history.adoption``).

A **slice** is the part of a fragment that one reducer merges: consecutive units, in proportion to
shares. It ends where a unit ends, so the bytes of a payload do not depend on the cut. A reducer's
own contribution to its slice has no backup elsewhere: that would cost half as much traffic again in
a group of two, to save rounds in which only time is lost.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import blake3
import msgspec

Kind: TypeAlias = Literal["matrix", "embedding", "head", "vector", "statistic"]

UNIT_MAX_VALUES = 1 << 20
"""Most values in a unit; a larger tensor becomes several. Hashes of layouts depend on it."""

FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})

_HASH_DOMAIN = b"shoal layout 1"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An exchanged tensor. Learners may hold it in different dtypes; peers exchange fp32."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor has no name; every exchanged tensor needs one")
        if any(extent < 0 for extent in self.shape):
            raise ValueError(
                f"tensor {self.name!r} has the shape {self.shape}; extents must be 0 or more"
            )
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"tensor {self.name!r} is {self.dtype}; only {sorted(FLOAT_DTYPES)} can be averaged"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Unit:
    """Values ``start`` up to ``end`` of a flattened tensor, and their place in a fragment."""

    tensor: str
    start: int
    end: int
    offset: int
    kind: Kind

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def values(self) -> slice:
        """Range of the values in the fragment's vector."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Fragment:
    """One flat vector. Units are sorted by size, largest first, then by tensor and row.

    So units of equal size are neighbours, and codecs can process the many small ones of a model at
    once.
    """

    index: int
    units: tuple[Unit, ...]

    @cached_property
    def size(self) -> int:
        return sum(unit.size for unit in self.units)

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        return tuple(unit.size for unit in self.units)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(unit.kind for unit in self.units)

    @cached_property
    def has_statistics(self) -> bool:
        """True if this is the fragment of the statistics, which nobody trains."""
        return "statistic" in self.kinds

    def slices(self, shares: Sequence[int]) -> tuple[Slice, ...]:
        return cut(self.unit_sizes, shares)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a tensor that go into the same fragment."""

    name: str
    start: int
    end: int
    row: int
    kind: Kind

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """The fragments of a model, made by ``Layout.build``. Equal hashes mean equal layouts."""

    fragments: tuple[Fragment, ...]
    hash: bytes
    specs: tuple[TensorSpec, ...] = field(repr=False)

    @classmethod
    def build(
        cls,
        specs: Iterable[TensorSpec],
        fragments: int,
        *,
        embeddings: Collection[str] = (),
        heads: Collection[str] = (),
        statistics: Collection[str] = (),
    ) -> Layout:
        """Lay ``specs`` out in ``fragments`` fragments, or in fewer if there are fewer values.

        ``embeddings`` and ``heads`` name the tensors that get fragments of their own if they are
        large enough, ``statistics`` those that get one more fragment in any case.
        """
        ordered = tuple(sorted(specs, key=lambda spec: spec.name))
        _check(ordered, fragments, embeddings, heads, statistics)
        kinds = {spec.name: _kind(spec, embeddings, heads, statistics) for spec in ordered}
        trained = [spec for spec in ordered if kinds[spec.name] != "statistic"]
        body = [spec for spec in ordered if kinds[spec.name] in ("matrix", "vector")]
        apart = [spec for spec in ordered if kinds[spec.name] in ("embedding", "head")]
        body_bins, apart_bins = _deal(_total(body), _total(apart), fragments)
        bins: list[list[_Piece]] = []
        if apart_bins == 0:
            bins += _pack(trained, kinds, body_bins)
        else:
            bins += _pack(body, kinds, body_bins)
            bins += _pack(apart, kinds, apart_bins)
        bins += _pack([spec for spec in ordered if kinds[spec.name] == "statistic"], kinds, 1)
        made = tuple(
            Fragment(index, _units(pieces))
            for index, pieces in enumerate(pieces for pieces in bins if pieces)
        )
        return cls(made, _hash(ordered, kinds, made), ordered)

    @property
    def size(self) -> int:
        """Number of values in all fragments."""
        return sum(fragment.size for fragment in self.fragments)


def _check(
    specs: Sequence[TensorSpec],
    fragments: int,
    embeddings: Collection[str],
    heads: Collection[str],
    statistics: Collection[str],
) -> None:
    if fragments < 1:
        raise ValueError(f"fragments is {fragments}; it must be at least 1")
    for before, after in pairwise(specs):
        if before.name == after.name:
            raise ValueError(f"two tensors are named {after.name!r}; names must differ")
    unknown = sorted({*embeddings, *heads, *statistics} - {spec.name for spec in specs})
    if unknown:
        raise ValueError(
            f"embeddings, heads or statistics name {unknown}, which are not among the tensors"
        )
    if not _total(spec for spec in specs if spec.name not in statistics):
        raise ValueError("no tensor has a value; there is nothing to train")


def _kind(
    spec: TensorSpec,
    embeddings: Collection[str],
    heads: Collection[str],
    statistics: Collection[str],
) -> Kind:
    if spec.name in statistics:
        return "statistic"
    if spec.name in embeddings:
        return "embedding"
    if spec.name in heads:
        return "head"
    return "matrix" if sum(extent > 1 for extent in spec.shape) >= 2 else "vector"


def _total(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.size for spec in specs)


def _deal(body: int, apart: int, fragments: int) -> tuple[int, int]:
    """Return the numbers of fragments for the body, and for embeddings and head, by their sizes.

    The second is 0 where either would fill less than half a fragment; then all tensors go together.
    """
    for_apart = (2 * fragments * apart + body + apart) // (2 * (body + apart))
    return (fragments, 0) if for_apart == fragments else (fragments - for_apart, for_apart)


def _row_size(spec: TensorSpec, limit: int) -> int:
    """Return the size of a row: the largest trailing dimensions that fit the limits."""
    limit = min(limit, UNIT_MAX_VALUES)
    row = 1
    for extent in reversed(spec.shape[1:]):
        if row * extent > limit:
            break
        row *= extent
    return row


def _split_rows(piece: _Piece, rows_max: int) -> Iterable[_Piece]:
    """Yield nearly equal runs of rows, as few as possible."""
    rows = piece.size // piece.row
    count = -(-rows // rows_max)
    for part in range(count):
        start = piece.start + rows * part // count * piece.row
        end = piece.start + rows * (part + 1) // count * piece.row
        yield _Piece(piece.name, start, end, piece.row, piece.kind)


def _pack(
    specs: Sequence[TensorSpec], kinds: dict[str, Kind], bins_count: int
) -> list[list[_Piece]]:
    """Put whole tensors into the lightest bin, largest first, which is within 4/3 of the optimum.

    Tensors larger than a bin then fill all bins up, by rows, to the same level.
    """
    limit = max(1, -(-_total(specs) // bins_count))
    pieces = [
        _Piece(spec.name, 0, spec.size, _row_size(spec, limit), kinds[spec.name])
        for spec in specs
        if spec.size
    ]
    pieces.sort(key=lambda piece: (-piece.size, piece.name))
    bins: list[list[_Piece]] = [[] for _ in range(bins_count)]
    lightest = [(0, index) for index in range(bins_count)]
    for piece in pieces:
        if piece.size <= limit:
            load, index = lightest[0]
            bins[index].append(piece)
            heapq.heapreplace(lightest, (load + piece.size, index))
    _fill([piece for piece in pieces if piece.size > limit], bins, lightest)
    return bins


def _fill(
    large: Sequence[_Piece], bins: list[list[_Piece]], loads: Iterable[tuple[int, int]]
) -> None:
    """Deal out the rows of ``large``, one tensor after the other, fullest bin first."""
    waiting = deque(large)
    left = sum(piece.size for piece in large)
    total = left + sum(load for load, _ in loads)
    fullest = sorted(loads, key=lambda entry: (-entry[0], entry[1]))
    for position, (load, index) in enumerate(fullest):
        bins_left = len(fullest) - position
        room = total // bins_left - load if bins_left > 1 else left
        total -= load
        while room > 0 and waiting:
            piece = waiting.popleft()
            take = min(piece.size, (2 * room + piece.row) // (2 * piece.row) * piece.row)
            if take:
                bins[index].append(replace(piece, end=piece.start + take))
            if take < piece.size:
                waiting.appendleft(replace(piece, start=piece.start + take))
            left -= take
            total -= take
            room = room - take if take else 0


def _units(pieces: Iterable[_Piece]) -> tuple[Unit, ...]:
    parts = [part for piece in pieces for part in _split_rows(piece, UNIT_MAX_VALUES // piece.row)]
    parts.sort(key=lambda part: (-part.size, part.name, part.start))
    units = []
    offset = 0
    for part in parts:
        units.append(Unit(part.name, part.start, part.end, offset, part.kind))
        offset += part.size
    return tuple(units)


def _hash(specs: Sequence[TensorSpec], kinds: dict[str, Kind], made: Sequence[Fragment]) -> bytes:
    """Hash shapes and places; not dtypes, in which learners may differ."""
    described = (
        [(spec.name, spec.shape, kinds[spec.name]) for spec in specs],
        [[(unit.tensor, unit.start, unit.end) for unit in fragment.units] for fragment in made],
    )
    return blake3.blake3(_HASH_DOMAIN + msgspec.msgpack.encode(described)).digest()


ENCODED_MIN_BYTES = 256 << 10
"""Smallest slice that is worth a reducer of its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Units ``first_unit`` up to, but not including, ``end_unit`` of a fragment. May be empty."""

    index: int
    first_unit: int
    end_unit: int
    offset: int
    """Index of its first value in the fragment's vector."""
    size: int
    """Number of values."""

    @property
    def values(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    @property
    def units(self) -> slice:
        return slice(self.first_unit, self.end_unit)


def cut(unit_sizes: Sequence[int], shares: Sequence[int]) -> tuple[Slice, ...]:
    """Return one slice for each share, in order, each as near to its part as units allow.

    If two unit ends are equally near, the earlier one is taken. Shares are whole numbers (for
    example bytes per second), because every peer must cut alike and nothing may be rounded. A share
    of 0, or more shares than units, gives empty slices.
    """
    if not shares or min(shares) < 0 or sum(shares) < 1:
        raise ValueError(f"shares {list(shares)}: need whole numbers from 0, not all 0")
    ends = list(accumulate(unit_sizes, initial=0))
    total = sum(shares)
    size = ends[-1]
    slices = []
    first = 0
    given = 0
    for index, share in enumerate(shares):
        given += share
        target = size * given  # in values times total shares
        end = bisect_left(ends, target, key=lambda end: end * total)
        if end > first and target - ends[end - 1] * total <= ends[end] * total - target:
            end -= 1
        end = max(end, first)
        slices.append(Slice(index, first, end, ends[first], ends[end] - ends[first]))
        first = end
    return tuple(slices)


def reducers_count(
    members: int, encoded_bytes: int, *, slice_bytes_min: int = ENCODED_MIN_BYTES
) -> int:
    """Return the number of reducers: min(members, ceil(encoded bytes / minimum)), at least 1."""
    return max(1, min(members, -(-encoded_bytes // slice_bytes_min)))

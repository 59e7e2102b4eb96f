"""The map that says which work a state contains: for each peer, the step up to which it is merged.

The map travels with the state, and it is the only authority on whether a contribution was merged.

A mark stays for good. Marks of peers that have been away for long could be added up to one number
only if every state forgot the same marks at the same moment, and lineages part: if one side of a
fork has added a peer up and the other one has not, their union counts its tokens twice, or loses
them, because nobody can tell which peers are in a sum. Sums of the tokens of each stretch of
versions would not overlap, but the accounts and credits of peers are read from their marks, a
newcomer takes from them who has worked, and a peer that comes back after a night could not tell its
merged work from work that an apart side has lost. So a map does not shrink: it is closed to new
keys when it has ``KEYS_MAX`` of them (``MergedMap.takes``), and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import blake3
import numpy as np
from numpy.typing import NDArray

from averaging.history.lineage import encoded_number
from dht.identity import PeerId

_MAP = "shoal 2026-11 merged map"

KEYS_MAX = 80_000
"""Reducers merge no work of further keys. Maps of so many travel on up to forty lineages at once
(``averaging.history.parent_maps``), and a state with them in 6 MB beside its numbers."""

MARKS_MAX = 100_000
"""Largest number of marks that a peer takes from another one: maps of several groups, each closed
to new keys, may have more together."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """The step of a peer's incarnation up to which its work is contained.

    ``tokens`` counts all tokens of the peer that were ever merged, across its incarnations.
    """

    incarnation: int
    step: int
    tokens: int


class _Names:
    """The peers that a map has marks of, in order. Maps with the same peers share one object."""

    __slots__ = ("_form", "_places", "column", "names")

    def __init__(self, names: tuple[PeerId, ...]) -> None:
        self.names = names
        self.column = {peer: column for column, peer in enumerate(names)}
        form = bytearray()
        places = []
        for name in (peer.encode() for peer in names):
            form += encoded_number(len(name)) + name
            for _ in range(3):
                form += encoded_number(8)
                places.append(len(form))
                form += encoded_number(0)
        self._form = bytes(form)
        """Input of the digest: names and numbers, each preceded by its length; numbers are 0."""
        self._places = np.array(places, np.intp)
        """Offsets of the numbers in ``_form``."""

    def digest(self, numbers: _Numbers) -> bytes:
        filled = bytearray(self._form)
        if self.names:
            # A view with one number per byte offset, so that all numbers are written in one call.
            anywhere = np.ndarray((len(filled) - 7,), "<u8", filled, strides=(1,))
            anywhere[self._places] = numbers.T.reshape(-1)
        return blake3.blake3(filled, derive_key_context=_MAP).digest()


@lru_cache(maxsize=64)
def _named(names: tuple[PeerId, ...]) -> _Names:
    return _Names(names)


_Numbers: TypeAlias = NDArray[np.uint64]
"""Rows are incarnation, step and tokens; there is a column for each peer."""


class MergedMap(Mapping[PeerId, Mark]):
    """A mapping from peers to ``Mark``. Immutable.

    Two maps unite entry by entry to the maximum, so that nothing is counted twice after a fork.
    Marks are columns of numbers, because in a swarm of a thousand peers sixteen maps of a thousand
    marks are united and digested in every round of every group.
    """

    __slots__ = ("_digested", "_names", "_numbers", "tokens")

    def __init__(self, marks: Mapping[PeerId, Mark] | None = None) -> None:
        ordered = sorted((marks or {}).items())
        self._names = _named(tuple(peer for peer, _ in ordered))
        self._numbers: _Numbers = np.zeros((3, len(ordered)), np.uint64)
        for column, (_, mark) in enumerate(ordered):
            self._numbers[:, column] = mark.incarnation, mark.step, mark.tokens
        self.tokens = sum(mark.tokens for _, mark in ordered)
        """Tokens of all peers together: the run's global count."""
        self._digested: bytes | None = None

    @classmethod
    def _of(cls, names: _Names, numbers: _Numbers) -> MergedMap:
        merged = cls.__new__(cls)
        merged._names, merged._numbers, merged._digested = names, numbers, None
        merged.tokens = sum(numbers[2].tolist())
        return merged

    @classmethod
    def of_columns(cls, peers: tuple[PeerId, ...], numbers: _Numbers) -> MergedMap:
        """Return the map of these peers, which are in order (``columns``)."""
        return cls._of(_named(peers), numbers)

    def columns(self, peers: tuple[PeerId, ...]) -> _Numbers:
        """Return incarnation, step and tokens of ``peers``, in order, a superset of this map's."""
        return self._columns(_named(peers))

    def __getitem__(self, peer: PeerId) -> Mark:
        return Mark(*self._numbers[:, self._names.column[peer]].tolist())

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._names.names)

    def __len__(self) -> int:
        return len(self._names.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MergedMap):
            return super().__eq__(other)
        same_names = self._names is other._names or self._names.names == other._names.names
        return same_names and np.array_equal(self._numbers, other._numbers)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"MergedMap({len(self)} peers, {self.tokens} tokens)"

    def covers(self, peer: PeerId, incarnation: int, step: int) -> bool:
        """Return whether work of this incarnation up to ``step`` is contained.

        False if the entry is of a later incarnation: it says nothing about an earlier one's last
        work.
        """
        mark = self.get(peer)
        return mark is not None and mark.incarnation == incarnation and mark.step >= step

    def takes(self, peer: PeerId) -> bool:
        """Return whether work of this peer may be merged: it has a mark, or there is place for one.

        Keys cost nothing. With too many marks a state could not travel, and nobody could join.
        """
        return len(self) < KEYS_MAX or peer in self._names.column

    def with_work(self, peer: PeerId, incarnation: int, step: int, tokens: int) -> MergedMap:
        """Return the map after a round merged ``tokens`` more of ``peer``, up to ``step``."""
        return self.with_works([(peer, incarnation, step, tokens)])

    def with_works(self, works: Iterable[tuple[PeerId, int, int, int]]) -> MergedMap:
        """Return the map after several ``with_work``: (peer, incarnation, step, tokens) each."""
        works = list(works)
        names = self._names_with([peer for peer, _, _, _ in works])
        numbers = self._columns(names)
        for peer, incarnation, step, tokens in works:
            column = names.column[peer]
            total = int(numbers[2, column]) + tokens
            numbers[:, column] = incarnation, step, total
        return self._of(names, numbers)

    def united(self, *others: Mapping[PeerId, Mark]) -> MergedMap:
        """Return the map with the later mark and the larger token count of each peer."""
        maps = [other if isinstance(other, MergedMap) else MergedMap(other) for other in others]
        names = self._names
        if any(other._names is not names for other in maps):
            names = self._names_with({peer for other in maps for peer in other._names.names})
        columns = [m._numbers if m._names is names else m._columns(names) for m in (self, *maps)]
        every = np.stack(columns)
        if (every[:, 0] == every[0, 0]).all():  # no peer has restarted
            return self._of(names, every.max(axis=0))
        numbers = columns[0].copy()
        for theirs in columns[1:]:
            _unite(numbers, theirs)
        return self._of(names, numbers)

    def _names_with(self, peers: Iterable[PeerId]) -> _Names:
        new = {peer for peer in peers if peer not in self._names.column}
        return _named(tuple(sorted(new.union(self._names.names)))) if new else self._names

    def _columns(self, names: _Names) -> _Numbers:
        """Return a copy of the numbers for ``names``, a superset of this map's."""
        if names is self._names:
            return self._numbers.copy()
        numbers = np.zeros((3, len(names.names)), np.uint64)
        numbers[:, [names.column[peer] for peer in self._names.names]] = self._numbers
        return numbers

    def digest(self) -> bytes:
        if self._digested is None:
            self._digested = self._names.digest(self._numbers)
        return self._digested


def _unite(mine: _Numbers, theirs: _Numbers) -> None:
    """Take the later (incarnation, step) and the larger token count, in place."""
    np.maximum(mine[2], theirs[2], out=mine[2])
    later = theirs[0] > mine[0]
    later |= (theirs[0] == mine[0]) & (theirs[1] > mine[1])
    np.copyto(mine[:2], theirs[:2], where=later)

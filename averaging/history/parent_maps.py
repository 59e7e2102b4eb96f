"""The merged maps of the states that a meld continues, as they travel with slice 0.

A lineage binds the merged map of its state (``averaging.history.lineage.bound``). So each map that
is brought into a round is compared with the lineage that its sender signed to stand on, at the
reducer and at every member, and each member unites the maps itself: the credits of a round rest on
nobody's word. The maps of all parents travel, and not their union, because nobody could tell an
invented union from a true one.

On the wire the maps are columns of differences from their maximum. Sixteen maps of a thousand peers
differ by a few steps, and take 160 bytes for each peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from averaging.errors import BadPayload
from averaging.history.lineage import Lineage, bound
from averaging.history.merged_map import MARKS_MAX, MergedMap
from averaging.messages import ROSTER_MAX, Commit, Count, Digest, Index, Peer
from dht.decoding import UNDECODABLE

MAPS_MAX_BYTES: Final = 16 << 20
"""Maps of a round: fifty thousand peers on forty lineages."""


@dataclass(frozen=True, slots=True)
class ParentMap:
    """The merged map of a state, and the rest of what its lineage is made of."""

    merged: MergedMap
    history: bytes

    def belongs_to(self, lineage: Lineage) -> bool:
        return bound(self.history, self.merged.digest()) == lineage


ParentMaps: TypeAlias = Mapping[int, ParentMap]
"""Maps by the index of their parent in the commit."""

_Numbers: TypeAlias = NDArray[np.uint64]
_Column: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MARKS_MAX)]


class _Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One map: each number is so much less than the largest of all maps."""

    parent: Index
    history: Digest
    absent: Annotated[tuple[Count, ...], Meta(max_length=MARKS_MAX)]
    """Places of the peers that the map does not have."""
    incarnations: _Column
    steps: _Column
    tokens: _Column


class _Table(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peers: Annotated[tuple[Peer, ...], Meta(max_length=MARKS_MAX)]
    largest: tuple[_Column, _Column, _Column]
    rows: Annotated[tuple[_Row, ...], Meta(max_length=ROSTER_MAX)]


_decoder = msgspec.msgpack.Decoder(_Table)


def encode_maps(maps: ParentMaps) -> bytes:
    """Equal maps have equal bytes. Raises ``BadPayload`` for too many: others can cause it."""
    peers = tuple(sorted({peer for each in maps.values() for peer in each.merged}))
    columns = {index: each.merged.columns(peers) for index, each in maps.items()}
    largest = np.max([*columns.values(), np.zeros((3, len(peers)), np.uint64)], axis=0)
    rows = []
    for index, each in sorted(maps.items()):
        names = frozenset(each.merged)
        there = np.array([peer in names for peer in peers], bool)
        less = np.where(there, largest - columns[index], 0)
        absent = tuple(np.flatnonzero(~there).tolist())
        rows.append(_Row(index, each.history, absent, *map(tuple, less.tolist())))
    data = msgspec.msgpack.encode(_Table(peers, _three(largest.tolist()), tuple(rows)))
    if len(data) > MAPS_MAX_BYTES:
        raise BadPayload("meld", f"merged maps of {len(data)} bytes; at most {MAPS_MAX_BYTES}")
    return data


def _three(rows: list[list[int]]) -> tuple[_Column, _Column, _Column]:
    return tuple(rows[0]), tuple(rows[1]), tuple(rows[2])


def decode_maps(data: bytes | memoryview) -> dict[int, ParentMap]:
    """Decode maps without comparing them with anything. Raises ``BadPayload``."""
    try:
        table = _decoder.decode(data)
        if list(table.peers) != sorted(set(table.peers)):
            raise ValueError("its peers are not in order")
        largest = _numbers(table.largest, len(table.peers))
        maps = {row.parent: ParentMap(_map(row, table, largest), row.history) for row in table.rows}
    except (*UNDECODABLE, ValueError) as error:
        raise BadPayload("meld", f"not merged maps: {error}") from error
    if len(maps) < len(table.rows):
        raise BadPayload("meld", "not merged maps: two of one parent")
    return maps


def _map(row: _Row, table: _Table, largest: _Numbers) -> MergedMap:
    less = _numbers((row.incarnations, row.steps, row.tokens), len(table.peers))
    absent = set(row.absent)
    if (less > largest).any() or list(row.absent) != sorted(absent):
        raise ValueError("a mark is less than nothing, or its places are not in order")
    if absent and max(absent) >= len(table.peers):
        raise ValueError(f"place {max(absent)} of {len(table.peers)} peers")
    numbers = largest - less
    if not absent:
        return MergedMap.of_columns(table.peers, numbers)
    places = [place for place in range(len(table.peers)) if place not in absent]
    return MergedMap.of_columns(tuple(table.peers[p] for p in places), numbers[:, places])


def _numbers(columns: tuple[_Column, _Column, _Column], count: int) -> _Numbers:
    if any(len(column) != count for column in columns):
        raise ValueError(f"its columns do not have {count} places")
    return np.array(columns, np.uint64).reshape(3, count)


def read_maps(
    data: bytes | memoryview, commit: Commit, members: Collection[int]
) -> dict[int, ParentMap]:
    """Decode the maps that a peer sent, and compare each with the lineage that it belongs to.

    ``members``: roster indices of those whose work comes with the maps. Raises ``BadPayload``.
    """
    maps = decode_maps(data)
    problem = problem_of(maps, commit, members)
    if problem is not None:
        raise BadPayload("meld", problem)
    return maps


def problem_of(maps: ParentMaps, commit: Commit, members: Collection[int]) -> str | None:
    """Return why these maps are not those of the members' parents; ``None`` if they are."""
    if not members or max(members) >= len(commit.members):
        return "it has the work of members that the round does not have"
    if tuple(sorted(maps)) != parents_of(commit, members):
        return "its merged maps are not those of the states that it brings"
    for index, each in sorted(maps.items()):
        if not each.belongs_to(commit.parents[index].lineage):
            return f"its merged map is not the one that the lineage of parent {index} binds"
    return None


def parents_of(commit: Commit, contributors: Iterable[int]) -> tuple[int, ...]:
    """Return the indices of the parents that these members stand on, ascending."""
    return tuple(sorted({commit.members[index].parent for index in contributors}))


def united(maps: ParentMaps) -> MergedMap:
    """Return the union of the maps, from which the map after the round follows."""
    first, *others = (maps[index].merged for index in sorted(maps))
    return first.united(*others) if others else first

"""The merged map of a version of one fragment, with what proves it.

A lineage binds the merged map of its state, and a link is certified by the signatures of peers that
have stood on it (``averaging.round.opinions.certificates``). So a reader of a map with its link can
tell whether those peers hold it, and nobody can add a token to it that no seal has merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import blake3
import msgspec

from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap
from averaging.messages import Link, Signatures
from dht.identity import PeerId

Rank: TypeAlias = tuple[int, int, bytes]
"""Tokens, version and lineage: a total order of the versions of a fragment."""


@dataclass(frozen=True, slots=True)
class ProvenMap:
    """The merged map of one version of a fragment."""

    fragment: int
    link: Link
    map: ParentMap
    signatures: Signatures = ()
    """Signatures of peers that have stood on the link."""

    @property
    def merged(self) -> MergedMap:
        return self.map.merged

    @property
    def rank(self) -> Rank:
        """The heavier side of a fork wins, as it does in the run (``standing.relate``)."""
        return self.merged.tokens, self.link.version, self.link.lineage

    @property
    def is_bound(self) -> bool:
        """True if the map is the one that the lineage of the link binds."""
        return bound(self.map.history, self.merged.digest()) == self.link.lineage


Believes: TypeAlias = Callable[[ProvenMap], bool]
"""True if the link of a map is certified for this peer, or part of its own history."""


@dataclass(frozen=True)
class Totals:
    """Merged tokens of each contributor, sorted by peer. A peer without tokens has no place."""

    peers: tuple[PeerId, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Mapping[PeerId, int]) -> Totals:
        there = sorted((peer, count) for peer, count in tokens.items() if count > 0)
        return cls(tuple(peer for peer, _ in there), tuple(count for _, count in there))

    @classmethod
    def of_maps(cls, maps: Iterable[Mapping[PeerId, Mark]]) -> Totals:
        """The largest count of each peer in any map: the run's own count (``merged_of``)."""
        united = MergedMap().united(*maps)
        return cls.of({peer: mark.tokens for peer, mark in united.items()})

    @cached_property
    def by_peer(self) -> Mapping[PeerId, int]:
        return dict(zip(self.peers, self.tokens, strict=True))

    @cached_property
    def total(self) -> int:
        return sum(self.tokens)

    @cached_property
    def digest(self) -> bytes:
        return blake3.blake3(msgspec.msgpack.encode((self.peers, self.tokens))).digest()

    def at_most(self, later: Mapping[PeerId, int]) -> dict[PeerId, int]:
        """Each peer's tokens, as far as a later count still contains them."""
        return {
            peer: min(count, later[peer]) for peer, count in self.by_peer.items() if peer in later
        }

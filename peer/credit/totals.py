"""Tokens by peer at one moment: what a run's merged maps say, without incarnations and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import blake3
import msgspec

from averaging.history.merged_map import Mark, MergedMap
from dht.identity import PeerId


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

"""Format of the file that keeps the peers met, so that the next session needs no seed. Pure.

``dht.presence.kept_peers`` reads and writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from multiaddr import Multiaddr

from dht.addresses import parse, peer_of
from dht.decoding import decoded
from dht.errors import AddressError
from dht.identity import PeerId, RunId
from dht.records import SEQUENCE_MAX

CACHE_VERSION = 1
CACHE_MAX_BYTES = 256 * 1024
CACHED_PEERS_MAX = 64


class CachedPeer(msgspec.Struct, frozen=True):
    """A peer that has answered, with its addresses."""

    peer: Annotated[str, msgspec.Meta(max_length=64)]
    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=6)
    ]


class PeerCache(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file: known peers of one run, and the own sequence number."""

    version: int = CACHE_VERSION
    run: str = ""
    sequence: Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)] = 0
    """The last sequence number this peer used, so that the next session's records are newer."""

    peers: Annotated[list[CachedPeer], msgspec.Meta(max_length=CACHED_PEERS_MAX)] = []

    def addresses(self) -> tuple[Multiaddr, ...]:
        """The usable addresses in it, each ending in its peer's id."""
        good: list[Multiaddr] = []
        for cached in self.peers:
            for text in cached.addresses:
                try:
                    address = parse(text)
                except AddressError:
                    continue  # written by another version, or by hand: use the others
                if peer_of(address) == cached.peer:
                    good.append(address)
        return tuple(good)


def cache_of(
    run: RunId | None, sequence: int, peers: Sequence[tuple[PeerId, Sequence[Multiaddr]]]
) -> PeerCache:
    """The cache of these peers, the most useful first: at most ``CACHED_PEERS_MAX`` are kept."""
    return PeerCache(
        run=run or "",
        sequence=sequence,
        peers=[
            CachedPeer(peer, [str(address) for address in addresses[:6]])
            for peer, addresses in peers[:CACHED_PEERS_MAX]
        ],
    )


_decoder = msgspec.json.Decoder(PeerCache)


def decode_cache(data: bytes) -> PeerCache:
    """Decode a file's content. Raises ``ValueError``."""
    cache = decoded(data, _decoder.decode, "a list of known peers", max_bytes=CACHE_MAX_BYTES)
    if cache.version != CACHE_VERSION:
        raise ValueError(f"it has version {cache.version}; this one reads {CACHE_VERSION}")
    return cache


def encode_cache(cache: PeerCache) -> bytes:
    return msgspec.json.format(msgspec.json.encode(cache), indent=1) + b"\n"

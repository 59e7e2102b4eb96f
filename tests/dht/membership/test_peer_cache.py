"""The file format of the peers that are kept between sessions."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from dht.addresses import parse
from dht.identity import Identity, PeerId, RunId
from dht.membership.peer_cache import (
    CACHE_MAX_BYTES,
    CACHED_PEERS_MAX,
    PeerCache,
    cache_of,
    decode_cache,
    encode_cache,
)

RUN = RunId("5f" * 32)


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def at(number: int, port: int = 1) -> Multiaddr:
    return parse(f"/ip4/203.0.113.{number}/tcp/{port}/p2p/{peer(number)}")


def test_addresses_that_lead_to_another_peer_or_nowhere_are_left_out() -> None:
    cache = PeerCache(
        peers=[
            *cache_of(RUN, 1, [(peer(1), [at(2)]), (peer(3), [at(3)])]).peers,
        ]
    )
    assert cache.addresses() == (at(3),)


def test_only_so_many_peers_are_kept() -> None:
    cache = cache_of(RUN, 1, [(peer(n), [at(n % 250 + 1)]) for n in range(CACHED_PEERS_MAX + 9)])
    assert decode_cache(encode_cache(cache)) == cache
    assert len(cache.peers) == CACHED_PEERS_MAX


@given(st.binary(max_size=300))
def test_any_bytes_as_cache_are_a_cache_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_cache(data).addresses()


def test_mutated_deep_and_huge_caches_are_value_errors_or_caches() -> None:
    good = encode_cache(cache_of(RUN, 5, [(peer(n), [at(n)]) for n in range(1, 4)]))
    rng = random.Random(3)
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_cache(bytes(data)).addresses()
        except ValueError:
            refused += 1
    assert refused > 100
    for bomb in (b"[" * 100_000, b'{"peers":' * 20_000, b" " * (CACHE_MAX_BYTES + 1)):
        with pytest.raises(ValueError):
            decode_cache(bomb)


def test_a_cache_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        decode_cache(encode_cache(PeerCache(version=2)))

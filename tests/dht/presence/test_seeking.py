"""The file of the peers met: whole or absent, and any bytes in it are a list or an error."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from dht.addresses import parse
from dht.identity import Identity, PeerId, RunId
from dht.memory.virtual_loop import run
from dht.presence.seeking import CACHE_MAX_BYTES, PeerCache, decode_cache
from dht.presence.this_peer import Events, KeptFile, PresenceEvent

RUN = RunId("5f" * 32)


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def at(number: int, port: int = 1) -> Multiaddr:
    return parse(f"/ip4/203.0.113.{number}/tcp/{port}/p2p/{peer(number)}")


class Kept:
    """A file of kept peers, and what is told of it."""

    def __init__(self, path: Path) -> None:
        self.told: list[PresenceEvent] = []
        self._file = KeptFile(path, "the peers", Events(self.told.append), max_bytes=1000)

    def save(self, cache: PeerCache) -> None:
        run(self._file.write(msgspec.json.encode(cache)))

    def load(self) -> PeerCache | None:
        return run(self._file.read(decode_cache))


def test_a_cache_comes_back_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "data" / "peers.json"
    kept, met = Kept(path), [at(1), at(2), at(2, port=2)]
    cache = PeerCache(RUN, 17, [str(address) for address in met])
    kept.save(cache)
    kept.save(cache)

    assert kept.load() == cache
    assert cache.usable() == tuple(met)
    assert [entry.name for entry in path.parent.iterdir()] == ["peers.json"]


def test_addresses_that_lead_to_nobody_or_nowhere_are_left_out() -> None:
    cache = PeerCache(RUN, 1, ["/ip4/203.0.113.1/tcp/1", "nowhere", str(at(3))])
    assert cache.usable() == (at(3),)


def test_no_file_is_no_error_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    kept = Kept(path)
    assert kept.load() is None and not kept.told
    kept.save(PeerCache(RUN))
    path.write_bytes(path.read_bytes()[:-4])
    assert kept.load() is None
    assert [event.name for event in kept.told] == ["cache_unreadable"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path / "peers.json")
    kept.save(PeerCache(RUN, 1))

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    kept.save(PeerCache(RUN, 2))
    assert "No space left on device" in kept.told[0].text
    loaded = kept.load()
    assert loaded is not None and loaded.sequence == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["peers.json"]


@given(st.binary(max_size=300))
def test_any_bytes_as_cache_are_a_cache_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_cache(data).usable()


def test_mutated_deep_and_huge_caches_are_value_errors_or_caches() -> None:
    good = msgspec.json.encode(PeerCache(RUN, 5, [str(at(n)) for n in range(1, 4)]))
    rng = random.Random(3)
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_cache(bytes(data)).usable()
        except ValueError:
            refused += 1
    assert refused > 100
    for bomb in (b"[" * 100_000, b'{"addresses":' * 20_000, b" " * (CACHE_MAX_BYTES + 1)):
        with pytest.raises(ValueError):
            decode_cache(bomb)

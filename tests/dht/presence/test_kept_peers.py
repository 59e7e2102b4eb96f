"""The file of the peers met, on disk."""

import os
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht.addresses import parse
from dht.identity import Identity, PeerId, RunId
from dht.membership.peer_cache import cache_of, encode_cache
from dht.presence.kept_peers import load_cache, save_cache

RUN = RunId("5f" * 32)


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def at(number: int, port: int = 1) -> Multiaddr:
    return parse(f"/ip4/203.0.113.{number}/tcp/{port}/p2p/{peer(number)}")


def test_a_cache_comes_back_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "data" / "peers.json"
    cache = cache_of(RUN, 17, [(peer(1), [at(1)]), (peer(2), [at(2), at(2, port=2)])])
    save_cache(path, cache)
    save_cache(path, cache)

    assert load_cache(path) == cache
    assert cache.addresses() == (at(1), at(2), at(2, port=2))
    assert [entry.name for entry in path.parent.iterdir()] == ["peers.json"]


def test_no_file_is_no_error_and_a_damaged_one_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    assert load_cache(path) is None
    path.write_bytes(encode_cache(cache_of(RUN, 1, []))[:-4])
    with pytest.raises(ValueError):
        load_cache(path)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peers.json"
    save_cache(path, cache_of(RUN, 1, []))

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_cache(path, cache_of(RUN, 2, []))
    loaded = load_cache(path)
    assert loaded is not None and loaded.sequence == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["peers.json"]

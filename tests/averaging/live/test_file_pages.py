"""Calls of the kernel about pages of mapped files, on real files."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from averaging.live import file_pages
from averaging.live.file_pages import allot, cached_share, fetch, let_go
from averaging.numbers.arrays import Bytes

SIZE = 16 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems answer otherwise")


def mapped(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)


@pytest.fixture
def sparse(tmp_path: Path) -> Bytes:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, SIZE)
    return mapped(path)


@linux
def test_the_share_of_pages_that_the_page_cache_has(sparse: Bytes) -> None:
    assert cached_share(sparse) == 0.0
    sparse[: SIZE // 4] = 7
    assert 0.25 <= cached_share(sparse) < 1.0
    sparse[:] = 7
    assert cached_share(sparse) == 1.0


@linux
def test_a_new_file_has_its_pages_before_they_are_written(sparse: Bytes) -> None:
    allot(sparse)
    assert cached_share(sparse) == 1.0
    assert not sparse.any()


def test_what_was_written_stays_when_it_is_let_go_and_fetched(sparse: Bytes) -> None:
    sparse[:] = 7
    let_go(sparse)
    fetch(sparse)
    allot(sparse)
    assert (sparse == 7).all()


def test_a_system_without_these_calls_does_nothing(
    sparse: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pages, "_system", lambda: None)
    sparse[:] = 7
    assert cached_share(sparse) == 1.0
    for each in (fetch, allot, let_go):
        each(sparse)
    assert (sparse == 7).all()

"""Buffers come back when nobody holds them, and not before."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from averaging.live.streams.buffers import SMALL_BYTES, Arena

LARGE = 3 * SMALL_BYTES


def test_a_buffer_is_used_again_only_after_its_last_view_is_gone() -> None:
    arena = Arena(10 * LARGE)
    first = arena.floats(LARGE // 4)
    first.fill(1.0)
    view = first[10:20].reshape(2, 5)
    data = view.data
    address = first.__array_interface__["data"][0]

    del first, view
    gc.collect()
    other = arena.floats(LARGE // 4)
    assert other.__array_interface__["data"][0] != address, "a memoryview still reads it"
    assert np.array_equal(np.frombuffer(data, np.float32), np.ones(10))

    del data
    gc.collect()
    again = arena.floats(LARGE // 4 - 7)
    assert again.__array_interface__["data"][0] == address
    assert other.__array_interface__["data"][0] != address


def test_no_more_waits_than_the_cap_allows() -> None:
    arena = Arena(2 * LARGE)
    held = [arena.uninitialised(LARGE) for _ in range(5)]
    held.clear()
    gc.collect()
    assert arena.kept_bytes <= 2 * LARGE


@pytest.mark.parametrize("size", [0, 1, SMALL_BYTES - 1, SMALL_BYTES, LARGE + 1])
def test_a_buffer_has_the_size_that_was_asked_for(size: int) -> None:
    arena = Arena(0)
    assert len(arena.uninitialised(size)) == size
    assert arena.floats(size).size == size


def test_two_threads_are_never_given_the_same_memory() -> None:
    """A state is copied in a thread while the loop takes buffers of rounds."""
    arena, count = Arena(64 * SMALL_BYTES), SMALL_BYTES // 4
    waiting = [arena.floats(count) for _ in range(32)]
    del waiting

    def take(number: int) -> int:
        disturbed = 0
        for _ in range(3000):
            vectors = [arena.floats(count) for _ in range(3)]
            for vector in vectors:
                vector[0] = number
            disturbed += sum(vector[0] != number for vector in vectors)
            addresses = {vector.__array_interface__["data"][0] for vector in vectors}
            disturbed += len(vectors) - len(addresses)
        return disturbed

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(take, range(4))) == 0
    finally:
        sys.setswitchinterval(interval)

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.data.batches import prefetch
from peer.data.batches.prefetch import BATCHES_MAX, Prefetched
from peer.data.batches.sequences import Sequences
from peer.data.feed import Placing


class Counting:
    """Sequences that are numbered, with a position."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.at = 0
        self.fails_at = fails_at
        self.gate = Event()
        self.gate.set()

    def next(self, sequences: int) -> Sequences:
        self.gate.wait()
        if self.fails_at is not None and self.at >= self.fails_at:
            raise OSError(f"no sequence {self.at}")
        self.at += sequences
        return np.arange(self.at - sequences, self.at, dtype=np.int64)[:, None]

    def state(self) -> dict[str, int]:
        return {"at": self.at}

    def restore_position(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(0, 19))
def test_batches_of_any_sizes_continue_each_other_across_a_resume(
    sizes: list[int], stop: int
) -> None:
    first = Prefetched(Counting())
    seen = [n for size in sizes[:stop] for n in first.next(size).ravel().tolist()]
    assert first.state() == {"at": sum(sizes[:stop])}
    second = Prefetched(Counting())
    second.restore_position(first.state())
    seen += [n for size in sizes[stop:] for n in second.next(size).ravel().tolist()]
    assert seen == list(range(sum(sizes)))


def test_batches_that_wait_in_memory_are_bounded_and_not_in_the_position() -> None:
    source = Counting()
    ahead = Prefetched(source)
    ahead.next(2)
    _until(lambda: source.at == 2 * (BATCHES_MAX + 1))
    threading.Event().wait(0.05)
    assert source.at == 2 * (BATCHES_MAX + 1)
    assert ahead.state() == {"at": 2}


def test_large_batches_wait_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "TOKENS_MAX", 10)
    source = Counting()
    ahead = Prefetched(source)
    ahead.next(9)
    _until(lambda: source.at == 27)
    threading.Event().wait(0.05)
    assert source.at == 27


def test_an_error_comes_in_its_turn_and_reading_can_go_on_after_it() -> None:
    source = Counting(fails_at=4)
    ahead = Prefetched(source)
    assert [ahead.next(2).ravel().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(OSError, match="no sequence 4"):
            ahead.next(2)
    source.fails_at = None
    assert ahead.next(2).ravel().tolist() == [4, 5]


def test_waiting_for_a_batch_has_a_limit() -> None:
    source = Counting()
    source.gate.clear()
    ahead = Prefetched(source)
    assert ahead.take(2, timeout_s=0.01) is None
    source.gate.set()
    assert ahead.take(2).ravel().tolist() == [0, 1]


def test_the_thread_ends_with_its_stream() -> None:
    ahead = Prefetched(Counting())
    ahead.next(1)
    mine = {thread for thread in threading.enumerate() if thread.name == "prefetch"}
    del ahead
    gc.collect()
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_batches_for_the_cpu_are_the_arrays_themselves() -> None:
    place = Placing(torch.device("cpu"))
    batch = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert place.finish(place.start(batch)).data_ptr() == batch.ctypes.data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_reach_a_device_in_order_while_it_computes() -> None:
    device = torch.device("cuda")
    place = Placing(device)
    ahead = Prefetched(Counting())
    work = torch.randn(2048, 2048, device=device)
    totals = []
    for _ in range(200):
        batch = place.finish(ahead.take(64, place.start))
        assert batch.device.type == "cuda"
        work = (work @ work).clamp(-1, 1)  # keeps the device busy while the next batch comes
        totals.append(batch.sum())
        del batch  # its memory may be used for the next copy as soon as the sum is done
    expected = [sum(range(64 * n, 64 * n + 64)) for n in range(200)]
    assert torch.stack(totals).tolist() == expected


def _until(reached: object) -> None:
    assert callable(reached)
    for _ in range(1000):
        if reached():
            return
        threading.Event().wait(0.005)
    raise AssertionError("not reached")

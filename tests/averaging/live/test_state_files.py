"""States in files: the same bits as in memory, little of it resident, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from averaging.live import state_files
from averaging.live.state_files import StateFiles
from averaging.numbers.arrays import uninitialised_floats
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, swarm

VALUES = 1 << 20
BYTES = 4 * VALUES


def files_in(folder: Path, *, least_bytes: int = 1, unused_max: int = 0) -> StateFiles:
    return StateFiles(folder, spare_bytes=0, least_bytes=least_bytes, unused_max=unused_max)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def resident_bytes() -> int:
    found = state_files._shared_resident_bytes()
    if found is None:
        pytest.skip("this system does not tell what is resident")
    return found


def test_what_was_let_go_is_not_resident_and_keeps_its_values(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    vectors = [files.floats(VALUES) for _ in range(8)]
    for number, vector in enumerate(vectors):
        vector.fill(number)
    full = resident_bytes()

    files.let_go()

    assert full - resident_bytes() > 7 * BYTES
    assert all((vector == number).all() for number, vector in enumerate(vectors))


def test_resident_pages_are_kept_below_their_limit(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, resident_max_bytes=3 * BYTES, spare_bytes=0)
    before = resident_bytes()
    vectors = [files.floats(VALUES) for _ in range(2)]
    for vector in vectors:
        vector.fill(1.0)
    run(files.tend())
    assert resident_bytes() - before > BYTES, "two of three may stay"

    vectors += [files.floats(VALUES) for _ in range(4)]
    for vector in vectors:
        vector.fill(2.0)
    run(files.tend())
    assert resident_bytes() - before < BYTES


def test_a_file_has_no_name_and_its_space_comes_back_with_the_last_view(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    vector = files.floats(VALUES)
    assert not list(tmp_path.iterdir())
    assert files.used_bytes == BYTES

    view = vector[10:20].data
    del vector
    gc.collect()
    run(files.tend())
    assert files.used_bytes == BYTES, "a memoryview still reads it"

    del view
    gc.collect()
    run(files.tend())
    assert files.used_bytes == 0


def test_small_vectors_are_ordinary_memory(tmp_path: Path) -> None:
    files = files_in(tmp_path, least_bytes=BYTES)
    small, large = files.floats(VALUES - 1), files.floats(VALUES)
    assert files.used_bytes == BYTES
    assert files.holds(small) and files.holds(large)


def test_a_full_disk_and_a_limit_are_told_and_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float | None] = [BYTES]
    files = StateFiles(tmp_path, allowed_bytes=lambda: allowed[0], spare_bytes=0)
    first, second = files.floats(VALUES), files.floats(VALUES)
    assert files.used_bytes == BYTES
    assert files.refusal is not None and "shoal limits --disk" in files.refusal
    second.fill(1.0)
    assert files.holds(second), "it has no better place"

    allowed[0] = None
    assert files.floats(VALUES) is not None and files.refusal is None
    assert files.holds(first) and not files.holds(second), "now it has"

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(state_files.shutil, "disk_usage", lambda path: usage(0, 0, BYTES - 1))
    files.floats(VALUES).fill(1.0)
    assert files.refusal is not None and "No space left" in files.refusal


def test_no_more_files_are_open_than_the_process_can_spare(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, spare_bytes=0, files_max=2, unused_max=0)
    vectors = [files.floats(VALUES) for _ in range(3)]
    assert files.used_bytes == 2 * BYTES
    assert files.refusal is not None and "ulimit -n" in files.refusal
    del vectors[0]
    gc.collect()
    run(files.tend())
    assert files.floats(VALUES) is not None and files.refusal is None


def test_a_file_is_closed_although_its_last_view_is_just_going(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    vector = files.floats(VALUES)
    (mapped,) = files._maps.values()
    view = memoryview(mapped.mapping)
    del vector
    files._close(0)
    assert files.used_bytes == 0
    view.release()


def test_a_file_that_nobody_uses_is_used_again_with_its_pages(tmp_path: Path) -> None:
    files = files_in(tmp_path, unused_max=1)
    vector = files.floats(VALUES)
    vector.fill(1.0)
    del vector
    gc.collect()
    run(files.tend())
    assert files.used_bytes == BYTES, "it is kept"

    before = page_faults()
    again = files.floats(VALUES - 1)
    again.fill(2.0)
    assert page_faults() - before < 10, "its pages were neither allotted nor mapped again"
    assert files.used_bytes == BYTES
    assert files.holds(again) and again.size == VALUES - 1 and (again == 2.0).all()


def test_a_file_in_use_is_not_used_again(tmp_path: Path) -> None:
    files = files_in(tmp_path, unused_max=2)
    first = files.floats(VALUES)
    first.fill(1.0)
    view = first[:10].data
    del first
    gc.collect()
    files.floats(VALUES).fill(2.0)
    assert bytes(view) == np.ones(10, np.float32).tobytes()


def test_few_unused_files_are_kept_and_those_that_fit(tmp_path: Path) -> None:
    files = files_in(tmp_path, unused_max=2)
    vectors = [files.floats(size) for size in (VALUES, 2 * VALUES, 4 * VALUES)]
    for vector in vectors:
        vector.fill(1.0)
    while vectors:
        del vector, vectors[0]
        vector = None
    gc.collect()
    run(files.tend())
    assert files.used_bytes == 6 * BYTES, "those that were used last"

    _too_large = files.floats(VALUES)
    assert files.used_bytes == 7 * BYTES
    _fitting = files.floats(int(1.9 * VALUES))
    assert files.used_bytes == 7 * BYTES


def test_unused_files_are_given_up_before_a_vector_has_to_be_in_memory(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, allowed_bytes=lambda: 3.0 * BYTES, spare_bytes=0)
    files.floats(2 * VALUES).fill(1.0)
    gc.collect()
    run(files.tend())
    assert files.used_bytes == 2 * BYTES
    large = files.floats(3 * VALUES)
    assert files.refusal is None and files.holds(large)
    assert files.used_bytes == 3 * BYTES


def test_a_file_that_the_page_cache_has_lost_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(tmp_path, unused_max=2)
    files.floats(VALUES).fill(1.0)
    gc.collect()
    monkeypatch.setattr(state_files.file_pages, "cached_share", lambda data: 0.5)
    new = files.floats(VALUES)
    assert (new == 0.0).all(), "another file"
    run(files.tend())
    assert files.used_bytes == BYTES


def test_the_next_vector_is_made_ready_before_it_is_asked_for(tmp_path: Path) -> None:
    files = files_in(tmp_path, unused_max=2)
    theta, momentum = files.floats(VALUES), files.floats(VALUES)
    theta.fill(1.0)
    momentum.fill(2.0)
    run(files.prepare((theta, momentum, uninitialised_floats(VALUES))))
    assert files.used_bytes == 3 * BYTES

    new = files.floats(VALUES)
    assert files.used_bytes == 3 * BYTES
    before = page_faults()
    new.fill(3.0)
    assert page_faults() - before < 10, "its pages were allotted"
    assert (theta == 1.0).all() and (momentum == 2.0).all()


def test_the_space_is_counted_while_files_are_closed_in_a_thread(tmp_path: Path) -> None:
    """A closed mapping has no length any more."""
    files, over = files_in(tmp_path), threading.Event()

    def count() -> int:
        largest = 0
        while not over.is_set():
            largest = max(largest, files.used_bytes)
        return largest

    with ThreadPoolExecutor(1) as threads:
        counting = threads.submit(count)
        for _ in range(200):
            vectors = [files.floats(VALUES) for _ in range(3)]
            del vectors
            files._close(0)
        over.set()
        assert 0 < counting.result() <= 3 * BYTES
    assert files.used_bytes == 0


def test_a_payload_is_moved_with_its_bytes(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    payload = bytes(range(256)) * 64
    kept = files.kept(payload)
    assert bytes(kept) == payload
    assert files.used_bytes == len(payload)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_peers_with_files_and_with_memory_have_equal_bits(tmp_path: Path, mu: float) -> None:
    """Rounds, a replay after a partition, and a newcomer that fetches the state."""

    async def main() -> None:
        network, policy = MemoryNetwork(), replace(POLICY, mu=mu)
        async with swarm(network) as made:
            files = [files_in(tmp_path) for _ in range(2)]
            anna = await made.add("anna", policy=policy, state_files=files[0])
            boris = await made.add("boris", policy=policy)
            clara = await made.add("clara", policy=policy, state_files=files[1])
            await made.live(18.0)
            network.partition([[clara.id]])
            await made.live(30.0)
            network.heal()
            await made.live(36.0)
            late = await made.add(
                "dora", policy=policy, knows_start=False, state_files=files_in(tmp_path)
            )
            await made.live(30.0)
            made.check()
            assert anna.versions() == boris.versions() == clara.versions() == late.versions()
            assert any(each["how"] == "replay" for each in clara.told("state_adopted"))
            assert late.told("state_fetched")
            for peer in (anna, clara, late):
                memory = peer.averager.state_files
                assert memory is not None
                for state in peer.averager.states:
                    assert state is not None
                    assert memory.holds(state.theta)
                    assert memory.holds(state.momentum) or mu == 0.0
                assert not peer.told("state_in_memory")
            log = anna.averager._works[0].replay
            assert log is not None and len(log)
            assert files[0].used_bytes > sum(8 * part.size for part in made.layout.fragments)

    run(main())


def test_a_peer_says_once_that_its_states_have_to_be_in_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            none = StateFiles(tmp_path, allowed_bytes=lambda: 0.0, least_bytes=1)
            anna = await made.add("anna", state_files=none)
            await made.add("boris")
            await made.live(30.0)
            made.check()
            assert len(anna.told("state_in_memory")) == 1
            assert anna.averager.stats.rounds > 0
            await asyncio.sleep(1.0)

    run(main())

"""States in files: the same bits as in memory, little of it resident, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from averaging.live.states import state_files
from averaging.live.states.state_files import StateFiles
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, Peer, swarm

VALUES = 1 << 20
BYTES = 4 * VALUES


def files_in(folder: Path, *, least_bytes: int = 1, working_bytes_max: int = 0) -> StateFiles:
    return StateFiles(
        folder, spare_bytes=0, least_bytes=least_bytes, working_bytes_max=working_bytes_max
    )


def is_put_away(peer: Peer) -> bool:
    files = peer.averager.around.state_files
    assert files is not None
    return all(
        state is not None and files.is_put_away(state.theta) and files.is_put_away(state.momentum)
        for state in peer.averager.states
    )


def resident_bytes() -> int:
    found = state_files._shared_resident_bytes()
    if found is None:
        pytest.skip("this system does not tell what is resident")
    return found


def test_released_files_are_not_resident_and_keep_their_values(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    vectors = [files.floats(VALUES) for _ in range(8)]
    for number, vector in enumerate(vectors):
        vector.fill(number)
    full = resident_bytes()

    files.let_go()

    assert full - resident_bytes() > 7 * BYTES
    assert all((vector == number).all() for number, vector in enumerate(vectors))


def test_resident_pages_are_kept_below_their_limit(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, resident_max_bytes=3 * BYTES, working_bytes_max=0, spare_bytes=0)
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
    assert files.is_put_away(small) and files.is_put_away(large)


def test_vectors_are_ordinary_memory_until_they_are_put_away(tmp_path: Path) -> None:
    files = files_in(tmp_path, working_bytes_max=2 * BYTES)
    first, _other, third = (files.floats(VALUES) for _ in range(3))
    assert not files.is_put_away(first) and files.is_put_away(third), "two may be in memory"

    first.fill(7.0)
    filed = files.put_away(first)
    assert (filed == 7.0).all() and files.put_away(filed) is filed
    assert files.used_bytes == 2 * BYTES
    del first
    assert not files.is_put_away(files.floats(VALUES))


def test_a_full_disk_and_a_limit_are_told_and_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float | None] = [BYTES]
    files = StateFiles(
        tmp_path, allowed_bytes=lambda: allowed[0], working_bytes_max=0, spare_bytes=0
    )
    first, second = files.floats(VALUES), files.floats(VALUES)
    assert files.used_bytes == BYTES
    assert files.refusal is not None and "shoal limits --disk" in files.refusal
    second.fill(1.0)
    assert files.put_away(second) is second, "it has no better place"

    allowed[0] = None
    assert files.is_put_away(first) and not files.is_put_away(second)
    filed = files.put_away(second)
    assert files.is_put_away(filed) and (filed == 1.0).all(), "now it has"
    assert files.refusal is None

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(state_files.shutil, "disk_usage", lambda path: usage(0, 0, BYTES - 1))
    files.floats(VALUES).fill(1.0)
    assert files.refusal is not None and "No space left" in files.refusal


def test_no_more_files_are_open_than_the_process_can_spare(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, working_bytes_max=0, spare_bytes=0, files_max=2)
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
    files._close_returned()
    assert files.used_bytes == 0
    view.release()


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
        for _ in range(50):
            vectors = [files.floats(VALUES) for _ in range(3)]
            del vectors
            files._close_returned()
        over.set()
        assert 0 < counting.result() <= 3 * BYTES
    assert files.used_bytes == 0


def test_a_payload_is_moved_with_its_bytes(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    payload = bytes(range(256)) * 64
    kept = files.kept(payload)
    assert bytes(kept) == payload
    assert files.used_bytes == len(payload)


@pytest.mark.parametrize(("working_bytes_max", "mu"), [(0, 0.5), (4 * BYTES, 0.0)])
async def test_peers_with_files_and_with_memory_have_equal_bits(
    tmp_path: Path, mu: float, working_bytes_max: int
) -> None:
    """Rounds, a replay after a partition, and a newcomer that fetches the state."""
    network, policy = MemoryNetwork(), replace(POLICY, mu=mu)
    async with swarm(network) as made:
        files = [files_in(tmp_path, working_bytes_max=working_bytes_max) for _ in range(2)]
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
        everybody = (anna, boris, clara, late)
        await made.until(
            lambda: len({str(peer.versions()) for peer in everybody}) == 1, within_s=9.0
        )
        assert any(each["how"] == "replay" for each in clara.told("state_adopted"))
        assert late.told("state_fetched")
        for peer in (anna, clara, late):
            await made.until(partial(is_put_away, peer), within_s=5.0)
            assert not peer.told("state_in_memory")
            assert peer.learner is not None
            for state in peer.averager.states:
                assert state is not None
                base = peer.learner.parts[state.fragment].own.base
                assert base is state.theta, "the old array takes the room of the next round's"
        log = anna.averager._works[0].replay
        assert log is not None and len(log)
        assert files[0].used_bytes > sum(8 * part.size for part in made.layout.fragments)


async def test_a_peer_says_once_that_its_states_have_to_be_in_memory(tmp_path: Path) -> None:
    async with swarm(MemoryNetwork()) as made:
        none = StateFiles(tmp_path, allowed_bytes=lambda: 0.0, least_bytes=1)
        anna = await made.add("anna", state_files=none)
        await made.add("boris")
        await made.live(30.0)
        made.check()
        assert len(anna.told("state_in_memory")) == 1
        assert anna.averager.stats.rounds > 0
        await asyncio.sleep(1.0)

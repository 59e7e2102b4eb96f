"""Checkpoints and logs keep within the disk limit."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from peer.errors import QuotaFull
from peer.guest.enforcement import Guest
from peer.rules.limits import Limits
from peer.storage import checkpoint
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import folder_bytes
from peer.storage.tensor_file import Tensor
from peer.views.event_log import EventLog, read_events

VALUES = 500_000
TENSORS = {"theta": Tensor.of(np.zeros(VALUES, np.float32))}
SIZE = 4 * VALUES


class Allowed:
    """A disk limit that changes while the peer runs."""

    def __init__(self, number: float | None) -> None:
        self.number = number

    def __call__(self) -> float | None:
        return self.number


def test_older_checkpoints_give_way_to_a_new_one(tmp_path: Path) -> None:
    allowed = Allowed(None)
    folder = CheckpointFolder(tmp_path, keep=3, allowed_bytes=allowed)
    for _ in range(4):
        folder.save(TENSORS, {})
    assert folder.numbers() == [2, 3, 4]
    allowed.number = 3.7 * SIZE  # there is room for two and for the next one
    folder.save(TENSORS, {})
    assert folder.numbers() == [3, 4, 5]
    assert folder_bytes(tmp_path) <= allowed.number
    allowed.number = 2.7 * SIZE
    folder.save(TENSORS, {})
    assert folder.numbers() == [5, 6]


def test_the_newest_checkpoint_is_kept_until_the_next_is_written(tmp_path: Path) -> None:
    allowed = Allowed(1.9 * SIZE)
    folder = CheckpointFolder(tmp_path, allowed_bytes=allowed)
    folder.save(TENSORS, {"number": "first"})
    with pytest.raises(QuotaFull, match="shoal limits --disk"):
        folder.save(TENSORS, {"number": "second"})
    found = folder.load_latest()
    assert found is not None and found.meta == {"number": "first"}
    allowed.number = 2.7 * SIZE
    folder.save(TENSORS, {"number": "second"})
    assert folder.numbers() == [1, 2]


def test_a_lowered_quota_applies_before_the_next_checkpoint(tmp_path: Path) -> None:
    allowed = Allowed(None)
    folder = CheckpointFolder(tmp_path, keep=3, allowed_bytes=allowed)
    for _ in range(3):
        folder.save(TENSORS, {})
    folder.set_aside(tmp_path / f"{1:012d}")
    folder.prune()
    assert len(list(tmp_path.iterdir())) == 3
    allowed.number = 2.1 * SIZE
    folder.prune()
    assert folder.numbers() == [2, 3], "what is damaged goes first"
    allowed.number = 1.0
    folder.prune()
    assert folder.numbers() == [3], "one stays"
    CheckpointFolder(tmp_path / "nothing", allowed_bytes=allowed).prune()


def test_an_old_checkpoint_that_is_removed_by_another_process_first_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that both remove meet in it only after some hundred checkpoints."""
    remove = checkpoint._remove

    def remove_after_another(path: Path) -> None:
        remove(path)
        remove(path)

    monkeypatch.setattr(checkpoint, "_remove", remove_after_another)
    tensors = {"theta": Tensor.of(np.zeros(100, np.float32))}
    folder = CheckpointFolder(tmp_path, keep=3, allowed_bytes=Allowed(4e6))
    for _ in range(4):
        folder.save(tensors, {})
    CheckpointFolder(tmp_path, allowed_bytes=Allowed(1.0)).prune()
    assert folder.numbers() == [4]


def test_an_agent_and_its_trainer_may_both_remove_old_checkpoints(tmp_path: Path) -> None:
    """A folder that the other one had just removed ended the agent, or lost the checkpoint."""
    tensors = {"theta": Tensor.of(np.zeros(100, np.float32))}
    trainer = CheckpointFolder(tmp_path, keep=2, allowed_bytes=Allowed(4e6))
    agent = CheckpointFolder(tmp_path, allowed_bytes=Allowed(1.0))
    ended = threading.Event()

    def keep_house() -> None:
        while not ended.is_set():
            agent.prune()

    with ThreadPoolExecutor(1) as other:
        house = other.submit(keep_house)
        try:
            for _ in range(50):
                trainer.save(tensors, {})
        finally:
            ended.set()
        house.result()


def test_the_event_log_keeps_within_a_changed_limit(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=20_000)

    def write(count: int) -> None:
        for number in range(count):
            log.write("something", {"number": number, "text": "x" * 60})

    write(600)
    assert 20_000 < folder_bytes(tmp_path) <= 40_000
    log.keep_within(8_000)
    assert folder_bytes(tmp_path) <= 20_000, "what is allowed no more goes at once"
    write(1)
    assert folder_bytes(tmp_path) <= 4_000, "what was being written may be older"
    write(200)
    assert folder_bytes(tmp_path) <= 8_000
    assert len(list(read_events(path))) > 20
    log.keep_within(None)
    write(600)
    assert 20_000 < folder_bytes(tmp_path) <= 40_000
    log.close()


def test_files_without_a_name_count_as_used(tmp_path: Path) -> None:
    async def words() -> tuple[str, ...]:
        guest = Guest(tmp_path, trains=False)
        guest.limits = Limits(disk_bytes=1e9)
        guest.state_bytes = lambda: 500_000_000
        assert guest.disk.state == 2.5e8
        watching = asyncio.ensure_future(guest.watch_machine())
        for _ in range(1000):
            if guest.words() != ("1 GB of disk",):
                break
            await asyncio.sleep(0.01)
        watching.cancel()
        return guest.words()

    (tmp_path / "log").write_bytes(bytes(10_000_000))
    assert asyncio.run(words()) == ("0.51 GB of 1 GB of disk",)

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.errors import CheckpointDamaged, DiskFull
from peer.storage import checkpoint
from peer.storage.checkpoint import Checkpoint, CheckpointFolder, open_checkpoint
from peer.storage.tensor_file import Tensor, write_safetensors
from tests.processes import Child


def tensors(value: float = 1.0, size: int = 1000) -> dict[str, Tensor]:
    return {
        "theta": Tensor.of(np.full((size, 3), value, np.float32)),
        "odd": Tensor.of(np.arange(7, dtype=np.uint8)),
        "empty": Tensor.of(np.zeros((0, 4), np.float32)),
        "count": Tensor.of(np.array(3, np.int64)),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that reads as a broken disk does")
def test_a_checkpoint_that_the_disk_cannot_read_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """One bad sector in the newest checkpoint kept a peer from starting for ever."""
    folder = CheckpointFolder(tmp_path)
    for number in range(2):
        folder.save({"a": Tensor.of(np.zeros(3, np.float32))}, {"number": number})
    meta = folder.path_of(2) / "meta.json"
    meta.unlink()
    meta.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        meta.read_bytes()
    found = folder.load_latest()
    assert found is not None and found.meta == {"number": 0}
    assert folder.were_set_aside()


def test_a_saved_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "a" / "b")
    assert folder.load_latest() is None
    path = folder.save(tensors(2.5), {"step": 7, "name": "x"})
    loaded = folder.load_latest()
    assert loaded is not None
    assert loaded.path == path
    assert loaded.meta == {"step": 7, "name": "x"}
    with loaded.tensors() as read:
        assert sorted(read.keys()) == ["count", "empty", "odd", "theta"]
        assert (read.get_tensor("theta") == 2.5).all()
        assert read.get_tensor("theta").shape == (1000, 3)
        assert read.get_tensor("odd").tolist() == list(range(7))
        assert read.get_tensor("empty").shape == (0, 4)
        assert int(read.get_tensor("count")) == 3
    with (
        pytest.raises(CheckpointDamaged, match="does not contain tensor momentum"),
        loaded.tensors() as read,
    ):
        read.get_tensor("momentum")


def test_the_file_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(tensors(), {})
    read = safetensors.numpy.load_file(path / "tensors.safetensors")
    assert {name: array.shape for name, array in read.items()} == {
        "theta": (1000, 3),
        "odd": (7,),
        "empty": (0, 4),
        "count": (),
    }
    assert (read["theta"] == 1.0).all()


def test_a_tensor_may_be_written_in_pieces(tmp_path: Path) -> None:
    array = np.arange(1 << 21, dtype=np.float32)
    pieces: list[memoryview | NDArray[np.generic]] = [array[:5], array[5:100].data, array[100:]]
    path = CheckpointFolder(tmp_path).save({"x": Tensor("F32", array.shape, pieces)}, {})
    with open_checkpoint(path).tensors() as read:
        assert (read.get_tensor("x") == array).all()


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for value in range(5):
        folder.save(tensors(value), {"value": value})
    assert folder.numbers() == [4, 5]
    loaded = folder.load_latest()
    assert loaded is not None
    assert loaded.meta == {"value": 4}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000000004", "000000000005"]


def test_one_that_takes_the_place_of_the_newest_leaves_the_older_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for number in range(1, 3):
        folder.save(tensors(), {"number": number})
    folder.save(tensors(), {"number": 3}, in_place_of_newest=True)
    assert folder.numbers() == [1, 3]
    full = CheckpointFolder(tmp_path, allowed_bytes=lambda: 10.0)
    with pytest.raises(DiskFull):
        full.save(tensors(), {"number": 4}, in_place_of_newest=True)
    assert folder.numbers()[-1] == 3, "none takes its place"


def emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path / "tensors.safetensors", 100),
    "longer": lambda path: os.truncate(path / "tensors.safetensors", 1 << 16),
    "flipped": lambda path: flip(path / "tensors.safetensors", 600),
    "header flipped": lambda path: flip(path / "tensors.safetensors", 3),
    "no tensors": lambda path: (path / "tensors.safetensors").unlink(),
    "meta flipped": lambda path: flip(path / "meta.json", 90),
    "meta cut": lambda path: os.truncate(path / "meta.json", 20),
    "meta empty": lambda path: os.truncate(path / "meta.json", 0),
    "no meta": lambda path: (path / "meta.json").unlink(),
    "empty": emptied,
}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(tensors(1), {"value": 1})
    DAMAGES[damage](folder.save(tensors(2), {"value": 2}))
    with caplog.at_level(logging.WARNING):
        loaded = folder.load_latest()
    assert loaded is not None
    assert loaded.meta == {"value": 1}
    assert "checkpoint_damaged" in caplog.text
    assert "000000000002.damaged" in caplog.text
    assert (tmp_path / "000000000002.damaged").is_dir()
    # It is not looked at again, and its number is not used for something else.
    caplog.clear()
    assert folder.load_latest() is not None
    assert not caplog.records
    assert folder.save(tensors(3), {}).name == "000000000003"


def test_when_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for value in range(3):
        flip(folder.save(tensors(value), {}) / "meta.json", 5)
    assert folder.load_latest() is None
    assert folder.numbers() == []


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_header_is_read_or_refused_with_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("header")
    for content in (data, struct.pack("<Q", length) + data, struct.pack("<Q", len(data)) + data):
        (path / "tensors.safetensors").write_bytes(content)
        with suppress(CheckpointDamaged), Checkpoint(path, {}).tensors() as tensors:
            assert tensors is not None


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]},
        {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "X", "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        7,
    ],
)
def test_a_header_that_lies_about_a_tensor_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "tensors.safetensors").write_bytes(content)
    with pytest.raises(CheckpointDamaged), Checkpoint(tmp_path, {}).tensors():
        pass


# --- disk full --------------------------------------------------------------------------------


def test_too_little_space_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(tensors(1), {"value": 1})
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=5000))
    with pytest.raises(DiskFull, match=r"0\.0 MB are free; the older checkpoints are kept") as full:
        folder.save(tensors(2), {"value": 2})
    assert full.value.free_bytes == 5000
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["000000000001"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_writing_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(tensors(1), {"value": 1})

    def write(file: BinaryIO, *args: Any, **kwargs: Any) -> tuple[str, int]:
        file.write(b"some of it")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint, "write_safetensors", write)
    with pytest.raises(DiskFull):
        folder.save(tensors(2), {"value": 2})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["000000000001"]
    folder.save(tensors(3), {"value": 3})
    loaded = folder.load_latest()
    assert loaded is not None
    assert loaded.meta == {"value": 3}


def test_a_disk_without_room_for_the_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskFull):
        CheckpointFolder(tmp_path / "not" / "there").save(tensors(), {})


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        folder = CheckpointFolder(tmp_path, keep=3)
        folder.save(tensors(1, size=100_000), {"value": 1})  # 1.2 MB
        with pytest.raises(DiskFull):
            folder.save(tensors(2, size=100_000), {"value": 2})
        loaded = folder.load_latest()
        assert loaded is not None
        assert loaded.meta == {"value": 1}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- kill -9 at any moment --------------------------------------------------------------------

WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from peer.storage.checkpoint import CheckpointFolder, Tensor
folder = CheckpointFolder(Path(sys.argv[1]), keep=2)
latest = folder.load_latest()
start = latest.meta["value"] + 1 if latest else 1
print("from", start - 1, flush=True)
for value in itertools.count(start):
    array = np.full(200_000, value, np.float32)
    folder.save({"a": Tensor.of(array), "b": Tensor.of(array)}, {"value": value})
    print("saved", value, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_its_saved_checkpoints(tmp_path: Path) -> None:
    rng = random.Random(0)
    announced, save_s = 0, 0.02
    for _ in range(8):
        with Child("-c", WRITER, str(tmp_path)) as writer:
            begin = int(writer.line().split()[1])
            assert begin >= announced, "a saved checkpoint was lost"
            for _ in range(rng.randint(0, 2)):
                since = time.monotonic()
                begin = int(writer.line().split()[1])
                save_s = time.monotonic() - since
            time.sleep(rng.uniform(0, save_s))  # anywhere within the next save
            writer.kill()
            lines = writer.rest().splitlines()
        # The last line may be cut by the kill; what precedes it was certainly announced.
        announced = max([begin, *(int(line.split()[1]) for line in lines[:-1])])
        loaded = CheckpointFolder(tmp_path).load_latest()
        if loaded is None:
            assert announced == 0
            continue
        assert not list(tmp_path.glob("*.damaged")), "half a checkpoint was taken for one"
        value = loaded.meta["value"]
        assert value >= announced
        with loaded.tensors() as read:
            assert (read.get_tensor("a") == value).all()
            assert (read.get_tensor("b") == value).all()
    assert announced >= 5, "the kills came before anything was saved"


def test_a_save_waits_for_one_whose_task_has_been_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the cancelled task goes on: what it writes may neither be cleared away nor
    become the newest."""
    folder = CheckpointFolder(tmp_path)
    writing, go_on = threading.Event(), threading.Event()
    write = write_safetensors

    def slow(*args: Any, **own: Any) -> tuple[str, int]:
        writing.set()
        assert go_on.wait(30)
        return write(*args, **own)

    monkeypatch.setattr(checkpoint, "write_safetensors", slow)
    old = threading.Thread(target=folder.save, args=({}, {"state": "old"}))
    old.start()
    assert writing.wait(30)
    new = threading.Thread(target=folder.save, args=({}, {"state": "new"}))
    new.start()
    new.join(0.1)
    go_on.set()
    for thread in (old, new):
        thread.join(30)
    newest = folder.load_latest()
    assert newest is not None
    assert newest.meta == {"state": "new"}
    assert folder.numbers() == [1, 2]

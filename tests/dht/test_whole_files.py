"""Files and folders that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dht.whole_files import new_file, new_folder, read_json, write_whole


class Named(msgspec.Struct):
    name: str


def test_a_new_file_takes_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with new_file(path) as place:
        place.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """For root /dev is a folder like another one: an export to /dev/null took its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a device, a pipe or a socket"), new_file(pipe) as temporary:
        temporary.write_text("weights")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_written_file_outlives_a_power_cut_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext4 a cut within five seconds left the file with its temporary name."""
    synced: list[tuple[int, set[str]]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, {path.name for path in tmp_path.iterdir()}))

    monkeypatch.setattr(os, "fsync", noted)
    write_whole(tmp_path / "file", b"content")
    (written, _), folder = synced
    assert written == (tmp_path / "file").stat().st_ino
    assert folder == (tmp_path.stat().st_ino, {"file"})


def test_of_a_file_or_folder_that_is_not_finished_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), new_file(tmp_path / "file") as place:
        place.write_text("half")
        raise OSError("full")
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "folder") as place:
        (place / "half").touch()
        raise OSError("full")
    assert not list(tmp_path.iterdir())


def test_the_first_process_that_makes_a_folder_has_made_it(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "folder"
    with new_folder(folder) as mine:
        (mine / "file").write_text("the second")
        with new_folder(folder) as other:
            (other / "file").write_text("the first")
    assert (folder / "file").read_text() == "the first"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b'{"name": 1}', b'{"name": "\xff"}'])
def test_a_missing_or_damaged_record_is_none(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "record"
    if data is not None:
        path.write_bytes(data)
    assert read_json(path, Named) is None

"""The event log on disk: its owner, its size, and its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peer.views.event_log import EventLog, read_events
from tests.peer.full_disk import files_of_at_most


def test_every_file_of_a_log_names_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, owner={"peer": "12D3", "name": "anna"}, max_bytes=400)
    for number in range(20):
        log.write("tick", {"number": number})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events.jsonl", "events.jsonl.1"]
    for file in files:
        assert file.stat().st_size <= 400
        assert file.read_text().startswith('{"at":')
        assert '"event":"log","schema":1,"peer":"12D3","name":"anna"}' in file.read_text()


def test_renamed_files_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=300)
    for number in range(100):
        log.write("tick", {"number": number})
    log.close()
    numbers = [event["number"] for event in read_events(path)]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 300 // len('{"at":1795293515.99,"event":"tick","number":99}')


def test_the_listener_gets_every_event_that_is_written(tmp_path: Path) -> None:
    heard: list[Mapping[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", heard=heard.append, wall_time=lambda: 5.0)
    log.write("round", {"loss": float("nan")})
    log.close()
    assert heard == [{"at": 5.0, "event": "round", "loss": None}]


def test_an_old_file_that_cannot_be_deleted_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_bytes=200)
    for number in range(20):
        log.write("tick", {"number": number})

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(Path, "unlink", read_only)
    log.keep_within(100)
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    log.keep_within(100)
    log.close()
    assert len(list(tmp_path.iterdir())) < len(before)


def test_no_line_is_cut_off_where_a_disk_fills_in_the_middle_of_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, wall_time=lambda: 5.0)
    for size in range(100, 200):
        with files_of_at_most(size):
            log.write("tick", {"size": size})
        assert path.read_bytes()[-1:] in (b"", b"\n"), size
    assert log.problem == "No space left on device" or "large" in log.problem
    assert all(event["event"] == "tick" for event in read_events(path))
    log.write("tock", {})
    log.close()
    assert not log.problem and list(read_events(path))[-1]["event"] == "tock"


def test_a_full_disk_costs_events_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"at":1,"event":"old"}\n{"at":2,"eve')
    room = [5]
    real = os.write

    def until_full(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    def no_new_file(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", until_full)
        with monkeypatch.context() as fuller:
            fuller.setattr(os, "open", no_new_file)
            log = EventLog(path)
        for number in range(3):
            log.write("lost", {"number": number})
    log.write("kept", {"number": 3})
    log.write("kept", {"number": 4})
    log.close()
    log.write("late", {})
    events = [(event["event"], event.get("number")) for event in read_events(path)]
    assert events == [("old", None), ("kept", 3), ("kept", 4)]

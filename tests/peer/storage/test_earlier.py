"""The memory of a machine of a run: a record, a checkpoint, and the peers met."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from peer.run_file.sections import RunFile
from peer.storage.earlier import (
    LastSeen,
    load_last_seen,
    recall,
    save_last_seen,
    told_if_edited,
)

RUN = RunFile(name="old")
SEEN = LastSeen(run=RUN.canonical().decode(), at=1_795_380_000.0, tokens=1_234_567)


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "shoal"


def test_a_record_comes_back_with_a_run_file_that_has_the_id(tmp_path: Path) -> None:
    save_last_seen(tmp_path, SEEN)
    assert load_last_seen(tmp_path, RUN.run_id) == SEEN
    assert SEEN.run_file == RUN
    assert load_last_seen(tmp_path, RunFile(name="new").run_id) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"at": "now"}', b"\xff\xfe"])
def test_a_damaged_record_is_no_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last_seen.json").write_bytes(content)
    assert load_last_seen(tmp_path, RUN.run_id) is None


def test_the_newest_of_all_folders_counts(tmp_path: Path, data_home: Path) -> None:
    keeper = data_home / "keepers" / RUN.run_id[:16]
    save_last_seen(keeper, LastSeen(run=SEEN.run, at=10.0, tokens=1))
    assert recall(RUN.run_id) == load_last_seen(keeper, RUN.run_id)
    save_last_seen(tmp_path / "own", LastSeen(run=SEEN.run, at=20.0, tokens=2))
    newest = recall(RUN.run_id, [tmp_path / "own", None])
    assert newest is not None and newest.tokens == 2


def test_the_sentence_gives_date_tokens_and_company_where_they_are_known() -> None:
    assert SEEN.sentence == "last seen here on 2026-11-22 20:40 UTC at 1.23 M tokens"
    company = LastSeen(run="", at=0.0, names=("anna", "boris", "clara"))
    assert company.sentence == (
        "last seen here on 1970-01-01 00:00 UTC, with anna, boris and clara"
    )


def test_an_edited_run_file_is_told_of_where_the_run_before_it_has_a_checkpoint(
    tmp_path: Path,
) -> None:
    edited = msgspec.structs.replace(RUN, random_seed=RUN.random_seed + 1)
    save_last_seen(tmp_path, SEEN)
    assert told_if_edited(edited, tmp_path) is None, "it has no checkpoint"
    (tmp_path / "outer").mkdir()
    assert told_if_edited(RUN, tmp_path) is None
    told = told_if_edited(edited, tmp_path)
    assert told is not None and "had other settings: random_seed" in told

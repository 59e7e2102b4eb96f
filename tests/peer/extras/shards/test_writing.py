from __future__ import annotations

import hashlib
import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from peer import cli
from peer.data.text.tokenizing import ByteTokenizer
from peer.errors import DataUnavailable, NotWritten
from peer.extras.shards.writing import write_shards
from peer.run_file.reading import parse
from tests.peer.full_disk import files_of_at_most
from tests.peer.run_file.whole import whole


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("first " * 5000)
    lines = [json.dumps({"text": f"document {n} " * 20}) for n in range(400)]
    (folder / "more" / "b.jsonl").write_text("\n".join(lines))
    (folder / "README.md").write_text("not read")
    return folder


def test_shards_hold_all_documents_in_order_and_their_hashes_are_listed(
    texts: Path, tmp_path: Path
) -> None:
    written = write_shards([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=30_000)
    read = np.concatenate([np.fromfile(path, "<u2") for path in written.files])
    documents = bytes(read.astype(np.uint8)).decode().split("\0")
    assert documents[0] == "first " * 5000
    assert documents[1:-1] == [f"document {n} " * 20 for n in range(400)]
    assert documents[-1] == ""
    assert read.size == written.tokens
    assert {path.stat().st_size for path in written.files[:-1]} == {60_000}
    for line, path in zip(written.list_file.read_text().splitlines(), written.files, strict=True):
        assert line == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"


def test_the_printed_lines_are_a_run_file_that_can_be_read(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert cli.run(["data", "prepare", str(texts), "--out", str(tmp_path / "shards")]) == 0
    file = tmp_path / "run.toml"
    printed = capsys.readouterr().out.replace("[data]", "[data]\nheld_out = 0.4")
    assert "tokens of a vocabulary of 256, in 1 shard\n" in printed
    file.write_text(whole("name = 'shards'\n[evaluation]\nsequences = 8\n" + printed))
    assert cli.run(["run", "check", str(file), "--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"] == "files: 1 files in 1 sources, 8 held-out sequences"
    (tmp_path / "shards" / "tokens-00000.bin").write_bytes(b"damaged!")
    assert cli.run(["run", "check", str(file), "--data", str(tmp_path)]) == 2
    assert "the run file demands" in capsys.readouterr().err
    assert cli.run(["run", "check", str(file), "--data", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_source_of_written_shards_is_accepted(texts: Path, tmp_path: Path) -> None:
    written = write_shards([texts / "a.txt"], ByteTokenizer(), tmp_path / "out")
    recipe = tomllib.loads('[data]\nrecipe = "files"\n' + written.source)
    assert recipe["data"]["sources"][0]["dtype"] == "uint16"
    parse('[data]\nrecipe = "files"\n' + written.source)


def test_shards_are_not_written_over_others_nor_of_nothing(texts: Path, tmp_path: Path) -> None:
    write_shards([texts], ByteTokenizer(), tmp_path / "out")
    with pytest.raises(NotWritten, match="it is there already"):
        write_shards([texts], ByteTokenizer(), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataUnavailable, match=r"there are no files of \.txt"):
        write_shards([tmp_path / "empty"], ByteTokenizer(), tmp_path / "other")
    with pytest.raises(DataUnavailable, match=r"README\.md is no folder and no file of \.txt"):
        write_shards([texts / "README.md"], ByteTokenizer(), tmp_path / "other")


def test_what_is_no_file_is_not_read(texts: Path, tmp_path: Path) -> None:
    (texts / "folder.txt").mkdir()
    (texts / "gone.txt").symlink_to("nowhere")
    os.mkfifo(texts / "pipe.txt")
    written = write_shards([texts], ByteTokenizer(), tmp_path / "out")
    assert written.tokens
    with pytest.raises(DataUnavailable, match=r"pipe\.txt is no folder and no file of \.txt"):
        write_shards([texts / "pipe.txt"], ByteTokenizer(), tmp_path / "other")


def test_the_current_folder_is_named_in_the_source(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    written = write_shards([texts], ByteTokenizer(), Path())
    assert 'files = ["out/tokens.sha256#' in written.source


def test_a_tokenizer_file_needs_the_end_of_documents(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "data",
        "prepare",
        str(texts),
        "--out",
        str(tmp_path / "o"),
        "--tokenizer",
        "t.json",
    ]
    assert cli.run(arguments) == 2
    assert "name the token with --end-token" in capsys.readouterr().err


def test_a_preparation_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "broken.jsonl").write_text("no object\n")
    (tmp_path / "empty.jsonl").write_text("")
    for wrong in ("texts", "broken.jsonl", "empty.jsonl", "missing.txt"):
        with pytest.raises(DataUnavailable):
            write_shards([tmp_path / wrong], ByteTokenizer(), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_empty_folder_but_one_that_was_there(
    texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    for name in ("out", "there"):
        with files_of_at_most(1), pytest.raises(NotWritten, match="too large"):
            write_shards([texts], ByteTokenizer(), tmp_path / name)
    assert not (tmp_path / "out").exists()
    assert not any((tmp_path / "there").iterdir())
    # Shards that were written are kept: a second try replaces them.
    small = 2 * 100
    with files_of_at_most(small), pytest.raises(NotWritten, match="too large"):
        write_shards([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=100)
    assert [path.stat().st_size for path in (tmp_path / "out").glob("*.bin")][:1] == [small]

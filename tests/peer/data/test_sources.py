from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dht.identity import PeerId
from peer.data.batches.sequences import is_held_out
from peer.data.finding import stdlib_files
from peer.data.sources import check_cache, check_data, open_data
from peer.data.text.formats import CHUNK_BYTES
from peer.data.text.workers import Workers
from peer.errors import DataUnavailable, ExtraMissing
from peer.run_file.sections import (
    CustomData,
    Evaluation,
    FilesData,
    FileSource,
    GptModel,
    HfData,
    PythonStdlibData,
    RunFile,
    TextData,
)

ANNA, BORIS = PeerId("anna"), PeerId("boris")


def text_run(held_out: float = 0.2, length: int = 64) -> RunFile:
    return RunFile(data=TextData(files=["**/*.txt"], held_out=held_out, sequence_length=length))


def write_corpus(folder: Path, *, files: int = 3, chunks: int = 20) -> bytes:
    whole = b""
    for number in range(files):
        rng = np.random.default_rng(number)
        content = rng.integers(32, 127, chunks * CHUNK_BYTES, dtype=np.uint8).tobytes()
        path = folder / f"part{number}" / "a.txt"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        whole += content
    return whole


def open_text(tmp_path: Path, run: RunFile | None = None, peer: PeerId = ANNA) -> Any:
    return open_data(
        run or text_run(), peer_id=peer, cache_dir=tmp_path / "cache", data_dir=tmp_path / "data"
    )


def test_nothing_held_out_is_trained_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", files=2, chunks=6)
    run = RunFile(
        data=TextData(files=["**/*.txt"], held_out=0.3, sequence_length=64),
        evaluation=Evaluation(sequences=1 << 20),
    )
    data = open_text(tmp_path, run)
    everything = data.train.next(2 * 12 * CHUNK_BYTES // 64)  # two epochs at least
    trained = {row[:32].tobytes() for row in everything.astype(np.uint8)}
    # Random text: 32 equal bytes mean the same place. Look at every place of the held-out part.
    flat = data.held_out[:, :-1].astype(np.uint8).ravel()
    assert flat.size >= CHUNK_BYTES
    places = np.lib.stride_tricks.sliding_window_view(flat, 32)
    assert not any(place.tobytes() in trained for place in places)


def test_about_the_stated_share_is_held_out(tmp_path: Path) -> None:
    whole = write_corpus(tmp_path / "data", files=4, chunks=100)
    run = RunFile(
        data=TextData(files=["**/*.txt"], held_out=0.2, sequence_length=64),
        evaluation=Evaluation(sequences=1 << 20),
    )
    share = open_text(tmp_path, run).held_out[:, :-1].size / len(whole)
    assert 0.14 < share < 0.26


def test_all_peers_hold_out_the_same_and_train_in_their_own_order(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    anna, boris = open_text(tmp_path), open_text(tmp_path, peer=BORIS)
    assert (anna.held_out == boris.held_out).all()
    assert not (anna.train.next(8) == boris.train.next(8)).all()


def test_a_tiny_corpus_still_has_a_held_out_part(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", files=1, chunks=2)
    data = open_text(tmp_path, text_run(held_out=1e-9))
    assert data.held_out.shape[0] > 0
    assert data.train.next(4).shape == (4, 65)


def test_a_file_of_the_recipe_text_is_text_whatever_it_is_called(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", files=1)
    (tmp_path / "data/part0/a.txt").rename(tmp_path / "data/part0/notes.bin")
    recipe = TextData(files=["part0/notes.bin", "**/notes.*"], held_out=0.2, sequence_length=64)
    data = open_text(tmp_path, RunFile(data=recipe))
    assert data.description.startswith("text: 1 files")
    assert 32 <= data.train.next(4).min() <= data.train.next(4).max() < 127


def test_text_of_bytes_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "data")
    monkeypatch.setattr(Workers, "do", None)
    assert open_text(tmp_path).train.next(8).shape == (8, 65)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    before = open_text(tmp_path).train.next(200)
    for path in (tmp_path / "data").glob("*/a.txt"):
        path.write_bytes(path.read_bytes().swapcase())
    assert not (open_text(tmp_path).train.next(200) == before).all()


@pytest.mark.parametrize(
    ("files", "reason"), [([], "matches '\\*\\*/\\*.txt'"), ([b"too short"], "no sequence of 64")]
)
def test_missing_or_too_little_text_is_reported(
    tmp_path: Path, files: list[bytes], reason: str
) -> None:
    (tmp_path / "data").mkdir()
    for content in files:
        (tmp_path / "data" / "a.txt").write_bytes(content)
    with pytest.raises(DataUnavailable, match=reason):
        open_text(tmp_path)


def test_a_pattern_that_is_none_is_reported(tmp_path: Path) -> None:
    for recipe in (TextData(files=["**x"]), FilesData(sources=[FileSource(files=["**x"])])):
        with pytest.raises(DataUnavailable, match=r"'\*\*x'"):  # from 3.13 on it is one
            check_data(RunFile(data=recipe), tmp_path, cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def stdlib_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stdlib")


def test_the_standard_library_is_there_without_a_download(stdlib_cache: Path) -> None:
    run = RunFile(model=GptModel(), data=PythonStdlibData())
    data = open_data(run, peer_id=ANNA, cache_dir=stdlib_cache, data_dir=stdlib_cache)
    text = data.train.next(64).astype(np.uint8).tobytes()
    assert b"def " in text
    assert b"self" in text
    assert data.held_out.shape == (128, 129)
    assert sum(path.stat().st_size for _, path in stdlib_files()) > 3_000_000


def test_a_module_is_held_out_by_its_name_in_every_version(stdlib_cache: Path) -> None:
    """After an empty module each one was held out by the name of one before it."""
    run = RunFile(data=PythonStdlibData(), evaluation=Evaluation(sequences=1 << 20))
    data = open_data(run, peer_id=ANNA, cache_dir=stdlib_cache, data_dir=stdlib_cache)
    held = data.held_out[:, :-1].astype(np.uint8).tobytes()
    modules = stdlib_files()
    assert min(path.stat().st_size for _, path in modules) == 0
    wrong = [
        name
        for name, path in modules
        if path.stat().st_size > 6000
        and (path.read_bytes()[:5000] in held) != is_held_out(name.encode(), run.data.held_out)
    ]
    assert wrong == []


def test_a_cache_that_cannot_be_made_is_reported_before_anything_starts(tmp_path: Path) -> None:
    """With a home that is read-only, and --directory elsewhere, a run was founded first."""
    (tmp_path / "file").touch()
    with pytest.raises(DataUnavailable, match=r"data cannot be made: Not a dir.*XDG_DATA_HOME"):
        check_cache(RunFile(), tmp_path / "file" / "data")
    check_cache(RunFile(data=CustomData()), tmp_path / "file" / "data")
    check_cache(RunFile(), tmp_path / "new" / "data")


def test_custom_data_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.data"):
        open_text(tmp_path, RunFile(data=CustomData()))


def test_missing_data_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RunFile(data=TextData(files=["*.txt"]))
    with pytest.raises(DataUnavailable, match="--data"):
        check_data(text, tmp_path / "not" / "there", cache_dir=tmp_path / "cache")
    (tmp_path / "a.txt").write_text("some")
    check_data(text, tmp_path, cache_dir=tmp_path / "cache")
    check_data(RunFile(), tmp_path, cache_dir=tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing):
        check_data(RunFile(data=HfData(dataset="a/b")), tmp_path, cache_dir=tmp_path / "cache")

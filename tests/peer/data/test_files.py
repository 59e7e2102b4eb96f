from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dht.identity import PeerId
from peer.data import files, pieces
from peer.data.batches.prefetch import Prefetched
from peer.data.batches.sequences import is_held_out
from peer.data.files import hosts_of
from peer.data.sources import check_data, open_data
from peer.data.text import downloads, formats, token_cache
from peer.data.text.downloads import Downloads, Tell
from peer.data.text.token_cache import TokenCache, keep_below
from peer.errors import DataUnavailable, ExtraMissing
from peer.run_file.places import Place, pinned
from peer.run_file.sections import CustomModel, FilesData, FileSource, RunFile
from tests.peer.data.file_corpus import (
    ANNA,
    LENGTH,
    InThisProcess,
    opened,
    run_of,
    texts,
    write,
)

BORIS = PeerId("boris")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (formats, files):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(formats, "PIECE_TOKENS", 1 << 13)
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1 << 8)
    monkeypatch.setattr(pieces, "BLOCK_TOKENS", 1 << 6)


def text_of(batch: np.ndarray[Any, Any]) -> str:
    return bytes(batch[:, :-1].astype(np.uint8).ravel().tolist()).decode()


NAMES = ["a.txt", "a.jsonl", "a.parquet", "a.npy", "a.bin"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_its_documents_and_holds_some_out(name: str, tmp_path: Path) -> None:
    documents = texts(400)
    write(tmp_path / "data", name, documents)
    data = opened(run_of(FileSource(files=[f"data/{name}"])), tmp_path)
    whole = "\0".join(documents) if name.endswith((".npy", ".bin", "l")) else "".join(documents)
    flat = whole.replace("\0", "")
    rows = data.train.next(3 * len(whole) // LENGTH)
    # A window may lie across the end of a piece or what is held out: most do not.
    seen = [bytes(row.astype(np.uint8).tolist()).decode().replace("\0", "") for row in rows]
    assert sum(text in flat for text in seen) > 0.8 * len(seen)
    assert len(set(seen)) > 0.3 * len(flat) / LENGTH
    held = [bytes(row.astype(np.uint8).tolist()).decode() for row in data.held_out]
    trained = set(text_of(rows))
    assert trained
    assert not any(text in text_of(rows[:50]) for text in held)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_whole_documents_are_held_out_or_trained_on(name: str, tmp_path: Path) -> None:
    documents = texts(300)
    write(tmp_path, name, documents)
    data = opened(run_of(FileSource(files=[name]), held_out=0.3), tmp_path)
    held = {text for text in documents if is_held_out(text.encode(), 0.3)}
    starts = {text[:10] for text in held if len(text) > 10}
    shown = text_of(data.train.next(4000))
    assert not any(start in shown for start in starts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_the_pieces_of_a_file_are_all_of_it(name: str, tmp_path: Path) -> None:
    documents = [f"{n:03}" + "é" * 17 for n in range(300)]  # lines of 64 bytes: no remainder
    write(tmp_path, name, documents)
    if name == "a.jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
        (tmp_path / name).write_text("\n".join(line.ljust(46) for line in lines))
        assert len(lines[0].ljust(46).encode()) == 63
    file = formats.DataFile(str(tmp_path / name), name)
    count = formats.piece_count(file)
    assert count > 1
    found = [item for piece in range(count) for item in formats.items(file, piece)]
    assert "".join(item.text for item in found) == "".join(documents)
    assert sum(item.is_end for item in found) == (1 if name == "a.txt" else len(documents))


SEVERAL = (
    FileSource(files=["web/*.jsonl"], weight=3.0),
    FileSource(files=["code", "books/b.txt"], weight=1.0),
    FileSource(files=["shards"], weight=2.0),
)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    for number in range(3):
        write(tmp_path, f"web/{number}.jsonl", texts(120, seed=number))
    for number in range(40):
        write(tmp_path, f"code/{number // 9}/{number}.txt", texts(3, seed=100 + number))
    write(tmp_path, "books/b.txt", texts(300, seed=7))
    write(tmp_path, "shards/a.bin", texts(300, seed=8))
    write(tmp_path, "shards/b.npy", texts(300, seed=9))
    return tmp_path


def test_a_stream_resumes_at_any_sequence_whatever_is_read_ahead_and_by_whom(
    several: Path,
) -> None:
    run = run_of(*SEVERAL)
    expected = opened(run, several).train.next(1500)
    states = []
    ahead = Prefetched(opened(run, several, workers=3).train)
    at = 0
    for size in [1, 7, 64, 300, 5, 128, 200, 33]:
        assert (ahead.next(size) == expected[at : at + size]).all()
        at += size
        states.append((at, ahead.state()))
    for workers, (position, state) in enumerate(states, 1):
        assert all(type(value) is int for value in state.values())
        again = Prefetched(opened(run, several, workers=workers).train)
        again.restore_position(state)
        assert (again.next(90) == expected[position : position + 90]).all()


def test_sequences_are_drawn_from_sources_by_weight(several: Path) -> None:
    data = opened(run_of(*SEVERAL), several)
    rows = data.train.next(9000)
    state = data.train.state()
    assert state["sequence"] == 9000
    text = [bytes(row.astype(np.uint8).tolist()).decode(errors="replace") for row in rows]
    marked = [int(t.split("<")[1].split(".")[0]) for t in text if t.count(".") and "<" in t[:-5]]
    of = [0 if m < 3 else 2 if m in (8, 9) else 1 for m in marked]
    shares = [of.count(n) / len(of) for n in range(3)]
    assert np.abs(np.array(shares) - [3 / 6, 1 / 6, 2 / 6]).max() < 0.06


def test_peers_hold_out_the_same_and_read_in_their_own_order(several: Path) -> None:
    run = run_of(*SEVERAL)
    anna, boris = opened(run, several), opened(run, several, BORIS)
    assert anna.held_out.shape == (8, LENGTH + 1)
    assert (anna.held_out == boris.held_out).all()
    assert not (anna.train.next(30) == boris.train.next(30)).all()


def test_each_pass_over_a_source_reads_all_of_it(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, f"{number}.bin", texts(400, seed=number))
    total = sum((tmp_path / f"{n}.bin").stat().st_size // 2 for n in range(3))
    data = opened(run_of(FileSource(files=["*.bin"]), held_out=0.01), tmp_path)
    seen = text_of(data.train.next(total // LENGTH))
    wanted = [text for n in range(3) for text in texts(400, seed=n)]
    found = sum(text[1:8] in seen for text in wanted) / len(wanted)
    assert found > 0.6  # others lie across windows, which are in another order


def test_a_batch_has_sequences_of_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a peer read one file to its end before the next one: batches were of one subject."""
    for number in range(6):
        write(tmp_path, f"{number}.bin", [f"file {number} " * 100])
    run = run_of(FileSource(files=["*.bin"]), held_out=0.01)
    monkeypatch.setattr(files, "PIECES_TOGETHER", 3)
    seen = [set(re.findall(r"file (\d) ", text_of(opened(run, tmp_path, who).train.next(40))))
            for who in (ANNA, BORIS)]  # fmt: skip
    assert [len(numbers) for numbers in seen] == [3, 3]


def test_a_position_that_cannot_be_is_refused(several: Path) -> None:
    stream = opened(run_of(*SEVERAL), several).train
    state = stream.state()
    for name in ("sequence", "1/visit", "2/window"):
        with pytest.raises(ValueError, match=r"negative|at least 0"):
            stream.restore_position({**state, name: -1})


# --- the cache ----------------------------------------------------------------------------------


def test_a_damaged_entry_of_the_cache_is_made_again(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", texts(300))
    run = run_of(FileSource(files=["a.jsonl"]))
    whole = opened(run, tmp_path)
    expected = whole.train.next(1200)
    entries = sorted((tmp_path / "cache").rglob("*.tokens"))
    assert len(entries) > 4
    for number, entry in enumerate(entries):
        content = bytearray(entry.read_bytes())
        if number % 4 == 0:
            content[64:] = bytes(byte ^ 1 for byte in content[64:])
        entry.unlink()  # a stream may have mapped it
        entry.write_bytes(
            [bytes(content), b"", bytes(content[:100]), b"x" * len(content)][number % 4]
        )
    again = opened(run, tmp_path)
    assert (again.train.next(1200) == expected).all()
    assert (again.held_out == whole.held_out).all()
    assert all(TokenCache(tmp_path / "cache" / "tokens").read(e.stem) for e in entries)


def test_an_entry_is_used_again_and_not_for_another_text_or_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.jsonl", texts(300))
    run = run_of(FileSource(files=["a.jsonl"]))
    opened(run, tmp_path).train.next(400)
    entries = set((tmp_path / "cache").rglob("*.tokens"))
    with monkeypatch.context() as patched:
        patched.setattr(InThisProcess, "do", None)  # nothing is left to do
        opened(run, tmp_path).train.next(400)
    opened(run_of(FileSource(files=["a.jsonl"]), held_out=0.2), tmp_path).train.next(400)
    write(tmp_path, "a.jsonl", texts(301))
    opened(run, tmp_path).train.next(400)
    assert len(set((tmp_path / "cache").rglob("*.tokens"))) >= 3 * len(entries) - 2


def test_processes_that_fill_the_cache_at_once_agree(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", texts(300))
    run = run_of(FileSource(files=["a.jsonl"]))
    batches: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda: batches.append(opened(run, tmp_path).train.next(300).tobytes())
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == 4
    assert len(set(batches)) == 1
    assert not list((tmp_path / "cache").rglob(".*"))


def test_the_least_recently_used_entries_leave_a_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "RECENTLY_USED_S", 0.0)
    cache = TokenCache(tmp_path, bytes_max=10_000)
    tokens = np.arange(1000, dtype=np.uint16)
    for number in range(20):
        cache.write(f"{number:02}", tokens, tokens[:10])
        if number:
            assert cache.read("00") is not None  # the first is used again and again
    kept = [int(path.stem) for path in tmp_path.rglob("*.tokens")]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.tokens")) <= 10_000
    assert 0 in kept
    assert 19 in kept


def test_a_file_that_was_just_used_stays_in_a_full_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    keep_below(tmp_path, 10)
    assert (tmp_path / "a").exists()


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", texts(100))
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataUnavailable, match="Not a directory; tokens are kept there: free some"):
        opened(run_of(FileSource(files=["a.jsonl"])), tmp_path)


# --- malformed files ----------------------------------------------------------------------------


def problem(tmp_path: Path, name: str, content: bytes | None = None, **source: Any) -> str:
    """The error that reading a file with this content raises."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    run = run_of(FileSource(files=[name], **source))
    with pytest.raises(DataUnavailable) as caught:
        opened(run, tmp_path).train.next(1500)
    return caught.value.reason


def test_a_line_without_the_text_is_named(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in texts(200)]
    for wrong, words in (
        ('{"body": "x"}', "has no text in the field 'text', but the fields body; set text_field"),
        ('{"text": 3}', "has no text in the field 'text'"),
        ("[1]", "has no text in the field 'text', but no fields"),
        ('{"text": "x', "is not JSON (JSON is malformed: invalid character (byte 11)); rem"),
        ("\udcff{}", "is not JSON"),
        # Text of Python that was cut inside a character. It was "Input data was truncated".
        (r'{"text": "\ud83d"}', r"contains half of a character (\ud83d, a lone surrogate); "),
        (r'{"text": "x \ude00 y"}', r"contains half of a character (\ude00, "),
        (r'{"a": ["\ud83d\u0041"], "text": "x"}', r"contains half of a character (\ud83d, "),
        (r'{"text": "\ud83d', "is not JSON"),
        (r'{"text": NaN, "a": "\ud83d\ude00"}', "is not JSON"),
    ):
        content = "\n".join([*lines[:150], wrong, *lines[150:]]).encode(errors="surrogateescape")
        assert f"a.jsonl, line 151: {words}" in problem(tmp_path, "a.jsonl", content)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    content = b"".join(json.dumps({"text": text}).encode() + b"\r\n" for text in texts(200))
    file = formats.DataFile(str(tmp_path / "a.jsonl"), "a.jsonl")
    found = []
    for begin in (b"", codecs.BOM_UTF8):
        file.path.write_bytes(begin + content)
        count = formats.piece_count(file)
        found.append([item for piece in range(count) for item in formats.items(file, piece)])
    assert found[0] == found[1]
    assert [item.text for item in found[0]] == texts(200)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LINE_MAX_BYTES", 1 << 10)
    lines = [json.dumps({"text": text}) for text in texts(80)]
    content = "\n".join([*lines, json.dumps({"text": "x" * 10_000}), *lines]).encode()
    assert "a.jsonl, line 81: is longer than" in problem(tmp_path, "a.jsonl", content)


def test_text_in_another_encoding_is_named_with_its_byte(tmp_path: Path) -> None:
    content = "".join(texts(200)).encode()
    reason = problem(tmp_path, "a.txt", content[:5000] + "ä".encode("latin-1") + content[5000:])
    assert "a.txt: byte 5000 is not UTF-8; convert the file" in reason


def test_characters_of_several_bytes_are_never_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("日本語テキスト𝄞é" * 2000)
    rows = opened(run_of(FileSource(files=["a.txt"]), held_out=0.2), tmp_path).train.next(400)
    assert rows.shape == (400, LENGTH + 1)


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_a_truncated_parquet_file_is_reported(tmp_path: Path, keep: int) -> None:
    write(tmp_path, "a.parquet", texts(300))
    content = (tmp_path / "a.parquet").read_bytes()
    reason = problem(tmp_path, "a.parquet", content[:keep])
    assert "a.parquet is no whole parquet file" in reason
    assert "copy, download or write it again" in reason


def test_a_damaged_parquet_file_is_reported_with_its_row_groups(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", texts(300))
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:3000] = bytes(2996)
    assert "a.parquet, row groups 0 to" in problem(tmp_path, "a.parquet", bytes(content))


def test_a_parquet_file_without_the_column_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", texts(300))
    reason = problem(tmp_path, "a.parquet", text_field="body")
    assert "no text in the column 'body'; its columns are text, id: set text_field" in reason
    assert "no text in the column 'id'" in problem(tmp_path, "a.parquet", text_field="id")


def test_of_two_columns_with_one_name_none_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(texts(300))] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert "no text in the column 'text'; its columns are text, text" in problem(
        tmp_path, "a.parquet"
    )


def saved(values: np.ndarray[Any, Any]) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def headed(shape: str) -> bytes:
    """The bytes of a .npy file that says to have this shape."""
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(2000)


STRANGE = np.where(np.arange(20_000) == 12_345, 256, 255).astype(np.uint16)
"""Tokens of which the model does not have one."""
LACKED = "has the token 256 at index 12345; the model has the tokens 0 to 255"
NOTHING = "has no tokens; copy, download or write it again, or remove it"
NO_ARRAY = "a.npy is no whole .npy file"
NO_SEQUENCE = "no sequence of 16 tokens"


MALFORMED: list[tuple[str, bytes | None, str]] = [
    ("a.bin", bytes(4001), "a.bin has 4001 bytes, which is no whole number of uint16 tokens"),
    ("a.bin", b"", f"a.bin {NOTHING}"),
    ("a.bin", STRANGE.tobytes(), f"a.bin {LACKED}"),
    ("a.npy", saved(np.empty(0, np.uint16)), f"a.npy {NOTHING}"),
    ("a.npy", saved(STRANGE), f"a.npy {LACKED}"),
    ("a.npy", saved(np.zeros((10, 10), np.uint16)), "has shape (10, 10) of uint16; a shard is"),
    ("a.npy", saved(np.zeros(1000)), "has shape (1000,) of float64"),
    ("a.npy", saved(np.full(1000, -1, np.int64)), "has the token -1 at index 0"),
    ("a.npy", saved(np.array([{}])), NO_ARRAY),  # objects are never unpickled
    ("a.npy", saved(np.zeros(1000, np.uint16))[:-10], NO_ARRAY),
    *(("a.npy", headed(shape), NO_ARRAY) for shape in ("((((", "(True,)", "(-1,)")),
    *(("a.npy", headed(shape), "a.npy ") for shape in (f"({'9' * 40},)", "()")),
    ("a.md", b"some text", "a.md has none of the formats .txt, .jsonl"),
    ("a.txt", None, "matches 'a.txt'; put the files there or pass"),
    ("a.txt", b"short", f"{NO_SEQUENCE}; raise data.held_out"),
    ("b.txt", b"", NO_SEQUENCE),
]


@pytest.mark.parametrize("case", range(len(MALFORMED)))
def test_a_file_that_cannot_be_used_is_reported(tmp_path: Path, case: int) -> None:
    name, content, words = MALFORMED[case]
    assert words in problem(tmp_path, name, content)


def test_shards_have_whole_tokens_of_their_type(tmp_path: Path) -> None:
    reason = problem(tmp_path, "a.bin", bytes(4002), dtype="uint32")
    assert "no whole number of uint32 tokens" in reason


@pytest.mark.skipif(sys.platform == "darwin", reason="its names of files are UTF-8")
def test_a_file_name_that_is_no_text_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Earlier, the processes that tokenize could not be told it, and training ended."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"good")
    with pytest.raises(DataUnavailable) as caught:
        checked(run_of(FileSource(files=["folder"])), tmp_path)
    assert r"'folder/caf\udce9.txt'" in caught.value.reason
    str(caught.value).encode()


def test_a_missing_package_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.parquet", texts(30))
    run = run_of(FileSource(files=["a.parquet"]))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'shoal\[hf\]'"):
        opened(run, tmp_path)


def checked(run: RunFile, tmp_path: Path) -> None:
    check_data(run, tmp_path, cache_dir=tmp_path / "cache")


def test_local_files_are_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3))
    with pytest.raises(DataUnavailable, match="has 3 bytes"):
        checked(run_of(FileSource(files=["a.bin"])), tmp_path)
    with pytest.raises(DataUnavailable, match=r"matches 'b.bin'"):
        checked(run_of(FileSource(files=["b.bin"])), tmp_path)
    url = f"https://example.org/a.bin#sha256={'00' * 32}"
    checked(run_of(FileSource(files=[url])), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"a,b", "a.csv has none of the formats .txt, .jsonl"),
        ("a.jsonl", b'{"text": "a"}\n{nonsense', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"body": "a"}', "a.jsonl, line 1: has no text in the field 'text'"),
        ("a.txt", b"some text\xff", "a.txt: byte 9 is not UTF-8"),
        ("a.bin", b"\x00\x01" * 9, "a.bin has the token 256 at index 0; the model has the tokens"),
    ],
)
def test_the_beginning_of_local_files_is_checked_before_anything_starts(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    """Earlier, the run was founded, and training then met the file."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_bytes(b"good")
    checked(run_of(FileSource(files=["folder"])), tmp_path)
    with pytest.raises(DataUnavailable) as caught:
        checked(run_of(FileSource(files=["folder", name])), tmp_path)
    assert says in caught.value.reason


def test_so_much_of_local_files_is_checked_early_that_it_takes_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.txt", texts(2000))
    with (tmp_path / "a.txt").open("ab") as file:
        file.write(b"\xff")
    monkeypatch.setattr(formats, "BEGINNING_CHARACTERS", 1 << 10)
    checked(run_of(FileSource(files=["a.txt"])), tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    monkeypatch.setattr(files, "LOOKED_INTO_FILES", 2)
    sources = [FileSource(files=["a.txt", "b.txt"]), FileSource(files=["a.txt"])]
    checked(run_of(*sources), tmp_path)
    with pytest.raises(DataUnavailable, match="not UTF-8"):
        checked(run_of(sources[0]), tmp_path)


# --- hashes, lists, downloads -------------------------------------------------------------------


class Copied(Downloads):
    """Downloads from a folder."""

    def __init__(self, folder: Path, into: Path) -> None:
        super().__init__(into)
        self.asked: list[str] = []
        self._from, self._into = folder, into
        self._one_at_a_time = threading.Lock()

    def _fetched(self, place: Place, tell: Tell | None) -> Path:
        assert place.sha256 is not None
        self._into.mkdir(exist_ok=True)
        path = self._into / place.sha256
        with self._one_at_a_time:  # as the lock on the file that is downloaded to
            if not path.exists():
                self.asked.append(place.name)
                path.write_bytes((self._from / place.name.rpartition("/")[2]).read_bytes())
        return path


def test_the_hosts_of_downloads_can_be_told_before_joining() -> None:
    pin = "00" * 32
    recipe = FilesData(
        sources=[
            FileSource(files=["a.txt", pinned("https://b.example.org:444/x/y.bin", pin)]),
            FileSource(files=[pinned("https://a.example.org/z.bin", pin)]),
        ],
        tokenizer=pinned("https://B.example.org/t.json", pin),
        end_token="<e>",
    )
    assert hosts_of(recipe) == ("a.example.org", "b.example.org")


def test_hashes_of_local_files_are_checked_early_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a run was founded whose first file was not the one that its author meant."""
    right, wrong = write(tmp_path, "a.bin", texts(200)), "00" * 32
    for name in ("a.bin", "a.txt"):  # small files of text are read together
        write(tmp_path, name, texts(200))
        with pytest.raises(DataUnavailable, match=f"the run file demands {wrong}: replace it"):
            checked(run_of(FileSource(files=[pinned(name, wrong)])), tmp_path)
    checked(run_of(FileSource(files=[pinned("a.bin", right)])), tmp_path)
    (tmp_path / "l.sha256").write_text(f"{wrong}  a.bin\n")
    with pytest.raises(DataUnavailable, match=f"the run file demands {wrong}: replace it"):
        checked(run_of(FileSource(files=["l.sha256"])), tmp_path)
    monkeypatch.setattr(files, "HASHED_EARLY_BYTES", (tmp_path / "a.bin").stat().st_size - 1)
    checked(run_of(FileSource(files=[pinned("a.bin", wrong)])), tmp_path)


def test_a_file_that_differs_from_its_hash_is_refused(tmp_path: Path) -> None:
    right = write(tmp_path, "a.bin", texts(200))
    name = pinned("a.bin", right)
    opened(run_of(FileSource(files=[name])), tmp_path).train.next(10)
    write(tmp_path, "a.bin", texts(201))
    assert f"the run file demands {right}: replace it" in problem(tmp_path, name)


def wait_for_pieces() -> None:
    """Wait for the pieces that are being read: they have passed their check of the file."""
    for thread in threading.enumerate():
        if thread.name in ("open-file", "make-piece"):
            thread.join(10.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [600, 60, None])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    name: str, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, tokens of the new content were kept for those of the old one, or it crashed."""
    monkeypatch.setattr(files, "PIECES_TOGETHER", 1)
    write(tmp_path, name, texts(600))
    run = run_of(FileSource(files=[name]))
    stream = opened(run, tmp_path).train
    stream.next(1)
    wait_for_pieces()
    if left is None:
        (tmp_path / name).unlink()
    else:
        write(tmp_path, name, texts(left, seed=1))
    with pytest.raises(DataUnavailable, match=f"{name} was changed|{name}: No such file"):
        stream.next(5000)


def test_downloads_and_local_copies_give_the_same_sequences(tmp_path: Path) -> None:
    there = tmp_path / "there"
    names = [f"{n}.bin" for n in range(4)]
    hashes = {name: write(there, name, texts(200, seed=n)) for n, name in enumerate(names)}
    (there / "all.sha256").write_text("".join(f"{hashes[n]}  {n}\n" for n in names))
    index = hashlib.sha256((there / "all.sha256").read_bytes()).hexdigest()
    copied = Copied(there, tmp_path / "downloads")
    url = "https://example.org/shards"
    remote = [
        opened(run, tmp_path, downloads=copied).train
        for run in (
            run_of(FileSource(files=[pinned(f"{url}/{n}", hashes[n]) for n in names])),
            run_of(FileSource(files=[pinned(f"{url}/all.sha256", index)])),
        )
    ]
    local = run_of(FileSource(files=[pinned("there/all.sha256", index)]))
    expected = opened(local, tmp_path).train.next(500)
    # The order follows from the run's id, in which the names are: compare what was read.
    assert sorted(copied.asked[:1]) == [f"{url}/0.bin"]
    for stream in remote:
        stream.next(3000)
    assert set(copied.asked) == {f"{url}/{n}" for n in (*names, "all.sha256")}
    assert set(expected.ravel()) == set(remote[0].next(500).ravel())


def test_a_download_that_has_changed_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    there, url = tmp_path / "there", "https://example.org/a.bin"
    run = run_of(FileSource(files=[pinned(url, write(there, "a.bin", texts(300)))]))
    copied = Copied(there, tmp_path / "downloads")
    expected = opened(run, tmp_path, downloads=copied).train.next(100)
    wait_for_pieces()
    (file,) = (tmp_path / "downloads").iterdir()
    file.write_bytes(bytes(500))
    assert (opened(run, tmp_path, downloads=copied).train.next(100) == expected).all()
    assert copied.asked == [url, url]


def test_a_download_that_has_made_room_for_others_is_fetched_again(tmp_path: Path) -> None:
    """A dataset may be larger than the folder of downloads."""
    there, url = tmp_path / "there", "https://example.org/a.bin"
    run = run_of(FileSource(files=[pinned(url, write(there, "a.bin", texts(600)))]))
    copied = Copied(there, tmp_path / "downloads")
    expected = opened(run, tmp_path, downloads=copied).train.next(5000)
    stream = opened(run, tmp_path, downloads=copied).train
    stream.next(1)
    wait_for_pieces()
    (file,) = (tmp_path / "downloads").iterdir()
    file.unlink()
    assert (stream.next(4999) == expected[1:]).all()
    assert copied.asked == [url, url]


def test_the_hash_of_a_file_is_computed_once_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.bin", texts(600))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/hashes").touch()
    hashed: list[Path] = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return "00" * 32

    monkeypatch.setattr(downloads, "file_sha256", counted)
    opened(run_of(FileSource(files=["a.bin"])), tmp_path).train.next(5000)
    assert hashed == [tmp_path / "a.bin"]


def test_a_list_that_has_changed_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    """After a power cut it may be empty; the source then had no files, with every try."""
    there, url = tmp_path / "there", "https://example.org/all.sha256"
    write(there, "a.bin", texts(300))
    content = f"{hashlib.sha256((there / 'a.bin').read_bytes()).hexdigest()}  a.bin\n".encode()
    (there / "all.sha256").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    run = run_of(FileSource(files=[pinned(url, digest)]))
    copied = Copied(there, tmp_path / "downloads")
    expected = opened(run, tmp_path, downloads=copied).train.next(100)
    (tmp_path / "downloads" / digest).write_bytes(b"")
    assert (opened(run, tmp_path, downloads=copied).train.next(100) == expected).all()
    assert copied.asked.count(url) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: 'nonsense': it names no file beside the list"),
        (f"{'0' * 64}  ../x.bin", "it must stay inside the data folder"),
        (f"{'0' * 64}  /etc/x.bin", "it must stay inside the data folder"),
        (f"{'0' * 64}  https://example.org/x.bin", "it names no file beside the list"),
        (f"{'0' * 64}  x.md", "its format is none of"),
        ("00  x.bin", "needs 64 lower-case hex digits"),
    ],
)
def test_a_list_names_only_files_beside_it(tmp_path: Path, line: str, words: str) -> None:
    right = write(tmp_path, "a.bin", texts(200))
    (tmp_path / "l.sha256").write_text(f"{right}  a.bin\n{line}\n")
    assert words in problem(tmp_path, "l.sha256")


def test_a_list_of_nothing_is_reported(tmp_path: Path) -> None:
    """Earlier, such a source was opened, and ended training with a traceback."""
    write(tmp_path, "a.bin", texts(300))
    (tmp_path / "l.sha256").write_text("\n")
    with pytest.raises(DataUnavailable, match=r"the list l\.sha256 names no files"):
        opened(run_of(FileSource(files=["a.bin"]), FileSource(files=["l.sha256"])), tmp_path)


def test_a_recipe_of_the_hub_or_a_program_is_not_opened_here(tmp_path: Path) -> None:
    write(tmp_path, "a.bin", texts(400))
    run = RunFile(
        model=CustomModel(),
        data=FilesData(sources=[FileSource(files=["a.bin"])], sequence_length=LENGTH, held_out=0.2),
    )
    data = open_data(run, peer_id=ANNA, cache_dir=tmp_path / "cache", data_dir=tmp_path)
    position: Mapping[str, int] = data.train.state()
    assert set(position) == {"sequence", "0/visit", "0/place", "0/window"}

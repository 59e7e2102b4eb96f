from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId, RunId
from peer.data.batches.order import Order, is_held_out
from peer.data.documents import (
    DocumentStream,
    Until,
    held_out_documents,
    text_in,
    tokenize_bytes,
)
from peer.data.kept_documents import KeptDocuments
from peer.data.text.token_cache import TokenCache
from peer.errors import DataUnavailable

ANNA = PeerId("anna")
RUN = RunId("a-run")


class Listed:
    """Documents in files, with the part of ``datasets.IterableDataset`` that is used."""

    def __init__(self, files: list[list[str]], skipped: int = 0) -> None:
        self.files = files
        self.skipped = skipped

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Listed:
        return Listed(self.files[index::num_shards])

    def skip(self, n: int) -> Listed:
        return Listed(self.files, n)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        rows = [{"text": text} for file in self.files for text in file]
        return iter(rows[self.skipped :])


def documents(files: int, each: int) -> Listed:
    return Listed([[f"<{f}:{d}>" * (1 + (f + d) % 5) for d in range(each)] for f in range(files)])


def stream(
    source: Any,
    peer: PeerId = ANNA,
    held_out: float = 0.1,
    length: int = 16,
    tokenize: Any = tokenize_bytes,
    kept: KeptDocuments | None = None,
) -> Any:
    return DocumentStream(
        source,
        tokenize,
        files=Order(source.num_shards, run_id=RUN, peer_id=peer),
        text_of=text_in("text"),
        held_out=held_out,
        sequence_length=length,
        kept=kept,
    )


def read_text(source: DocumentStream, sequences: int) -> str:
    batch = source.next(sequences)
    return bytes(batch[:, :-1].astype(np.uint8).ravel().tolist()).decode()


@pytest.mark.parametrize("files", [1, 3, 8, 20])
def test_a_stream_gives_whole_documents_end_to_end(files: int) -> None:
    source = documents(files, 30)
    known = {text for file in source.files for text in file}
    pieces = read_text(stream(source), 60).split("\0")
    assert set(pieces[:-1]) <= known
    assert known.isdisjoint({t for t in pieces[:-1] if is_held_out(t.encode(), 0.1)})


def test_a_position_far_inside_of_a_document_is_not_read_up_to() -> None:
    """Another peer says where it was, and the documents in between would all be kept in memory."""
    source, from_beginning = stream(documents(20, 30)), stream(documents(20, 30))
    source.restore({"pass": 0, "document": 0, "used": 1 << 48})
    np.testing.assert_array_equal(source.next(3), from_beginning.next(3))


@pytest.mark.parametrize("files", [1, 3, 20])
def test_a_stream_reads_every_document_repeatedly(files: int) -> None:
    source = documents(files, 10)
    trained = {t for file in source.files for t in file if not is_held_out(t.encode(), 0.1)}
    total = sum(len(t) + 1 for t in trained)
    seen = set(read_text(stream(source), 4 * total // 16).split("\0")[:-1])
    assert seen == trained


@given(st.integers(1, 12), st.integers(0, 200), st.integers(1, 40), st.integers(1, 50))
def test_a_stream_resumes_at_the_exact_token(
    files: int, before: int, number: int, length: int
) -> None:
    source = documents(files, 12)
    first = stream(source, length=length)
    if before:
        first.next(before)
    state = first.state()
    assert all(type(value) is int for value in state.values())
    expected = first.next(number)
    second = stream(source, length=length)
    second.restore(state)
    assert (second.next(number) == expected).all()


@pytest.mark.parametrize("files", [1, 4, 16])
def test_peers_seldom_read_the_same_documents_at_the_same_time(files: int) -> None:
    source = documents(files, 400)
    read = [set(read_text(stream(source, PeerId(f"{n}")), 20).split("\0")) for n in range(12)]
    shared = [len(a & b) / len(a) for a in read for b in read if a is not b]
    assert sum(shared) / len(shared) < 0.15


def test_a_stream_without_text_is_reported() -> None:
    with pytest.raises(DataUnavailable, match="nothing to train on"):
        stream(Listed([[], []])).next(1)
    missing = DocumentStream(
        documents(1, 1),
        tokenize_bytes,
        files=Order(1, run_id=RUN, peer_id=ANNA),
        text_of=text_in("content"),
        held_out=0.1,
        sequence_length=4,
    )
    with pytest.raises(DataUnavailable, match="the columns are text"):
        missing.next(1)


def test_the_held_out_part_of_a_stream_is_documents_nobody_trains_on() -> None:
    source = documents(3, 200)
    chosen = held_out_documents(
        source,
        tokenize_bytes,
        text_of=text_in("text"),
        held_out=0.1,
        sequences=8,
        sequence_length=16,
    )
    assert chosen.shape == (8, 17)
    pieces = bytes(chosen[:, :-1].astype(np.uint8).ravel().tolist()).decode().split("\0")
    assert all(is_held_out(piece.encode(), 0.1) for piece in pieces[:-1])


def test_the_real_datasets_package_keeps_our_contract(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    for file in range(4):
        rows = [json.dumps({"text": f"<{file}:{n}>" * 5}) for n in range(20)]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(rows))
    real = datasets.load_dataset(
        "json",
        data_files=[str(tmp_path / f"{file}.jsonl") for file in range(4)],
        split="train",
        streaming=True,
        cache_dir=str(tmp_path / "cache"),
    )
    assert real.num_shards == 4
    first = stream(real)
    first.next(5)
    state = first.state()
    expected = first.next(60)
    second = stream(real)
    second.restore(state)
    assert (second.next(60) == expected).all()
    text = bytes(expected[:, :-1].astype(np.uint8).ravel().tolist()).decode()
    assert {piece[1] for piece in text.split("\0")[1:-1]} == set("0123")


# --- tokens that are kept -------------------------------------------------------------------------


def never(texts: Any) -> Any:
    raise AssertionError("tokenized again")


class Unread(Listed):
    """The same files, none of which may be opened."""

    def shard(self, num_shards: int, index: int) -> Listed:
        return Unread(self.files[index::num_shards])

    def skip(self, n: int) -> Listed:
        raise AssertionError("read again")

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        raise AssertionError("read again")


@pytest.mark.parametrize("each", [3, 256, 300])  # within a block, one whole block, and more
def test_a_second_pass_reads_and_tokenizes_nothing(each: int, tmp_path: Path) -> None:
    source = documents(16, each)
    total = sum(len(t) + 1 for file in source.files for t in file)
    count = total // 16 + 1
    kept = KeptDocuments(TokenCache(tmp_path), "a/b", "c0ffee")
    plain, first = stream(source), stream(source, kept=kept)
    expected = plain.next(count)
    assert np.array_equal(first.next(count), expected)
    again = stream(Unread(source.files), kept=kept, tokenize=never)
    assert np.array_equal(again.next(count), expected)
    assert again.state() == plain.state()


def test_tokens_that_the_disk_has_no_room_for_are_read_all_the_same(tmp_path: Path) -> None:
    """Earlier, a full disk ended training."""
    (tmp_path / "full").touch()  # no folder can be made there
    kept = KeptDocuments(TokenCache(tmp_path / "full"), "a/b", "c0ffee")
    source = documents(16, 300)
    expected = stream(source).next(1000)
    assert np.array_equal(stream(source, kept=kept).next(1000), expected)


def test_resuming_between_kept_and_new_blocks_gives_the_same_tokens(tmp_path: Path) -> None:
    source = documents(16, 600)
    kept = KeptDocuments(TokenCache(tmp_path), "a/b")
    half = stream(source, kept=kept)
    half.next(500)
    position, expected = half.state(), half.next(700)
    other = stream(source, kept=KeptDocuments(TokenCache(tmp_path), "a/b"))
    other.restore(position)
    assert np.array_equal(other.next(700), expected)


def test_another_commit_or_tokenizer_has_tokens_of_its_own(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    KeptDocuments(cache, "a/b", "c0ffee", "bytes").write(0, 0, [np.arange(3)])
    kept = KeptDocuments(cache, "a/b", "c0ffee", "bytes").read(0, 0)
    assert kept is not None
    assert [each.tolist() for each in kept] == [[0, 1, 2]]
    for source in (("a/b", "c0ffef", "bytes"), ("a/b", "c0ffee", "gpt2"), ("a/b", "c0ffee")):
        assert KeptDocuments(cache, *source).read(0, 0) is None
    assert KeptDocuments(cache, "a/b", "c0ffee", "bytes").read(1, 0) is None


def test_files_of_the_datasets_package_are_read_once(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    files = []
    for number in range(16):
        files.append(tmp_path / f"{number}.jsonl")
        rows = ({"text": f"<{number}:{d}>" * 5} for d in range(20))
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder = datasets.load_dataset_builder("json", data_files=[str(file) for file in files])
    source = builder.as_streaming_dataset(split="train")
    kept = KeptDocuments(TokenCache(tmp_path / "cache"), "a/b", "c0ffee")
    expected = stream(source, kept=kept).next(600)
    for file in files:
        file.unlink()
    assert np.array_equal(stream(source, kept=kept, tokenize=never).next(600), expected)


@pytest.mark.parametrize("files", [3, 20], ids=["in parts", "in blocks"])
def test_documents_are_read_until_time_is_up_also_those_that_are_skipped(
    files: int, tmp_path: Path
) -> None:
    source, time_s = documents(files, 600), 0

    def over() -> bool:
        nonlocal time_s
        time_s += 1
        return time_s > 1000

    kept = KeptDocuments(TokenCache(tmp_path), "a")
    plain, timed = stream(source), stream(Until(source, over), kept=kept)
    for each in (plain, timed):
        each.restore({"pass": 1, "document": 300, "used": 0})
    assert read_text(timed, 2) == read_text(plain, 2)
    time_s = 700
    timed.restore({"pass": 2, "document": 599, "used": 0})
    with pytest.raises(DataUnavailable, match="time is up after 300 rows"):
        timed.next(1)

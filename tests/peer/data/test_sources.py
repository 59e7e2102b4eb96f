from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId, RunId
from peer.data.sources import (
    CHUNK_BYTES,
    DocumentStream,
    Order,
    Shard,
    _hub_tokenizer,
    check_data,
    check_files,
    checked_commit,
    evenly_spaced,
    held_out_documents,
    is_held_out,
    open_data,
    tokenize_bytes,
)
from peer.errors import DataUnavailable, ExtraMissing
from peer.run_file.run_file import (
    CustomData,
    Evaluation,
    GptModel,
    HfData,
    PythonStdlibData,
    RunFile,
    TextData,
)

ANNA, BORIS = PeerId("anna"), PeerId("boris")
RUN = RunId("a-run")


def order(count: int, peer: PeerId = ANNA, run: RunId = RUN) -> Order:
    return Order(count, run_id=run, peer_id=peer)


# --- order ------------------------------------------------------------------------------------


@given(st.integers(1, 2000), st.integers(0, 3))
def test_an_epoch_visits_everything_exactly_once(count: int, epoch: int) -> None:
    things = order(count).at(epoch * count, count)
    assert sorted(things.tolist()) == list(range(count))


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 60), st.integers(0, 60))
def test_an_order_does_not_depend_on_how_it_is_asked_for(
    count: int, start: int, first: int, second: int
) -> None:
    whole = order(count).at(start, first + second).tolist()
    parts = [
        *order(count).at(start, first).tolist(),
        *order(count).at(start + first, second).tolist(),
    ]
    assert whole == parts


def test_orders_differ_between_peers_runs_and_epochs() -> None:
    base = order(1000).at(0, 1000)
    for other in (
        order(1000, BORIS).at(0, 1000),
        order(1000, run=RunId("other")).at(0, 1000),
        order(1000).at(1000, 1000),
    ):
        same = int((base == other).sum())
        assert same < 10  # two random permutations agree at one place on average


def test_an_order_is_the_same_on_every_machine() -> None:
    assert order(1000).at(995, 10).tolist() == [269, 487, 894, 973, 568, 538, 516, 539, 120, 774]


def test_neighbours_are_not_read_together() -> None:
    things = order(10_000).at(0, 2000)
    assert int((np.abs(np.diff(things)) == 1).sum()) < 10


# --- shard ------------------------------------------------------------------------------------


def shard(size: int = 1000, length: int = 10, peer: PeerId = ANNA) -> Shard:
    tokens = np.arange(size, dtype=np.uint16)
    return Shard(tokens, sequence_length=length, run_id=RUN, peer_id=peer)


def test_a_sequence_is_consecutive_tokens_with_one_more_as_target() -> None:
    batch = shard().next(7)
    assert batch.shape == (7, 11)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


def test_an_epoch_covers_the_array_without_overlap() -> None:
    stream = shard(1000, 10)
    windows = stream.next(99)
    inputs = Counter(windows[:, :-1].ravel().tolist())
    assert set(inputs.values()) == {1}
    assert len(inputs) == 990
    assert stream.epoch == 1.0


def test_the_next_epoch_cuts_elsewhere() -> None:
    stream = shard(1000, 10)
    phases = {int(stream.next(99)[0, 0]) % 10 for _ in range(12)}
    assert len(phases) > 3


@given(st.integers(20, 400), st.integers(1, 10), st.integers(0, 300), st.integers(1, 60))
def test_a_shard_never_reads_outside_and_resumes_exactly(
    size: int, length: int, before: int, number: int
) -> None:
    stream = shard(size, length)
    stream.next(before)
    state = stream.state()
    expected = stream.next(number)
    other = shard(size, length)
    other.restore(state)
    assert (other.next(number) == expected).all()
    assert (np.diff(expected, axis=1) == 1).all()
    assert state == {"position": before}


def test_two_peers_read_in_different_orders() -> None:
    assert not (shard().next(20) == shard(peer=BORIS).next(20)).all()


def test_held_out_sequences_do_not_overlap_and_span_the_array() -> None:
    tokens = np.arange(1001)
    chosen = evenly_spaced(tokens, 10, sequence_length=10)
    assert chosen[:, 0].tolist() == list(range(0, 1000, 100))
    assert evenly_spaced(tokens, 10_000, sequence_length=10).shape == (100, 11)


# --- local files ------------------------------------------------------------------------------


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


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    before = open_text(tmp_path).description
    path = tmp_path / "data" / "part0" / "a.txt"
    path.write_bytes(path.read_bytes() + b"x" * CHUNK_BYTES * 5)
    assert open_text(tmp_path).description != before


def test_processes_that_build_the_cache_at_once_agree(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    batches: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: batches.append(open_text(tmp_path).train.next(8).tobytes()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == 6
    assert len(set(batches)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("files", "reason"), [([], "matches '\\*\\*/\\*.txt'"), ([b"too short"], "a sequence takes 64")]
)
def test_missing_or_too_little_text_is_told(
    tmp_path: Path, files: list[bytes], reason: str
) -> None:
    (tmp_path / "data").mkdir()
    for content in files:
        (tmp_path / "data" / "a.txt").write_bytes(content)
    with pytest.raises(DataUnavailable, match=reason):
        open_text(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").exists(), reason="needs /proc")
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    with pytest.raises(DataUnavailable, match="/proc"):
        open_data(
            text_run(), peer_id=ANNA, cache_dir=Path("/proc/none"), data_dir=tmp_path / "data"
        )


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
    tokens = next(p.stat().st_size for p in stdlib_cache.glob("*/train.u8"))
    assert tokens > 3_000_000


def test_a_module_is_held_out_by_its_name_in_every_version(stdlib_cache: Path) -> None:
    run = RunFile(data=PythonStdlibData(), evaluation=Evaluation(sequences=1 << 20))
    data = open_data(run, peer_id=ANNA, cache_dir=stdlib_cache, data_dir=stdlib_cache)
    held = data.held_out[:, :-1].astype(np.uint8).tobytes()
    for module in ("os", "json.decoder", "typing", "dataclasses", "inspect", "zipfile", "ast"):
        __import__(module)
        path = Path(str(sys.modules[module].__file__))
        name = f"{module.replace('.', '/')}.py"
        if path.name == "__init__.py":
            name = f"{module.replace('.', '/')}/__init__.py"
        middle = path.read_bytes()[5000:5200]
        assert (middle in held) == is_held_out(name.encode(), run.data.held_out), module


def test_data_which_only_the_caller_has_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.data"):
        open_text(tmp_path, RunFile(data=CustomData()))


# --- streams ----------------------------------------------------------------------------------


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


def stream(source: Listed, peer: PeerId = ANNA, held_out: float = 0.1, length: int = 16) -> Any:
    return DocumentStream(
        source,
        tokenize_bytes,
        text_field="text",
        held_out=held_out,
        sequence_length=length,
        run_id=RUN,
        peer_id=peer,
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


@pytest.mark.parametrize("files", [1, 3, 20])
def test_a_stream_comes_back_to_every_document(files: int) -> None:
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


def test_a_stream_without_text_is_told() -> None:
    with pytest.raises(DataUnavailable, match="nothing to train on"):
        stream(Listed([[], []])).next(1)
    missing = DocumentStream(
        documents(1, 1),
        tokenize_bytes,
        text_field="content",
        held_out=0.1,
        sequence_length=4,
        run_id=RUN,
        peer_id=ANNA,
    )
    with pytest.raises(DataUnavailable, match="there are: text"):
        missing.next(1)


def test_the_held_out_part_of_a_stream_is_documents_nobody_trains_on() -> None:
    source = documents(3, 200)
    chosen = held_out_documents(
        source, tokenize_bytes, text_field="text", held_out=0.1, sequences=8, sequence_length=16
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


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'shoal\[hf\]'"):
        open_data(
            RunFile(data=HfData(dataset="a/b")),
            peer_id=ANNA,
            cache_dir=Path("unused"),
            data_dir=Path("unused"),
        )


@pytest.mark.parametrize("name", ["dataset", "tokenizer"])
def test_a_name_of_the_hub_is_never_taken_for_a_folder_of_the_user(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    (tmp_path / "private" / "notes").mkdir(parents=True)
    (tmp_path / "private" / "notes" / "diary.txt").write_text("mine " * 1000)
    monkeypatch.chdir(tmp_path)
    recipe = HfData(**{"dataset": "shoal-no/such-dataset", name: "private/notes"})
    with pytest.raises(DataUnavailable, match="private/notes' of the hub is meant"):
        open_data(
            RunFile(data=recipe), peer_id=ANNA, cache_dir=tmp_path / "cache", data_dir=tmp_path
        )


DATASET = "datasets.packaged_modules.{0}.{0}"


def test_a_dataset_is_read_from_its_own_files_only() -> None:
    own = "hf://datasets/a/b@c0ffee/"
    check_files("a/b", DATASET.format("parquet"), {"train": [own + "x.parquet"], "test": []})
    for file in (
        "/home/anna/.ssh/id_ed25519",
        "http://192.168.0.1/status.json",
        "hf://datasets/a/bc@c0ffee/x.json",
        "zip://x.json::/home/anna/mine.zip",
        own + "../../../x.json",
    ):
        with pytest.raises(DataUnavailable, match="not its own"):
            check_files("a/b", DATASET.format("json"), {"train": [own + "y.json"], "test": [file]})
    with pytest.raises(DataUnavailable, match="read as 'webdataset'"):
        check_files("a/b", DATASET.format("webdataset"), {"train": [own + "x.tar"]})


@pytest.mark.parametrize("named", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "files",
    [
        "http://192.168.0.1/reboot",
        [{"split": "train", "path": ["x.json", "zip://x.json::http://192.168.0.1/mine.zip"]}],
        {"train": "/home/anna/.ssh/*"},
        "~/notes/*.txt",
        "zip::mine.zip",
        "data/../../other/x.json",
    ],
)
def test_no_place_that_a_dataset_names_outside_itself_is_even_looked_at(
    named: str, files: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")

    def download(dataset: str, name: str, *, repo_type: str, revision: str) -> str:
        assert (dataset, repo_type, revision) == ("a/b", "dataset", "c0ffee")
        if not (tmp_path / name).exists():
            raise hub.errors.EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(
        hub.HfApi, "dataset_info", lambda *_, revision: SimpleNamespace(sha="c0ffee")
    )

    def write(files: object) -> None:
        config = {"config_name": "default", "delimiter": "::", "data_files": files}
        card = json.dumps({"configs": [config]})
        text = f"---\n{card}\n---\n# A dataset\n" if named == "README.md" else card
        (tmp_path / named).write_text(text)

    assert checked_commit("a/b", "main") == "c0ffee"
    write(["data/*.json", "**/x.parquet", ""])
    assert checked_commit("a/b", "main") == "c0ffee"
    write(files)
    with pytest.raises(DataUnavailable, match="a/b names a place that is not in it"):
        checked_commit("a/b", "main")


def test_the_real_datasets_package_says_which_files_it_would_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    diary = tmp_path / "diary.txt"
    diary.write_text("mine")
    builder = datasets.load_dataset_builder("text", data_files=[str(diary)])
    with pytest.raises(DataUnavailable, match=r"a/b names a file .*diary.txt"):
        check_files("a/b", type(builder).__module__, builder.config.data_files)


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0, "a": 1, "b": 2}, "<e>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>")
    made.save_pretrained(tmp_path)
    assert _hub_tokenizer(str(tmp_path), vocabulary=3)("a").tolist() == [1, 0]
    with pytest.raises(DataUnavailable, match="has 3 tokens, the model knows 2"):
        _hub_tokenizer(str(tmp_path), vocabulary=2)


def test_what_is_missing_is_told_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RunFile(data=TextData(files=["*.txt"]))
    with pytest.raises(DataUnavailable, match="--data"):
        check_data(text, tmp_path / "not" / "there")
    (tmp_path / "a.txt").write_text("some")
    check_data(text, tmp_path)
    check_data(RunFile(), tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing):
        check_data(RunFile(data=HfData(dataset="a/b")), tmp_path)

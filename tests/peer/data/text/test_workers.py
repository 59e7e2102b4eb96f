from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from peer.data.files import check_files_there, open_files
from peer.data.text.formats import DataFile
from peer.data.text.token_cache import TokenCache
from peer.data.text.workers import Job, Workers
from peer.errors import DataUnavailable
from peer.run_file.places import pinned
from peer.run_file.sections import Evaluation, FilesData, FileSource, GptModel, RunFile
from tests.peer.data.file_corpus import ANNA, LENGTH, opened, texts, write
from tests.processes import Child, still_running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<e>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(200), trainer)
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def with_tokenizer(tokenizer: Path, tmp_path: Path) -> Iterator[tuple[RunFile, Workers]]:
    content = tokenizer.read_bytes()
    (tmp_path / "t.json").write_bytes(content)
    write(tmp_path, "a.jsonl", texts(300))
    run = RunFile(
        model=GptModel(vocabulary=400),
        data=FilesData(
            sources=[FileSource(files=["a.jsonl"])],
            tokenizer=pinned("t.json", hashlib.sha256(content).hexdigest()),
            end_token="<e>",
            sequence_length=LENGTH,
            held_out=0.1,
        ),
        evaluation=Evaluation(sequences=8),
    )
    workers = Workers(2)
    yield run, workers
    workers.close()


def test_worker_processes_tokenize_and_their_number_changes_nothing(
    with_tokenizer: tuple[RunFile, Workers], tokenizer: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    run, workers = with_tokenizer
    recipe = run.data
    assert isinstance(recipe, FilesData)

    def read(workers: Workers, cache: str) -> np.ndarray[Any, Any]:
        data = open_files(
            run, recipe, ANNA, cache_dir=tmp_path / cache, data_dir=tmp_path, workers=workers
        )
        return data.train.next(200)

    batch = read(workers, "two")
    single = Workers(1)
    try:
        assert (read(single, "one") == batch).all()
    finally:
        single.close()
    known = tokenizers.Tokenizer.from_file(str(tokenizer))
    shown = known.decode(batch[:, :-1].ravel().tolist(), skip_special_tokens=False)
    assert sum(text[:12] in shown for text in texts(300)) > 15
    assert "<e>" in shown


def test_tokens_of_another_tokenizer_are_never_taken(
    with_tokenizer: tuple[RunFile, Workers], tokenizer: Path, tmp_path: Path
) -> None:
    run, workers = with_tokenizer
    recipe = run.data
    assert isinstance(recipe, FilesData)
    other = FilesData(**{**_fields(recipe), "end_token": "a"})
    ends = []
    for each in (recipe, other):
        data = open_files(
            RunFile(model=run.model, data=each, evaluation=Evaluation(sequences=8)),
            each,
            ANNA,
            cache_dir=tmp_path / "cache",
            data_dir=tmp_path,
            workers=workers,
        )
        ends.append(int((data.train.next(200) == 0).sum()))  # "<e>" is the token 0
    assert ends[0] > 0
    assert ends[1] == 0


def test_a_worker_that_was_killed_is_replaced(
    with_tokenizer: tuple[RunFile, Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, workers = with_tokenizer
    recipe = run.data
    assert isinstance(recipe, FilesData)
    started = []
    popen = subprocess.Popen

    def start(*args: Any, **named: Any) -> Any:
        started.append(popen(*args, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    data = open_files(
        run, recipe, ANNA, cache_dir=tmp_path / "cache", data_dir=tmp_path, workers=workers
    )
    for process in started:
        process.kill()
        process.wait()
    killed = len(started)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "\n")
    other = FilesData(**{**_fields(recipe), "sources": [FileSource(files=["b.jsonl"])]})
    open_files(
        RunFile(model=run.model, data=other),
        other,
        ANNA,
        cache_dir=tmp_path / "cache",
        data_dir=tmp_path,
        workers=workers,
    ).train.next(50)
    assert len(started) > killed
    assert data.train.next(5).shape == (5, LENGTH + 1)


def _fields(recipe: FilesData) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__struct_fields__}


def test_a_tokenizer_that_does_not_fit_is_refused_with_the_remedy(
    with_tokenizer: tuple[RunFile, Workers], tmp_path: Path
) -> None:
    run, _ = with_tokenizer
    recipe = run.data
    assert isinstance(recipe, FilesData)
    small = RunFile(model=GptModel(vocabulary=399), data=recipe)
    with pytest.raises(DataUnavailable, match=r"has 400 tokens, the model has 399: set model.vo"):
        opened(small, tmp_path)
    other = FilesData(**{**_fields(recipe), "end_token": "</s>"})
    with pytest.raises(DataUnavailable, match=r"no token '</s>'; set data.end_token"):
        opened(RunFile(model=run.model, data=other), tmp_path)

    def checked(run: RunFile) -> None:
        assert isinstance(run.data, FilesData)
        check_files_there(run, run.data, tmp_path, cache_dir=tmp_path / "cache")

    checked(run)
    with pytest.raises(DataUnavailable, match=r"has 400 tokens, the model has 399: set model.vo"):
        checked(small)
    (tmp_path / "t.json").write_text("{}")
    for check in (checked, lambda run: opened(run, tmp_path)):
        with pytest.raises(DataUnavailable, match=r"the run file demands .*: replace it"):
            check(run)
    rubbish = pinned("t.json", hashlib.sha256(b"{}").hexdigest())
    with pytest.raises(DataUnavailable, match=r"is no tokenizer.json"):
        opened(
            RunFile(model=run.model, data=FilesData(**{**_fields(recipe), "tokenizer": rubbish})),
            tmp_path,
        )


@pytest.mark.timeout(60)
def test_a_job_after_the_workers_were_closed_starts_a_process_again(tmp_path: Path) -> None:
    """It waited for ever, as nothing put a worker back."""
    write(tmp_path, "a.jsonl", texts(10))
    cache = TokenCache(tmp_path / "cache")
    job = Job(
        files=(DataFile(location=str(tmp_path / "a.jsonl"), name="a.jsonl"),),
        piece=0,
        tokenizer=None,
        end_token="",
        held_out=0.1,
        sequence_length=LENGTH,
        cache=str(tmp_path / "cache"),
        key="00",
    )
    workers = Workers(1)
    workers.close()
    workers.do(job)
    workers.close()
    assert cache.read("00") is not None


PARENT = """
import sys
from pathlib import Path
from peer.data.text.workers import Job, Workers
from peer.data.text.formats import DataFile
workers = Workers(1)
file = DataFile(location=sys.argv[1], name="a.jsonl")
workers.do(Job(files=(file,), piece=0, tokenizer=sys.argv[2], end_token="<e>", held_out=0.1,
               cache=sys.argv[3], key="00", sequence_length=64))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_worker_ends_with_its_parent_even_if_that_is_killed(
    tokenizer: Path, tmp_path: Path
) -> None:
    write(tmp_path, "a.jsonl", texts(10))
    arguments = [str(tmp_path / "a.jsonl"), str(tokenizer), str(tmp_path / "cache")]
    with Child("-c", PARENT, *arguments) as parent:
        assert parent.line() == "ready"
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert still_running([worker], timeout_s=20) == []


def test_an_error_of_a_worker_is_the_error_of_the_file(
    with_tokenizer: tuple[RunFile, Workers], tmp_path: Path
) -> None:
    run, workers = with_tokenizer
    recipe = run.data
    assert isinstance(recipe, FilesData)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n[]")
    with pytest.raises(DataUnavailable, match=r"a\.jsonl, line 301: has no text in the field"):
        open_files(
            run, recipe, ANNA, cache_dir=tmp_path / "cache", data_dir=tmp_path, workers=workers
        )


def test_processes_that_are_one_learner_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(32), raising=False)
    assert Workers().count == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Workers().count == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert Workers().count == 1


LIMITED = """
import resource, socket, sys
from peer.data.text import workers
port = int(sys.argv[1])
sys.argv[1] = "nobody"
assert workers.main() == 0  # its input is closed
assert resource.getrlimit(resource.RLIMIT_DATA)[0] < 2 * workers.MEMORY_MAX_BYTES
try:
    socket.create_connection(("127.0.0.1", port))
except PermissionError:
    sys.exit(0)
sys.exit("the network is open")
"""


def test_a_worker_has_a_limit_on_memory_and_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", LIMITED, str(server.getsockname()[1])]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert ended.returncode == 0

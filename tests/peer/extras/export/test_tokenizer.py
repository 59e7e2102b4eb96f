"""The tokenizer of an exported model of bytes is exactly bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peer.errors import DataUnavailable
from peer.extras.export.tokenizer import TokenizerFiles, bytes_tokenizer, tokenizer_of
from peer.run_file.sections import CustomData, FilesData, FileSource, GptModel, RunFile

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


def load(found: TokenizerFiles, folder: Path) -> Any:
    for name, content in found.files.items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(bytes_tokenizer(64), tmp_path_factory.mktemp("bytes"))


@given(st.text())
@example("".join(map(chr, range(0x250))))
@example("\0<|endoftext|> Ā </s> \ud7ff\U0010ffff  \r\n\t ")
def test_every_text_becomes_its_bytes_and_comes_back(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text, verbose=False)["input_ids"]
    assert bytes(tokens) == text.encode()
    assert tokenizer.decode(tokens) == text


def test_every_byte_is_a_token_and_there_are_no_others(tokenizer: Any) -> None:
    """The bytes that occur in no UTF-8, such as 255, are among them."""
    assert len(tokenizer) == 256
    assert tokenizer.decode([255, 65, 0]) == "\ufffdA\0"
    assert tokenizer.model_max_length == 64
    assert tokenizer.all_special_ids == []


def files_run(tokenizer: str, files: list[str], **settings: Any) -> RunFile:
    data = FilesData(tokenizer=tokenizer, sources=[FileSource(files=files)], **settings)
    return RunFile(model=GptModel(vocabulary=300), data=data)


def test_a_tokenizer_of_the_run_is_taken_from_the_data_folder(tmp_path: Path) -> None:
    content = bytes_tokenizer(64).files["tokenizer.json"]
    (tmp_path / "own.json").write_bytes(content)
    named = f"own.json#sha256={hashlib.sha256(content).hexdigest()}"
    run = files_run(named, ["*.txt"], end_token="a")
    found = tokenizer_of(run, cache_dir=tmp_path / "cache", data_dir=tmp_path)
    assert found is not None
    assert (found.name, found.end) == ("own.json", ord("a"))
    (tmp_path / "export").mkdir()
    loaded = load(found, tmp_path / "export")
    assert loaded("b", add_special_tokens=False)["input_ids"] == [ord("b")]
    assert loaded.eos_token_id == ord("a")
    (tmp_path / "own.json").write_bytes(content + b" ")
    with pytest.raises(DataUnavailable, match="the run file demands"):
        tokenizer_of(run, cache_dir=tmp_path / "cache", data_dir=tmp_path)


def test_shards_and_own_datasets_may_have_no_known_tokenizer(tmp_path: Path) -> None:
    def of(run: RunFile) -> TokenizerFiles | None:
        return tokenizer_of(run, cache_dir=tmp_path, data_dir=tmp_path)

    assert of(files_run("bytes", ["a.bin", "b.npy"])) is None
    assert of(RunFile(data=CustomData())) is None
    for run in (files_run("bytes", ["a.bin", "a.txt"]), files_run("bytes", ["folder"]), RunFile()):
        assert (found := of(run)) is not None and found.name == "bytes"

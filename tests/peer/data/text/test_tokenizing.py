"""Tokens of texts, for the recipe ``files``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.data.text.formats import DataFile
from peer.data.text.tokenizer_json import checked
from peer.data.text.tokenizing import FileTokenizer
from peer.data.text.workers import Job, Workers
from peer.errors import DataUnavailable
from tests.peer.data.file_corpus import limit_workers


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)],
)
def test_a_tokenizer_may_leave_numbers_out(tmp_path: Path, largest: int, dtype: type) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    words = {"<end>": 0, "a": 1, "b": largest}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "<end>")
    assert tokenizer.vocabulary == largest + 1, "tokens that the model must have"
    (tokens,) = tokenizer.encode(["a b"])
    assert tokens.tolist() == [1, largest]
    assert tokens.dtype == dtype


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error_of_the_data(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "a": 1}))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "<end>")
    with pytest.raises(DataUnavailable, match=r"tokenizer\.json cannot encode a text: .*\[UNK\]"):
        list(tokenizer.encode(["b"]))
    with pytest.raises(DataUnavailable, match="cannot encode a text"):
        list(tokenizer.encode_from(["b"], [0]))


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            **{"id": 0, "content": "<end>", "special": True, "normalized": False},
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
    ],
    "model": {"type": "BPE", "vocab": {"<end>": 0, "a": 1, "b": 2}, "merges": []},
}


def written(folder: Path, **parts: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | parts))
    return path


def replaced(sought: str, put_in: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: sought}, "content": put_in}


def after_one_another(*normalizers: Any) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(normalizers)}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (after_one_another(*[replaced("a", "a" * 2000)] * 3), "more than 256 characters of one"),
        (after_one_another(*[replaced("a", "aa")] * 30), "more than 256 characters of one"),
        (after_one_another(*[replaced("a", "aa")] * 33), "33 parts; at most 32"),
        (after_one_another(*[replaced("b*", "b", "Regex")] * 30), "more than 256 characters"),
        (after_one_another(*[{"type": "Prepend", "prepend": "a" * 99}] * 9), "more than 256"),
        (after_one_another({"type": "Prepend", "prepend": "a" * 5000}), "a text of more than 4096"),
        (after_one_another(*[after_one_another(BYTES)["normalizer"]] * 9), "more than 256"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
            "pre_tokenizer may make more than 256",
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a?" * 5000}}},
            "pre_tokenizer has a text of more than 4096",
        ),
        (after_one_another({"type": "Script", "code": "?"}), "kind 'Script', which is not known"),
        ({"model": {"type": "Neural"}}, "kind 'Neural', which is not known"),
        ({"decoder": {"no": "type"}}, "decoder is of the kind 'None'"),
    ],
)
def test_a_tokenizer_that_could_blow_up_a_text_is_refused_before_it_is_loaded(
    parts: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Three normalizers made terabytes of a line, and ended the process of the trainer."""
    with pytest.raises(ValueError, match=reason):
        checked(written(tmp_path, **parts).read_bytes())
    with pytest.raises(DataUnavailable, match=f"is no tokenizer.json: .*{reason}"):
        FileTokenizer(tmp_path / "tokenizer.json", "<end>")


def test_sequences_in_sequences_are_refused() -> None:
    parts: Any = {"type": "NFC"}
    for _ in range(9):
        parts = after_one_another(parts)["normalizer"]
    with pytest.raises(ValueError, match="sequences in sequences"):
        checked(json.dumps(TOKENIZER | {"normalizer": parts}).encode())


def test_what_is_looked_at_is_what_is_loaded(tmp_path: Path) -> None:
    """A name that is there twice has one value for one reader and another for the next."""
    path = written(tmp_path)
    bomb = json.dumps(after_one_another(*[replaced("a", "a" * 2000)] * 3))[1:-1]
    path.write_text(path.read_text()[:-1] + f', {bomb}, "normalizer": null}}')
    (tokens,) = FileTokenizer(path, "<end>").encode(["aab"])
    assert tokens.tolist() == [1, 1, 2]


def test_a_panic_of_the_package_is_an_error_of_the_data(tmp_path: Path) -> None:
    """It is no ``Exception``, and ended a thread of the trainer without a word."""
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    pattern = {"Regex": "(?:a+a+)+$x"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = FileTokenizer(written(tmp_path, pre_tokenizer=split), "<end>")
    with pytest.raises(DataUnavailable, match="cannot encode a text"):
        list(tokenizer.encode([("a" * 60 + "b ") * 10]))


def test_the_parts_of_published_tokenizers_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    llama = after_one_another({"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁"))
    clip = after_one_another({"type": "NFC"}, replaced(r"\s+", " ", "Regex"), {"type": "Lowercase"})
    split = {"Regex": r"\p{N}{1,3}"}
    deepseek = {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *[{"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False}] * 3,
                BYTES,
            ],
        }
    }
    for parts in (llama, clip, deepseek):
        (tokens,) = FileTokenizer(written(tmp_path, **parts), "<end>").encode(["ab"])
        assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("limit", "value"), [("MEMORY_MAX_BYTES", 96 << 20), ("PROCESSOR_MAX_S", 1)]
)
def test_a_tokenizer_that_takes_all_memory_or_never_ends_ends_only_its_worker(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what its parts may be, as the limits are lower here."""
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    path = written(tmp_path, **after_one_another(replaced("a", "ab" * 127)))
    (tmp_path / "a.txt").write_text("a" * 400_000)
    started = limit_workers(monkeypatch, limit, value)
    file = DataFile(str(tmp_path / "a.txt"), "a.txt")
    workers = Workers(1)
    try:
        assert workers.do(Job(tokenizer=str(path), end_token="<end>")).vocabulary == 3
        job = Job(files=(file,), tokenizer=str(path), end_token="<end>", key="00")
        with pytest.raises(DataUnavailable, match=r"too much memory or too long at a\.txt; divide"):
            workers.do(job)
    finally:
        workers.close()
    assert len(started) == 1, "it is not tried again"

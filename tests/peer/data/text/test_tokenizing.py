"""Tokens of texts, for the recipe ``files``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.data.text.tokenizing import FileTokenizer
from peer.errors import DataUnavailable


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

"""Tokens of texts, for the recipe ``files``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.data.text.tokenizing import FileTokenizer


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

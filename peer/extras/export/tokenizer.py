"""The files of a run's tokenizer, as transformers loads them.

A model of bytes gets a tokenizer whose 256 tokens are the bytes. It has no special tokens: each
would be the name of one, and a text that contains the name would lose those bytes. The byte that
ends a document is in the model's configuration instead.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer.data.files import tokenizer_file
from peer.data.hub import save_hub_tokenizer
from peer.data.text.tokenizing import BYTES_END, FileTokenizer
from peer.run_file.places import TOKEN_FORMATS, place_of
from peer.run_file.sections import CustomData, FilesData, HfData, RunFile, vocabulary

BYTES = "bytes"

TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer by name, and what a model's configuration says of it."""

    name: str
    files: Mapping[str, bytes]
    end: int | None
    """The token that ends a document."""

    @property
    def is_bytes(self) -> bool:
        return self.name == BYTES


def tokenizer_of(run: RunFile, *, cache_dir: Path, data_dir: Path) -> TokenizerFiles | None:
    """The tokenizer of a run's data; ``None`` if the run file does not name it.

    Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    data = run.data
    context = getattr(run.model, "context", data.sequence_length)
    if isinstance(data, CustomData) or _is_unnamed(run):
        return None
    named = data.tokenizer if isinstance(data, HfData | FilesData) else BYTES
    template = None
    if isinstance(data, HfData | FilesData) and data.form == "chat" and data.examples is not None:
        template = data.examples.chat_template()
    if named == BYTES:
        return _templated(bytes_tokenizer(context), template)
    if isinstance(data, FilesData) and place_of(named).sha256 is not None:
        path, end_token = tokenizer_file(data, data_dir=data_dir, cache_dir=cache_dir)
        end = FileTokenizer(path, end_token).end
        config = {**_config(context), "eos_token": end_token}
        files = {"tokenizer.json": path.read_bytes(), "tokenizer_config.json": _json(config)}
        return _templated(TokenizerFiles(place_of(named).name, files, end), template)
    with tempfile.TemporaryDirectory() as folder:
        end = save_hub_tokenizer(named, Path(folder))
        written = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}
    return _templated(TokenizerFiles(named, written, end), template)


def _templated(found: TokenizerFiles, template: str | None) -> TokenizerFiles:
    """The tokenizer with the run's chat template in place of its own."""
    if template is None:
        return found
    files = {name: content for name, content in found.files.items() if name != CHAT_TEMPLATE}
    config = json.loads(files[TOKENIZER_CONFIG]) | {"chat_template": template}
    return replace(found, files=files | {TOKENIZER_CONFIG: _json(config)})


def _is_unnamed(run: RunFile) -> bool:
    """Token shards need no tokenizer in a run file."""
    data = run.data
    if not isinstance(data, FilesData) or data.tokenizer != BYTES or vocabulary(run.model) == 256:
        return False
    names = [place_of(text) for source in data.sources for text in source.files]
    return all(name.suffix in TOKEN_FORMATS for name in names)


def bytes_tokenizer(context: int) -> TokenizerFiles:
    """The tokenizer whose token i is the byte i."""
    files = {
        "tokenizer.json": _json(_bytes_json()),
        "tokenizer_config.json": _json(_config(context)),
    }
    return TokenizerFiles(BYTES, files, BYTES_END)


def is_of_bytes(folder: Path) -> bool:
    """Return whether the tokenizer in a folder is the one whose tokens are bytes."""
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError:
        return False
    return content == bytes_tokenizer(1).files["tokenizer.json"]


def _config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def _bytes_json() -> dict[str, Any]:
    """A BPE without merges over the characters that stand for bytes."""
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers, as in GPT-2."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"

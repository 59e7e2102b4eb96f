"""The parts that a ``tokenizer.json`` may have. Its author may be a stranger. Pure.

The package that reads it takes any: three normalizers that replace a letter by many make terabytes
of a line, and the package ends the process. Here its parts are looked at before, and what the
package gets is written anew, so that it reads the same as was looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_KINDS = {
    "normalizer": (
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    ),
    "pre_tokenizer": (
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"),
        "WhitespaceSplit",
    ),
    "post_processor": (
        *("BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"),
    ),
    "decoder": (
        *("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace"),
        *("Sequence", "Strip", "WordPiece"),
    ),
    "model": ("BPE", "Unigram", "WordLevel", "WordPiece"),
}
_NESTED = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}

PARTS_MAX = 32
"""Normalizers, or parts of another kind, one after another."""

DEPTH_MAX = 4
TEXT_MAX = 4096
"""Characters of a pattern, or of a text that is put in."""

GROWTH_MAX = 256
"""Characters that normalizers may make of one."""

CHARSMAP_MAX = 1 << 20
_GROWTH = {"ByteLevel": 4, "Precompiled": 16}
"""Characters that these make of one at most, again each time."""


class _File(msgspec.Struct):
    model: msgspec.Raw
    version: str = "1.0"
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class _Model(msgspec.Struct):
    type: str = "BPE"
    """Early files do not say it."""


def checked(content: bytes) -> str:
    """A ``tokenizer.json`` to be read. Raises ``ValueError`` with the reason why it is none."""
    file = msgspec.json.decode(content, type=_File)
    kind = msgspec.json.decode(file.model, type=_Model).type
    if kind not in _KINDS["model"]:
        raise ValueError(f"its model is of the kind {kind[:100]!r}, which is not known")
    for part in _NESTED:
        pieces = list(_parts(part, getattr(file, part)))
        if len(pieces) > PARTS_MAX:
            raise ValueError(f"its {part} has {len(pieces)} parts; at most {PARTS_MAX} are read")
        _check_growth(part, pieces)
    return msgspec.json.encode(file).decode()


def _parts(part: str, given: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if given is None:
        return
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in _KINDS[part]:
        raise ValueError(f"its {part} is of the kind {str(kind)[:100]!r}, which is not known")
    if kind != "Sequence":
        yield given
        return
    if depth == DEPTH_MAX:
        raise ValueError(f"its {part} has sequences in sequences")
    for nested in given.get(_NESTED[part]) or ():
        yield from _parts(part, nested, depth + 1)


def _check_growth(part: str, found: list[Mapping[str, Any]]) -> None:
    growth = 1
    for step in found:
        if len(str(step.get("precompiled_charsmap"))) > CHARSMAP_MAX:
            raise ValueError(f"its {part} has a map of more than {CHARSMAP_MAX} characters")
        pattern = step.get("pattern")
        is_text = isinstance(pattern, Mapping) and "String" in pattern
        sought = str(pattern["String"]) if isinstance(pattern, Mapping) and is_text else ""
        put_in = str(step.get("content") or step.get("prepend") or "")
        if max(len(str(pattern)), len(put_in)) > TEXT_MAX:
            raise ValueError(f"its {part} has a text of more than {TEXT_MAX} characters")
        # A regular expression may be found between any two characters.
        grown = -(-len(put_in) // len(sought)) if sought else len(put_in) + 1
        growth *= max(grown, _GROWTH.get(step["type"], 1))
        if growth > GROWTH_MAX:
            raise ValueError(f"its {part} may make more than {GROWTH_MAX} characters of one")

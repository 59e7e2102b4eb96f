"""Text to tokens, and examples to tokens of which only the answers are predicted.

A tokenizer is one of bytes or a ``tokenizer.json``, which is also what a tokenizer of the hub
becomes. It is named by its hash, so that tokens of another tokenizer are never taken for its own.

A token that is read and not predicted is written as its complement, a negative number: sequences
of tokens carry with them what the loss is of (``peer.model.recipes.next_token_loss``). A sequence
holds whole examples and is filled up with such tokens, so that no answer is without its question.
An example longer than a sequence is cut at its end; one whose answer is then left out is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from peer.data.batches.sequences import is_held_out
from peer.data.text.formats import Item
from peer.data.text.token_cache import PieceTokens
from peer.data.text.tokenizer_json import checked
from peer.errors import DataUnavailable, one_line
from peer.installed import needed
from peer.run_file.forms import ExampleForm

Tokens = NDArray[np.int32]

BATCH_CHARACTERS = 1 << 18
FILE_MAX_BYTES = 1 << 26

BYTES_END = 0
"""The byte token that ends a document, which occurs in no text."""


class TokenizerFacts(msgspec.Struct, frozen=True):
    """Facts of a tokenizer that are known without loading it."""

    digest: str
    end: int
    vocabulary: int


class Tokenizer:
    """Tokens of texts, with their type, the token that ends a document, and a name."""

    digest: str
    end: int
    vocabulary: int

    @property
    def facts(self) -> TokenizerFacts:
        return TokenizerFacts(self.digest, self.end, self.vocabulary)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.vocabulary - 1)

    def encode(self, texts: Sequence[str]) -> Iterable[NDArray[Any]]:
        raise NotImplementedError

    def encode_from(
        self, texts: Sequence[str], starts: Sequence[int]
    ) -> Iterable[tuple[NDArray[Any], int]]:
        """The tokens of each text, and how many of them begin before its character ``start``."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8."""

    digest = "bytes"
    end = BYTES_END
    vocabulary = 256

    def encode(self, texts: Sequence[str]) -> Iterable[NDArray[Any]]:
        for text in texts:
            yield np.frombuffer(text.encode().replace(b"\0", b" "), np.uint8)

    def encode_from(
        self, texts: Sequence[str], starts: Sequence[int]
    ) -> Iterable[tuple[NDArray[Any], int]]:
        for text, tokens, start in zip(texts, self.encode(texts), starts, strict=True):
            yield tokens, len(text[:start].encode())


class FileTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the tokenizers package. Raises ``DataUnavailable``."""

    def __init__(self, path: Path, end_token: str) -> None:
        tokenizers = needed("tokenizers", f"the tokenizer {path}")
        with _told(f"{path} is no tokenizer.json"):
            if path.stat().st_size > FILE_MAX_BYTES:
                raise ValueError(f"it is larger than {FILE_MAX_BYTES >> 20} MiB")
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(checked(content))
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        end = self._tokenizer.token_to_id(end_token)
        if end is None:
            raise DataUnavailable(
                "files",
                f"the tokenizer {path} has no token {end_token!r}; set data.end_token to the token "
                "that ends a document in it",
            )
        self.end = end
        # Numbers may be left out in between: the largest one decides, and not how many there are.
        self.vocabulary = max(self._tokenizer.get_vocab().values()) + 1
        self.digest = blake3(content + b"\0" + end_token.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> Iterable[NDArray[Any]]:
        for encoding in self._encoded(self._tokenizer.encode_batch_fast, texts):
            yield np.array(encoding.ids, self.dtype)

    def encode_from(
        self, texts: Sequence[str], starts: Sequence[int]
    ) -> Iterable[tuple[NDArray[Any], int]]:
        encoded = self._encoded(self._tokenizer.encode_batch, texts)
        for encoding, start in zip(encoded, starts, strict=True):
            known = sum(first < start for first, _ in encoding.offsets)
            yield np.array(encoding.ids, self.dtype), known

    def _encoded(self, encode: Callable[..., Iterable[Any]], texts: Sequence[str]) -> Iterable[Any]:
        # Several texts at once: the package encodes them in parallel, without the lock of Python.
        with _told(f"the tokenizer {self._path} cannot encode a text"):
            return encode(list(texts), add_special_tokens=False)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise ``DataUnavailable`` for what the package raises: bare exceptions, and panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no ``Exception``
        raise DataUnavailable("files", f"{what}: {one_line(error)}") from error


def tokens_of(items: Iterable[Item], tokenizer: Tokenizer, *, held_out: float) -> PieceTokens:
    """The tokens of a piece of text, apart for training and as held-out part."""
    end = np.array([tokenizer.end], tokenizer.dtype)
    parts: dict[bool, list[NDArray[Any]]] = {False: [], True: []}
    for batch in batches(items):
        for item, tokens in zip(batch, tokenizer.encode([i.text for i in batch]), strict=True):
            part = parts[is_held_out(item.key, held_out)]
            part.append(tokens)
            if item.is_end:
                part.append(end)
    nothing = np.empty(0, tokenizer.dtype)
    return PieceTokens(*(np.concatenate([nothing, *parts[held]]) for held in (False, True)))


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- examples -----------------------------------------------------------------------------------


def example_tokens(form: ExampleForm, text: str, tokenizer: Tokenizer) -> Tokens:
    """The tokens of an example that ``formats.text_of`` has written."""
    turns = list(form.turns(msgspec.json.decode(text)))
    starts = [len(turn.context) for turn in turns]
    encoded = tokenizer.encode_from([turn.text for turn in turns], starts)
    parts: list[Tokens] = [np.empty(0, np.int32)]
    end = np.array([tokenizer.end], np.int32)
    for tokens, known in encoded:
        tokens = tokens.astype(np.int32)
        parts += [~tokens[:known], tokens[known:], end]
    return np.concatenate(parts)


def sequences_of(
    items: Iterable[Item], tokenizer: Tokenizer, form: ExampleForm, *, held_out: float, size: int
) -> PieceTokens:
    """The sequences of a piece of examples, apart for training and as held-out part.

    They are kept as unsigned numbers, as all tokens are; ``signed`` reads them.
    """
    parts: dict[bool, list[Tokens]] = {False: [], True: []}
    for item in items:
        part = parts[is_held_out(item.key, held_out)]
        part.append(example_tokens(form, item.text, tokenizer))
    rows = (packed(parts[held], size, end=tokenizer.end) for held in (False, True))
    return PieceTokens(*(part.view(np.uint32) for part in rows))


def signed(tokens: PieceTokens) -> PieceTokens:
    """The sequences that ``sequences_of`` has made."""
    return PieceTokens(*(part.view("<i4") for part in (tokens.train, tokens.held_out)))


def packed(examples: Iterable[Tokens], size: int, *, end: int) -> Tokens:
    """Sequences of ``size`` tokens with whole examples, one after the other in one array."""
    rows: list[Tokens] = [np.empty(0, np.int32)]
    room = 0
    for example in examples:
        example = example[:size]
        if not predicted(example):
            continue
        if example.size > room:
            rows.append(filling(room, end))
            room = size
        rows.append(example)
        room -= example.size
    return np.concatenate([*rows, filling(room, end)])


def filling(count: int, end: int) -> Tokens:
    return np.full(count, ~end, np.int32)


def predicted(tokens: NDArray[Any]) -> int:
    """Number of tokens after the first that are predicted."""
    return int((tokens[1:] >= 0).sum())

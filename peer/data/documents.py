"""Sequences of a streamed dataset of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from peer.data.batches.order import Order, is_held_out
from peer.data.batches.sequences import Sequences, evenly_chosen, evenly_spaced
from peer.data.corpus import SEPARATOR
from peer.data.kept_documents import BLOCK_DOCUMENTS, KeptDocuments
from peer.data.text.examples import packed
from peer.errors import DataUnavailable

_PARTS_MIN = 16
"""A dataset in fewer files is divided by document as well (see ``DocumentStream``)."""

DROPPED_MAX = 10_000
"""Examples in a row that are too long for a sequence, after which the data is refused."""

GROUP_DOCUMENTS_MAX = 32
GROUP_CHARACTERS = 1 << 18


class ShardedDocuments(Protocol):
    """The part of ``datasets.IterableDataset`` that is used here."""

    @property
    def num_shards(self) -> int: ...

    def shard(self, num_shards: int, index: int) -> ShardedDocuments: ...

    def skip(self, n: int) -> ShardedDocuments: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class Until:
    """Streamed documents until ``over()``; then each row, also one that is skipped, is an error.

    The place in its data that another peer names may be any number of rows away.
    """

    def __init__(
        self, documents: ShardedDocuments, over: Callable[[], bool], *, skipped: int = 0
    ) -> None:
        self._documents = documents
        self._over = over
        self._skipped = skipped

    @property
    def num_shards(self) -> int:
        return self._documents.num_shards

    def shard(self, num_shards: int, index: int) -> Until:
        return Until(self._documents.shard(num_shards=num_shards, index=index), self._over)

    def skip(self, n: int) -> Until:
        return Until(self._documents, self._over, skipped=self._skipped + n)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(self._documents):
            if self._over():
                raise DataUnavailable("hf", f"time is up after {number} rows of a file")
            if number >= self._skipped:
                yield row


class Tokenizer(Protocol):
    """Turns documents into token numbers, each ending with a separator.

    Several are given at once, as a tokenizer of the hub encodes them in parallel.
    """

    def __call__(self, texts: Sequence[str]) -> Sequence[NDArray[np.int64]]: ...


TextOf = Callable[[Mapping[str, Any]], str]
"""Returns the text of a row. Raises ``DataUnavailable``."""


def text_in(field: str) -> TextOf:
    """The text in a column."""

    def text_of(row: Mapping[str, Any]) -> str:
        text = row.get(field)
        if not isinstance(text, str):
            known = ", ".join(sorted(row))
            raise DataUnavailable(
                "hf", f"column {field!r} has no text; the columns are {known}: set data.text_field"
            )
        return text

    return text_of


class DocumentStream:
    """One peer's stream of sequences of a dataset of documents.

    The stream reads the dataset's files in its own order, each from its beginning. If there are
    so few files that peers would often read the same documents at the same time, each pass over a
    file takes only one part of its documents, chosen by a hash. Sequences are cut from the
    tokens of the documents, joined end to end.
    """

    def __init__(
        self,
        documents: ShardedDocuments,
        tokenize: Tokenizer,
        *,
        files: Order,
        text_of: TextOf,
        held_out: float,
        sequence_length: int,
        kept: KeptDocuments | None = None,
        fill: int | None = None,
    ) -> None:
        """``files``: this peer's order of the documents' files. ``kept``: where tokens are kept for
        further passes, of datasets in many files. ``fill``: the token to fill up sequences with,
        which then hold whole examples.
        """
        self._documents = documents
        self._tokenize = tokenize
        self._text_of = text_of
        self._fill = fill
        self._held_out = held_out
        self._length = sequence_length
        self._files = files
        self._parts = -(-_PARTS_MIN // files.count)
        # Of a file that is read in parts, each pass would tokenize all documents for a few.
        self._kept = kept if self._parts == 1 else None
        self._pass = 0
        """Number of files that have been read to the end."""
        self._document = 0
        """Index, in the current file, of the document with which ``_pending`` begins."""
        self._used = 0
        """Tokens already returned of the document with which ``_pending`` begins."""
        self._pending: list[tuple[int, int, NDArray[np.int64]]] = []
        self._source: Iterator[tuple[int, int, NDArray[np.int64]]] = self._read(0, 0)

    def next(self, sequences: int) -> Sequences:
        return np.stack([self._next_one() for _ in range(sequences)])

    def state(self) -> dict[str, int]:
        return {"pass": self._pass, "document": self._document, "used": self._used}

    def restore(self, state: Mapping[str, int]) -> None:
        self._pass, self._document, self._used = (
            state["pass"],
            state["document"],
            state["used"],
        )
        if min(self._pass, self._document, self._used) < 0:
            raise ValueError(
                f"{state} is not a position of a stream; no number in it may be negative"
            )
        self._pending = []
        self._source = self._read(self._pass, self._document)

    def _next_one(self) -> NDArray[np.int64]:
        return self._next_window() if self._fill is None else self._next_examples(self._fill)

    def _next_examples(self, fill: int) -> NDArray[np.int64]:
        """A sequence of whole examples, up to the first one that it has no room for."""
        size = self._length + 1
        parts, room, dropped = [], size, 0
        while True:
            if not self._pending:
                self._pending.append(next(self._source))
            example = self._pending[0][2][:size]
            if not (example[1:] >= 0).any():
                dropped += 1
                if dropped > DROPPED_MAX:
                    raise DataUnavailable(
                        "hf", f"{dropped} examples in a row have no answer in {size} tokens"
                    )
            elif example.size > room:
                break
            else:
                parts.append(example)
                room -= example.size
            self._pending.pop(0)
        self._pass, self._document = self._pending[0][:2]
        return np.concatenate([*parts, np.full(room, ~fill, np.int64)])

    def _next_window(self) -> NDArray[np.int64]:
        # Consecutive sequences share a token: the last target of one begins the next.
        have = sum(tokens.size for _, _, tokens in self._pending) - self._used
        while have < self._length + 1:
            item = next(self._source)
            if not self._pending and self._used >= item[2].size:
                # No position of a stream: another peer may say any, and would have all read.
                have, self._used = 0, 0
            self._pending.append(item)
            have += item[2].size
            self._pass, self._document = self._pending[0][:2]
        tokens = np.concatenate([tokens for _, _, tokens in self._pending])
        sequence = tokens[self._used : self._used + self._length + 1]
        self._used += self._length
        while self._used >= self._pending[0][2].size:
            self._used -= self._pending.pop(0)[2].size
        self._pass, self._document = self._pending[0][:2]
        return sequence

    def _read(self, passes: int, document: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Endless iterator over (pass, index in the file, tokens), beginning with a document."""
        empty_passes = 0
        while True:
            file = int(self._files.at(passes, 1)[0])
            part = self._documents.shard(num_shards=self._files.count, index=file)
            found = False
            for index, tokens in (
                self._encoded(self._texts(part, passes, document))
                if self._kept is None
                else self._encoded_once(self._kept, part, file, document)
            ):
                found = True
                yield passes, index, tokens
            empty_passes = 0 if found else empty_passes + 1
            if empty_passes > 2 * self._parts * self._files.count:
                raise DataUnavailable("hf", "the dataset has nothing to train on")
            passes, document = passes + 1, 0

    def _encoded(self, texts: Iterator[tuple[int, str]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for group in _in_groups(texts):
            tokenized = self._tokenize([text for _, text in group])
            for (index, _), tokens in zip(group, tokenized, strict=True):
                yield index, tokens

    def _encoded_once(
        self, kept: KeptDocuments, part: ShardedDocuments, file: int, document: int
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The tokens of one pass over a file; blocks that are not kept are made and kept."""
        rows: Iterator[Mapping[str, Any]] | None = None
        for block in count(document // BLOCK_DOCUMENTS):
            start = block * BLOCK_DOCUMENTS
            tokens = kept.read(file, block)
            if tokens is None:
                if rows is None:
                    rows = iter(part.skip(start) if start else part)
                tokens = self._encoded_block(list(islice(rows, BLOCK_DOCUMENTS)))
                kept.write(file, block, tokens)
            else:
                rows = None
            for index, each in enumerate(tokens, start):
                if index >= document and each.size:
                    yield index, each
            if len(tokens) < BLOCK_DOCUMENTS:
                return

    def _encoded_block(self, rows: Sequence[Mapping[str, Any]]) -> list[NDArray[np.int64]]:
        nothing = np.empty(0, np.int64)
        texts = ((number, self._text_of(row)) for number, row in enumerate(rows))
        wanted = ((n, text) for n, text in texts if not self._is_held_out(text))
        found = dict(self._encoded(wanted))
        return [found.get(number, nothing) for number in range(len(rows))]

    def _texts(
        self, part: ShardedDocuments, passes: int, document: int
    ) -> Iterator[tuple[int, str]]:
        """The documents of one pass over a file that are trained on, with their indices."""
        for index, row in enumerate(part.skip(document) if document else part, document):
            text = self._text_of(row)
            if self._is_in_part(passes, index) and not self._is_held_out(text):
                yield index, text

    def _is_held_out(self, text: str) -> bool:
        return is_held_out(text.encode(), self._held_out)

    def _is_in_part(self, passes: int, index: int) -> bool:
        if self._parts == 1:
            return True
        round_, turn = divmod(passes // self._files.count, self._parts)
        key = f"{self._files.key}/{round_}/{index}".encode()
        return int.from_bytes(blake3(key).digest(length=8), "little") % self._parts == turn


def _in_groups(texts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Groups of documents that are tokenized at once."""
    group: list[tuple[int, str]] = []
    characters = 0
    for item in texts:
        group.append(item)
        characters += len(item[1])
        if len(group) == GROUP_DOCUMENTS_MAX or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def tokenize_bytes(texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """One token per byte of UTF-8, and the separator."""
    encoded = (text.encode().replace(b"\0", b" ") + bytes([SEPARATOR]) for text in texts)
    return [np.frombuffer(each, np.uint8).astype(np.int64) for each in encoded]


def held_out_documents(
    documents: Iterable[Mapping[str, Any]],
    tokenize: Tokenizer,
    *,
    text_of: TextOf,
    held_out: float,
    sequences: int,
    sequence_length: int,
    fill: int | None = None,
) -> Sequences:
    """The first held-out sequences of a dataset, the same at every peer."""
    wanted = sequences * sequence_length + 1
    parts: list[NDArray[np.int64]] = []
    for row in documents:
        text = text_of(row)
        if is_held_out(text.encode(), held_out):
            parts += tokenize([text])
            wanted -= parts[-1].size
            if wanted <= 0:
                break
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if tokens.size <= sequence_length:
        raise DataUnavailable(
            "hf", f"the held-out part has {tokens.size} tokens; raise data.held_out"
        )
    if fill is not None:
        rows = packed((each.astype(np.int32) for each in parts), sequence_length + 1, end=fill)
        if not rows.size:
            raise DataUnavailable(
                "hf", f"no held-out example has its answer in {sequence_length} tokens"
            )
        return evenly_chosen(rows, sequences, sequence_length=sequence_length)
    return evenly_spaced(tokens, sequences, sequence_length=sequence_length)

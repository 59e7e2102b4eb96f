"""Sequences of a streamed data set of documents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.identity import PeerId, RunId
from peer.data.corpus import SEPARATOR
from peer.data.held_out import is_held_out
from peer.data.order import Order
from peer.data.sequences import Sequences, evenly_spaced
from peer.errors import DataUnavailable

_PARTS_MIN = 16
"""A dataset in fewer files than this is dealt out by document as well (see ``DocumentStream``)."""


class ShardedDocuments(Protocol):
    """What is used of ``datasets.IterableDataset``."""

    @property
    def num_shards(self) -> int: ...

    def shard(self, num_shards: int, index: int) -> ShardedDocuments: ...

    def skip(self, n: int) -> ShardedDocuments: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class Tokenizer(Protocol):
    """From a document to token numbers, ending with a separator."""

    def __call__(self, text: str) -> NDArray[np.int64]: ...


class DocumentStream:
    """One peer's sequences of a streamed dataset.

    It reads the dataset's files in its own order, each from its beginning. With few
    files all peers would read the same documents at the same time: then each takes,
    in each pass, only the documents of one part in ``parts``, chosen by a hash.
    Sequences are cut from the documents' tokens joined end to end.
    """

    def __init__(
        self,
        documents: ShardedDocuments,
        tokenize: Tokenizer,
        *,
        text_field: str,
        held_out: float,
        sequence_length: int,
        run_id: RunId,
        peer_id: PeerId,
    ) -> None:
        self._documents = documents
        self._tokenize = tokenize
        self._text_field = text_field
        self._held_out = held_out
        self._length = sequence_length
        self._files = Order(documents.num_shards, run_id=run_id, peer_id=peer_id)
        self._parts = -(-_PARTS_MIN // documents.num_shards)
        self._key = f"{run_id}/{peer_id}"
        self._pass = 0
        """How many files have been read to their end."""
        self._document = 0
        """Documents taken from the current file, the one that ``_pending`` begins in included."""
        self._used = 0
        """Tokens already given out of the document that ``_pending`` begins in."""
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
            raise ValueError(f"{state} cannot be where a stream stands")
        self._pending = []
        self._source = self._read(self._pass, self._document)

    def _next_one(self) -> NDArray[np.int64]:
        # Consecutive sequences share one token: the last target is the next one's beginning.
        have = sum(tokens.size for _, _, tokens in self._pending) - self._used
        while have < self._length + 1:
            item = next(self._source)
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
        """Endless (pass, index in the file, tokens) from a document on."""
        fruitless = 0
        while True:
            file = int(self._files.at(passes, 1)[0])
            part = self._documents.shard(num_shards=self._files.count, index=file)
            found = False
            for index, row in enumerate(part.skip(document) if document else part, document):
                text = row.get(self._text_field)
                if not isinstance(text, str):
                    known = ", ".join(sorted(row))
                    raise DataUnavailable(
                        "hf", f"column {self._text_field!r} has no text; there are: {known}"
                    )
                if not self._mine(passes, index) or is_held_out(text.encode(), self._held_out):
                    continue
                found = True
                yield passes, index, self._tokenize(text)
            fruitless = 0 if found else fruitless + 1
            if fruitless > 2 * self._parts * self._files.count:
                raise DataUnavailable("hf", "the dataset has nothing to train on")
            passes, document = passes + 1, 0

    def _mine(self, passes: int, index: int) -> bool:
        if self._parts == 1:
            return True
        round_, turn = divmod(passes // self._files.count, self._parts)
        key = f"{self._key}/{round_}/{index}".encode()
        return int.from_bytes(blake3(key).digest(length=8), "little") % self._parts == turn


def tokenize_bytes(text: str) -> NDArray[np.int64]:
    """One token per byte of UTF-8, and the separator."""
    encoded = text.encode().replace(b"\0", b" ") + bytes([SEPARATOR])
    return np.frombuffer(encoded, np.uint8).astype(np.int64)


def held_out_documents(
    documents: Iterable[Mapping[str, Any]],
    tokenize: Tokenizer,
    *,
    text_field: str,
    held_out: float,
    sequences: int,
    sequence_length: int,
) -> Sequences:
    """The first held-out sequences of a stream, the same for every peer."""
    wanted = sequences * sequence_length + 1
    parts: list[NDArray[np.int64]] = []
    for row in documents:
        text = row[text_field]
        if is_held_out(text.encode(), held_out):
            parts.append(tokenize(text))
            wanted -= parts[-1].size
            if wanted <= 0:
                break
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if tokens.size <= sequence_length:
        raise DataUnavailable(
            "hf", f"its held-out part has {tokens.size} tokens; raise data.held_out"
        )
    return evenly_spaced(tokens, sequences, sequence_length=sequence_length)

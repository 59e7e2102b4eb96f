"""Training data: for each peer an own order through it, and a part that nobody trains on.

There is no coordinator. A peer reads sequences in a pseudo-random order that follows
from the run's id and its own peer id, and where it stands is a handful of integers,
so it resumes at the exact sequence. Whether a document (or a chunk of one) is held
out follows from a hash of it, so all peers leave out the same ones.

Local data becomes a flat array of tokens in a file, built once and mapped into
memory: a batch costs well under a millisecond and no memory of its own. Recipes:

- ``python_stdlib``: the sources of the standard library of the running interpreter,
  one byte per token. Peers with different versions of Python read slightly different
  files; a module is held out by its *name*, so no version of it is trained on. Tests,
  bundled packages and generated files are left out, as some distributions lack them.
- ``text``: files in the peer's data folder, one byte per token, held out by chunk.
- ``hf``: a dataset of the Hugging Face hub, streamed, held out by document.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.identity import PeerId, RunId
from peer.errors import DataUnavailable, ExtraMissing
from peer.run_file.run_file import (
    CustomData,
    HfData,
    PythonStdlibData,
    RunFile,
    TextData,
    vocabulary,
)

SEPARATOR = 0
"""The token between two documents in bytes: it occurs in no text."""

CHUNK_BYTES = 1 << 16
"""Text files are held out in pieces of this size, as one file may be the whole corpus."""

_CACHE_FORMAT = 1

_NOT_STDLIB = frozenset(
    (
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)

Sequences = NDArray[np.int64]
"""Shape (sequences, sequence_length + 1): each token but the last is followed by its target."""


class TokenStream(Protocol):
    """One peer's endless sequences, in its own order."""

    def next(self, sequences: int) -> Sequences:
        """The next so many sequences."""
        ...

    def state(self) -> dict[str, int]:
        """Where it stands: what ``restore`` needs to go on with exactly the next sequence."""
        ...

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a ``state`` of the same peer in the same run."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """What a peer trains on and what it measures on."""

    train: TokenStream
    held_out: Sequences
    """The same sequences at every peer that has the same data."""
    description: str


def open_data(run: RunFile, *, peer_id: PeerId, cache_dir: Path, data_dir: Path) -> Data:
    """Open the run's data for this peer. Raises ``DataUnavailable`` or ``ExtraMissing``.

    ``cache_dir`` takes the token files, which any number of processes may share;
    ``data_dir`` is where the patterns of the ``text`` recipe begin.
    """
    recipe, length = run.data, run.data.sequence_length
    if isinstance(recipe, HfData):
        return _open_hf(run, recipe, peer_id)
    if isinstance(recipe, PythonStdlibData):
        files = _stdlib_files()
        whole_documents = True
    elif isinstance(recipe, TextData):
        files = _text_files(recipe, data_dir)
        whole_documents = False
    else:
        assert isinstance(recipe, CustomData)
        raise ValueError("the run's data is 'custom': pass it to run.data(dataset)")
    name = "python_stdlib" if whole_documents else "text"
    corpus = _cached_corpus(
        name, files, held_out=recipe.held_out, by_name=whole_documents, cache_dir=cache_dir
    )
    for part, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if tokens.size < 2 * length:
            raise DataUnavailable(
                name,
                f"the {part} part has {tokens.size} tokens, a sequence takes "
                f"{length}; add text or shorten data.sequence_length",
            )
    return Data(
        Shard(corpus.train, sequence_length=length, run_id=run.run_id, peer_id=peer_id),
        evenly_spaced(corpus.held_out, run.evaluation.sequences, sequence_length=length),
        f"{name}: {corpus.train.size / 1e6:.1f} M tokens in {len(files)} files, "
        f"{corpus.held_out.size / 1e6:.2f} M held out",
    )


def check_data(run: RunFile, data_dir: Path) -> None:
    """What can be told before anything begins. Raises ``DataUnavailable`` or ``ExtraMissing``."""
    recipe = run.data
    if isinstance(recipe, TextData):
        _text_files(recipe, data_dir)
    elif isinstance(recipe, HfData):
        _check_hf(recipe)


# --- an own order -----------------------------------------------------------------------------


class Order:
    """An endless walk through ``count`` things: each once per epoch, in this peer's own order.

    Stateless: the thing at a position is a keyed permutation (a Feistel network with
    cycle walking) of it, so any position can be asked for at any time.
    """

    def __init__(self, count: int, *, run_id: RunId, peer_id: PeerId) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; an order needs at least one thing")
        self.count = count
        self._key = f"{run_id}/{peer_id}"
        self._half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))

    def at(self, start: int, number: int) -> NDArray[np.int64]:
        """The things at positions ``start`` to ``start + number``."""
        positions = np.arange(start, start + number, dtype=np.int64)
        epochs, places = np.divmod(positions, self.count)
        things = np.empty(number, np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            things[mine] = self._permuted(places[mine].astype(np.uint64), int(epoch))
        return things

    def draw(self, epoch: int, below: int) -> int:
        """A number from 0 to ``below`` - 1 that belongs to an epoch."""
        digest = blake3(f"{self._key}/{epoch}/draw".encode()).digest(length=8)
        return int.from_bytes(digest, "little") % below

    def _permuted(self, values: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        digest = blake3(f"{self._key}/{epoch}/order".encode()).digest(length=32)
        keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        values = self._feistel(values, keys)
        while (outside := values >= self.count).any():
            values[outside] = self._feistel(values[outside], keys)
        return values

    def _feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = self._half_bits
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Shard:
    """One peer's sequences of a token array: all of them once per epoch, then cut anew.

    In each epoch the array is cut into consecutive windows from another beginning, so that
    the same tokens do not always stand at the same places.
    """

    def __init__(
        self,
        tokens: NDArray[np.generic],
        *,
        sequence_length: int,
        run_id: RunId,
        peer_id: PeerId,
    ) -> None:
        windows = (tokens.size - sequence_length) // sequence_length
        self._tokens = tokens
        self._length = sequence_length
        self._order = Order(windows, run_id=run_id, peer_id=peer_id)
        self._position = 0

    def __repr__(self) -> str:
        return f"Shard(position={self._position}, epoch={self.epoch:.2f})"

    @property
    def epoch(self) -> float:
        """How often everything has been read."""
        return self._position / self._order.count

    def next(self, sequences: int) -> Sequences:
        windows = self._order.at(self._position, sequences)
        positions = np.arange(self._position, self._position + sequences)
        epochs = positions // self._order.count
        shift = {int(e): self._order.draw(int(e), self._length) for e in np.unique(epochs)}
        starts = windows * self._length + np.array([shift[int(e)] for e in epochs], np.int64)
        self._position += sequences
        return _windows(self._tokens, starts, self._length)

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        position = state["position"]
        if position < 0:
            raise ValueError(f"position is {position}; it must be at least 0")
        self._position = position


def evenly_spaced(
    tokens: NDArray[np.generic], sequences: int, *, sequence_length: int
) -> Sequences:
    """At most so many non-overlapping sequences from all over the array."""
    fitting = (tokens.size - 1) // sequence_length
    sequences = min(sequences, fitting)
    starts = np.arange(sequences) * fitting // sequences * sequence_length
    return _windows(tokens, starts, sequence_length)


def _windows(tokens: NDArray[np.generic], starts: NDArray[np.int64], length: int) -> Sequences:
    chosen: Sequences = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return chosen


# --- local files as one array of tokens -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: str
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two flat arrays of byte tokens, mapped from files."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


def _stdlib_files() -> list[_File]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f for f in folders if f not in _NOT_STDLIB and not f.startswith("config-")
        )
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                files.append(_file(Path(folder, name), root))
    if sum(file.size_bytes for file in files) < 1 << 20:
        raise DataUnavailable(
            "python_stdlib",
            f"{root} has hardly any sources ({len(files)} files); "
            "use a Python that comes with them, or the data recipe 'text'",
        )
    return files


def _text_files(recipe: TextData, data_dir: Path) -> list[_File]:
    found: dict[str, _File] = {}
    for pattern in recipe.files:
        matches = [path for path in data_dir.glob(pattern) if path.is_file()]
        if not matches:
            raise DataUnavailable(
                "text",
                f"no file in {data_dir.resolve()} matches {pattern!r}; "
                "put the files there or pass their folder with --data",
            )
        for path in matches:
            file = _file(path, data_dir)
            found[file.name] = file
    return [found[name] for name in sorted(found)]


def _file(path: Path, root: Path) -> _File:
    stat = path.stat()
    return _File(path, path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)


def is_held_out(key: bytes, share: float) -> bool:
    """Whether what has this key is measured on and never trained on. The same at every peer."""
    return _rank(key) < share


def _rank(key: bytes) -> float:
    return int.from_bytes(blake3(b"held out/" + key).digest(length=8), "little") / 2.0**64


def _cached_corpus(
    name: str, files: list[_File], *, held_out: float, by_name: bool, cache_dir: Path
) -> Corpus:
    fingerprint = blake3()
    for part in (_CACHE_FORMAT, name, held_out, by_name, CHUNK_BYTES):
        fingerprint.update(f"{part}\n".encode())
    for file in files:
        entry = [str(file.path.resolve()), file.size_bytes, file.changed_ns]
        fingerprint.update(json.dumps(entry).encode())
    folder = cache_dir / f"{name}-{fingerprint.hexdigest()[:32]}"
    try:
        if not folder.is_dir():
            _build_corpus(files, folder, held_out=held_out, by_name=by_name)
        return Corpus(_mapped(folder / "train.u8"), _mapped(folder / "held_out.u8"))
    except OSError as error:
        raise DataUnavailable(name, f"{error.filename or folder}: {error.strerror}") from error


def _mapped(path: Path) -> NDArray[np.uint8]:
    if path.stat().st_size == 0:  # which mmap refuses
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _build_corpus(files: list[_File], folder: Path, *, held_out: float, by_name: bool) -> None:
    """Write both parts beside ``folder`` and move them there at once, whole or not at all."""
    keys = (
        (file.name.encode() for file in files)
        if by_name
        else (blake3(piece).digest() for file in files for piece in _pieces(file, whole=False))
    )
    ranks = [_rank(key) for key in keys]
    # A small corpus may have no piece below the threshold: then it is the lowest one.
    threshold = max(held_out, float(np.nextafter(min(ranks), 1.0))) if ranks else held_out
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir(parents=True)
    try:
        train, held = temporary / "train.u8", temporary / "held_out.u8"
        with train.open("wb") as train_file, held.open("wb") as held_file:
            remaining = iter(ranks)
            for file in files:
                for piece in _pieces(file, whole=by_name):
                    out = held_file if next(remaining) < threshold else train_file
                    out.write(piece)
                train_file.write(bytes([SEPARATOR]))
                held_file.write(bytes([SEPARATOR]))
            for written in (train_file, held_file):
                written.flush()
                os.fsync(written.fileno())
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _pieces(file: _File, *, whole: bool) -> Iterator[bytes]:
    with file.path.open("rb") as opened:
        while piece := opened.read(-1 if whole else CHUNK_BYTES):
            yield piece.replace(b"\0", b" ")


# --- streams of the hub -----------------------------------------------------------------------


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


_HF_FORMS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of plain columns. Others unpack archives, and decode whatever is in them."""

_HF_PARTS = 16
"""A dataset in fewer files than this is dealt out by document as well (see ``DocumentStream``)."""


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
        self._parts = -(-_HF_PARTS // documents.num_shards)
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


def _open_hf(run: RunFile, recipe: HfData, peer_id: PeerId) -> Data:
    _check_hf(recipe)
    tokenize: Tokenizer = tokenize_bytes
    if recipe.tokenizer != "bytes":
        tokenize = _hub_tokenizer(recipe.tokenizer, vocabulary=vocabulary(run.model))
    try:
        commit = checked_commit(recipe.dataset, recipe.revision)
        import datasets

        builder = datasets.load_dataset_builder(recipe.dataset, recipe.subset, revision=commit)
        check_files(recipe.dataset, type(builder).__module__, builder.config.data_files or {})
        documents: ShardedDocuments = builder.as_streaming_dataset(split=recipe.split)
        held_out = held_out_documents(
            documents,
            tokenize,
            text_field=recipe.text_field,
            held_out=recipe.held_out,
            sequences=run.evaluation.sequences,
            sequence_length=recipe.sequence_length,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataUnavailable("hf", f"{recipe.dataset}: {error}") from error
    stream = DocumentStream(
        documents,
        tokenize,
        text_field=recipe.text_field,
        held_out=recipe.held_out,
        sequence_length=recipe.sequence_length,
        run_id=run.run_id,
        peer_id=peer_id,
    )
    return Data(stream, held_out, f"hf: {recipe.dataset}, streamed, {documents.num_shards} files")


def _check_hf(recipe: HfData) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise ExtraMissing("the data recipe 'hf'", "datasets", "hf")
    for name in {recipe.dataset, recipe.tokenizer} - {"bytes"}:
        _refuse_local(name)


def _refuse_local(name: str) -> None:
    """Both libraries take a folder of that name for what is meant, if there is one: then a run file
    from a stranger would choose among the user's own."""
    if Path(name).exists():
        raise DataUnavailable(
            "hf",
            f"{name!r} of the hub is meant, and {Path(name).absolute()} is here as well; "
            "begin in another folder",
        )


def checked_commit(dataset: str, revision: str | None) -> str:
    """The commit of a revision, once its README was seen to name no place but the dataset itself.

    To resolve a name ``datasets`` looks there, at any address that only this machine reaches, and
    before ``check_files`` hears of it. Raises ``DataUnavailable`` and ``OSError``.
    """
    import huggingface_hub
    import yaml
    from huggingface_hub.errors import EntryNotFoundError

    commit = str(huggingface_hub.HfApi().dataset_info(dataset, revision=revision).sha)
    for name in ("README.md", ".huggingface.yaml"):
        try:
            path = huggingface_hub.hf_hub_download(
                dataset, name, repo_type="dataset", revision=commit
            )
        except EntryNotFoundError:
            continue
        if name == "README.md":
            card = huggingface_hub.DatasetCard.load(path).data.to_dict()
        else:
            card = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        configs = [each for each in card.get("configs") or () if isinstance(each, Mapping)]
        for text in _texts([(each.get("data_files"), each.get("data_dir")) for each in configs]):
            # A colon begins an address, or an archive within another file.
            if ":" in text or text.startswith(("/", "~")) or ".." in text.split("/"):
                raise DataUnavailable("hf", f"{dataset} names a place that is not in it: {text}")
    return commit


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def check_files(dataset: str, reader: str, files: Mapping[str, Iterable[str]]) -> None:
    """See that a dataset is read from its own files, as text. Raises ``DataUnavailable``.

    Its author may name any others in its README: those of this machine (which would be trained on,
    and so given away), or of addresses that only this machine reaches.
    """
    form = reader.rpartition(".")[2]
    if form not in _HF_FORMS:
        raise DataUnavailable(
            "hf", f"{dataset} is read as {form!r}; only {', '.join(_HF_FORMS)} are read here"
        )
    for file in (each for part in files.values() for each in part):
        if not file.startswith(f"hf://datasets/{dataset}@") or ".." in file.split("/"):
            raise DataUnavailable("hf", f"{dataset} names a file that is not its own: {file[:200]}")


def _hub_tokenizer(name: str, *, vocabulary: int | None) -> Tokenizer:
    try:
        import transformers
    except ImportError as error:
        raise ExtraMissing(f"the tokenizer {name!r}", "transformers", "hf") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataUnavailable("hf", f"tokenizer {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataUnavailable("hf", f"tokenizer {name!r} has no end-of-text token")
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise DataUnavailable(
            "hf", f"tokenizer {name!r} has {len(tokenizer)} tokens, the model knows {vocabulary}"
        )

    def tokenize(text: str) -> NDArray[np.int64]:
        numbers = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*numbers, tokenizer.eos_token_id], np.int64)

    return tokenize

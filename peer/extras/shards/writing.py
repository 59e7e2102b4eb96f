"""Writing token shards: text in; ``.bin`` files, their hashes and lines of a run file out.

Shared shards spare every peer the tokenizing. The held-out part is decided when they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dht.whole_files import write_whole
from peer.data.hub import hub_tokenizer_file
from peer.data.text.formats import DataFile, items, piece_count, unreadable
from peer.data.text.tokenizing import ByteTokenizer, FileTokenizer, Tokenizer, batches
from peer.errors import DataUnavailable, NotWritten
from peer.run_file.places import LIST_FORMAT, TEXT_FORMATS, pinned

SHARD_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class Written:
    """Shards with their list."""

    files: tuple[Path, ...]
    list_file: Path
    tokens: int
    vocabulary: int
    source: str
    """The source as lines of a run file."""


def tokenizer_named(name: str, end_token: str | None, cache_dir: Path) -> Tokenizer:
    """'bytes', a ``tokenizer.json`` or a tokenizer of the hub. Raises ``DataUnavailable``."""
    if name == "bytes":
        return ByteTokenizer()
    if not name.endswith(".json"):
        if Path(name).is_file():
            raise DataUnavailable("files", f"{name}: a tokenizer in a file is a tokenizer.json")
        path, own_end = hub_tokenizer_file(name, cache_dir / "tokenizers")
        return FileTokenizer(path, end_token or own_end)
    if end_token is None:
        raise DataUnavailable(
            "files", f"{name} does not say what ends a document; name the token with --end-token"
        )
    return FileTokenizer(Path(name), end_token)


def write_shards(
    inputs: Iterable[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    text_field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
) -> Written:
    """Tokenize files and folders of text into ``out``, which must hold no shards yet.

    Raises ``DataUnavailable`` or ``NotWritten``.
    """
    list_file = out / f"tokens{LIST_FORMAT}"
    if list_file.exists():
        raise NotWritten(str(list_file), "it is there already")
    dtype = np.dtype("<u4" if tokenizer.vocabulary > 1 << 16 else "<u2")
    files: list[Path] = []
    lines: list[str] = []
    total = 0
    is_new = not out.exists()
    try:
        tokens = _tokens(list(_texts(inputs)), tokenizer, text_field)
        for number, shard in enumerate(_shards(tokens, shard_tokens)):
            content = shard.astype(dtype).tobytes()
            files.append(out / f"tokens-{number:05}.bin")
            # It makes the folder: most that can be wrong with the text is known by then.
            write_whole(files[-1], content)
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {files[-1].name}\n")
            total += shard.size
        if not files:
            raise DataUnavailable("files", "there is no text in the files")
        index = "".join(lines).encode()
        write_whole(list_file, index)
    except OSError as error:
        if is_new:
            with suppress(OSError):  # it is not empty, or was not made
                out.rmdir()
        raise NotWritten(str(error.filename or out), error.strerror or str(error)) from error
    name = pinned(f"{out.resolve().name}/{list_file.name}", hashlib.sha256(index).hexdigest())
    source = f'[[data.sources]]\nfiles = ["{name}"]\ndtype = "uint{8 * dtype.itemsize}"\n'
    return Written(tuple(files), list_file, total, tokenizer.vocabulary, source)


def _texts(inputs: Iterable[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.suffix.lower() in TEXT_FORMATS)
            yield from sorted(file for file in inside if file.is_file())
        elif path.suffix.lower() in TEXT_FORMATS and path.is_file():
            yield path
        else:
            known = ", ".join(TEXT_FORMATS)
            what = f"is no folder and no file of {known}" if path.exists() else "does not exist"
            raise DataUnavailable("files", f"{path} {what}")


def _tokens(paths: list[Path], tokenizer: Tokenizer, text_field: str) -> Iterator[NDArray[Any]]:
    if not paths:
        raise DataUnavailable("files", f"there are no files of {', '.join(TEXT_FORMATS)}")
    end = np.array([tokenizer.end], tokenizer.dtype)
    try:
        for file in (DataFile(str(path), str(path), text_field) for path in paths):
            for piece in range(piece_count(file)):
                for batch in batches(items(file, piece)):
                    encoded = tokenizer.encode([item.text for item in batch])
                    for item, tokens in zip(batch, encoded, strict=True):
                        yield tokens
                        if item.is_end:
                            yield end
    except OSError as error:
        raise unreadable(error) from error


def _shards(parts: Iterator[NDArray[Any]], size: int) -> Iterator[NDArray[Any]]:
    waiting: list[NDArray[Any]] = []
    have = 0
    for part in parts:
        waiting.append(part)
        have += part.size
        while have >= size:
            joined = np.concatenate(waiting)
            yield joined[:size]
            waiting, have = [joined[size:]], have - size
    if have:
        yield np.concatenate(waiting)

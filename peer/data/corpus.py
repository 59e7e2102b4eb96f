"""Local files as two flat arrays of byte tokens: the training part and the held-out part.

The arrays are built once, as files in the cache folder, and mapped into memory: a batch costs
well under a millisecond and no memory of its own.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.whole_files import new_folder
from peer.data.batches.order import rank
from peer.errors import DataUnavailable
from peer.run_file.sections import TextData

SEPARATOR = 0
"""The byte token between two documents, which occurs in no text."""

CHUNK_BYTES = 1 << 16
"""Text files are held out in chunks of this size, because one file may be the whole corpus."""

_CACHE_FORMAT = 2

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


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    name: str
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two flat arrays of byte tokens, mapped from files."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


def stdlib_files() -> list[SourceFile]:
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
            f"{root} has too few source files ({len(files)}); "
            "use a Python with its standard library as source, or the data recipe 'text'",
        )
    return files


def text_files(recipe: TextData, data_dir: Path) -> list[SourceFile]:
    found: dict[str, SourceFile] = {}
    for pattern in recipe.files:
        try:
            matches = [path for path in data_dir.glob(pattern) if path.is_file()]
        except ValueError as error:
            raise DataUnavailable("text", f"{pattern!r} is no pattern: {error}") from error
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


def _file(path: Path, root: Path) -> SourceFile:
    stat = path.stat()
    return SourceFile(path, path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)


def cached_corpus(
    name: str, files: list[SourceFile], *, held_out: float, by_name: bool, cache_dir: Path
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
        raise DataUnavailable(
            name,
            f"{error.filename or folder}: {error.strerror}; make it readable and {cache_dir} "
            "writable for this user, and free some space",
        ) from error


def _mapped(path: Path) -> NDArray[np.uint8]:
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _build_corpus(files: list[SourceFile], folder: Path, *, held_out: float, by_name: bool) -> None:
    """Write both parts into ``folder``."""

    def rank_of(file: SourceFile, piece: bytes) -> float:
        return rank(file.name.encode() if by_name else blake3(piece).digest())

    ranks = (rank_of(file, piece) for file in files for piece in _pieces(file, whole=by_name))
    # A small corpus may have no piece below the threshold: hold out the one of lowest rank.
    lowest = min(ranks, default=0.0)
    threshold = max(held_out, float(np.nextafter(lowest, 1.0)))
    with new_folder(folder) as temporary:
        train, held = temporary / "train.u8", temporary / "held_out.u8"
        with train.open("wb") as train_file, held.open("wb") as held_file:
            for file in files:
                for piece in _pieces(file, whole=by_name):
                    out = held_file if rank_of(file, piece) < threshold else train_file
                    out.write(piece)
                train_file.write(bytes([SEPARATOR]))
                held_file.write(bytes([SEPARATOR]))
            for written in (train_file, held_file):
                written.flush()
                os.fsync(written.fileno())


def _pieces(file: SourceFile, *, whole: bool) -> Iterator[bytes]:
    """The content of a file, as far as it reached when it was found: it may be growing."""
    left = file.size_bytes
    with file.path.open("rb") as opened:
        while piece := opened.read(left if whole else min(left, CHUNK_BYTES)):
            left -= len(piece)
            yield piece.replace(b"\0", b" ")

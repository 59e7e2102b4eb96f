"""Files and folders that are there as a whole or not at all, whatever ends a program meanwhile."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

_RANDOM_BYTES = 8
_UNFINISHED = re.compile(rf"\..+\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}")

NO_FILE = "it is a device, a pipe or a socket"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A place for a file, which takes the name ``path`` at the end of the block.

    Raises ``OSError`` if a device, pipe or socket has that name: root could replace even
    ``/dev/null``.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the files of a folder that were not finished when their process was killed.

    The folder must be one in which no other process writes.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            with suppress(OSError):  # it costs space, and no start
                path.unlink()


def append_whole(descriptor: int, data: bytes) -> None:
    """Append to a file in one call, so that readers see complete lines and those of two writers do
    not mix. Raises ``OSError`` where all of it finds no room; the part that did is taken back."""
    written = os.write(descriptor, data)
    if written < len(data):
        with suppress(OSError):  # a pipe takes nothing back
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and its folder if need be. It is on the disk on return. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk, where its file system can do that.

    A file that was renamed a moment before a power cut may otherwise have its earlier name.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder, which takes the name ``path`` at the end of the block.

    Other processes that make ``path`` at the same time write the same: the first one stays.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_json(path: Path, kind: type[T]) -> T | None:
    """The contents of a file; ``None`` if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None

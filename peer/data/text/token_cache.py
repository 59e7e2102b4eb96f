"""Tokens of pieces of text on disk, so that each piece is tokenized once per machine.

An entry is named by a hash of all that it follows from, so it never goes stale. Any number of
processes may share the folder: entries are complete when they get their name. Each reading checks
the content; damaged files are removed and made again. The least recently used entries are removed
when the folder becomes too large.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.whole_files import new_file
from peer.errors import DataUnavailable

logger = logging.getLogger(__name__)

FOLDER_MAX_BYTES = 64 << 30

RECENTLY_USED_S = 600.0
"""Age below which an entry is not removed: it may be about to be opened."""

_HEADER = struct.Struct("<8sB7xQQ32s")
_MAGIC = b"SHOALTK1"
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True, slots=True)
class PieceTokens:
    """The tokens of one piece."""

    train: NDArray[Any]
    held_out: NDArray[Any]


class TokenCache:
    def __init__(self, folder: Path, *, bytes_max: int = FOLDER_MAX_BYTES) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._unchecked_bytes = bytes_max
        """Bytes written since the size of the folder was last checked; at first it is unknown."""

    def path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.tokens"

    def read(self, key: str) -> PieceTokens | None:
        """The tokens of an entry, mapped into memory; ``None`` if there is no valid one."""
        path = self.path(key)
        content: NDArray[np.uint8]
        try:
            content = np.memmap(path, np.uint8, mode="r")
        except OSError:  # ``write`` says what is wrong with the folder
            return None
        except ValueError:  # an empty file
            content = np.empty(0, np.uint8)
        tokens = _decoded(content)
        with suppress(OSError):  # another process may remove it, or another user owns it
            if tokens is None:
                logger.warning("token_cache_damaged file=%s; it is made again", path)
                path.unlink()
            else:
                os.utime(path)
        return tokens

    def write(self, key: str, train: NDArray[Any], held_out: NDArray[Any]) -> None:
        """Add an entry. Both arrays have the same unsigned type. Raises ``DataUnavailable``."""
        payload = train.tobytes() + held_out.tobytes()
        digest = blake3(payload).digest()
        header = _HEADER.pack(_MAGIC, train.dtype.itemsize, train.size, held_out.size, digest)
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as temporary:
                temporary.write_bytes(header + payload)
        except OSError as error:
            raise DataUnavailable(
                "files",
                f"{path}: {error.strerror}; tokens are kept there: free some space, or make the "
                "folder writable for this user",
            ) from error
        self._unchecked_bytes += len(payload)
        if self._unchecked_bytes >= self._bytes_max // 64:
            self._unchecked_bytes = 0
            keep_below(self._folder, self._bytes_max)


def _decoded(content: NDArray[np.uint8]) -> PieceTokens | None:
    if content.size < _HEADER.size:
        return None
    magic, width, train, held_out, digest = _HEADER.unpack(content[: _HEADER.size].tobytes())
    payload = content[_HEADER.size :]
    if (
        magic != _MAGIC
        or width not in _DTYPES
        or payload.size != (train + held_out) * width
        or blake3(payload.data).digest() != digest
    ):
        return None
    tokens: NDArray[Any] = payload.view(_DTYPES[width])
    return PieceTokens(tokens[:train], tokens[train:])


def keep_below(folder: Path, bytes_max: int) -> None:
    """Remove what was not used for longest until the files have ``bytes_max`` bytes at most, and
    no more than half of the space that they and the free disk have together."""
    known = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may remove it
            if path.is_file():
                stat = path.stat()
                known.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    used = sum(size for _, size, _ in known)
    allowed = min(bytes_max, (used + shutil.disk_usage(folder).free) // 2)
    oldest_kept = time.time() - RECENTLY_USED_S
    for used_at, size, path in sorted(known):
        if used <= allowed or used_at > oldest_kept:
            break
        with suppress(OSError):
            path.unlink()
        used -= size

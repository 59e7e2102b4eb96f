"""Checkpoints: a folder per checkpoint, complete or absent, verified before it is used.

A checkpoint is ``tensors.safetensors`` and ``meta.json``. It is written into a temporary folder,
flushed to the disk, and renamed, so that ``kill -9`` or a power cut at any moment leaves the
earlier checkpoints intact and no incomplete one under a valid name. ``meta.json`` holds the digests
of both; a damaged checkpoint is renamed and the one before it is used.

Tensors are streamed from memory: saving makes no second copy. This module knows bytes and names;
``outer_state`` (agents) and ``inner_state`` (trainers) give them a meaning.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from dht.whole_files import sync_folder
from peer.errors import CheckpointDamaged, DiskFull, QuotaFull
from peer.storage.home import folder_bytes
from peer.storage.tensor_file import Tensor, digest_of, write_safetensors

logger = logging.getLogger(__name__)

FORMAT = 1

_TENSORS = "tensors.safetensors"
_META = "meta.json"
_NAME = re.compile(r"\d{12}")
_TEMPORARY = ".writing-"
_DAMAGED = ".damaged"
_META_MAX_BYTES = 64 << 20
_UNREADABLE = frozenset(
    getattr(errno, name) for name in ("EIO", "EBADMSG", "EUCLEAN") if hasattr(errno, name)
)
"""Errors of a disk that is failing, or of a file system that finds its own damage."""

_SLACK_BYTES = 1 << 20
"""Space for folders and metadata in addition to the tensors."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was verified when it was opened."""

    path: Path
    meta: dict[str, Any]
    """The ``meta`` argument of ``save``."""

    @contextmanager
    def tensors(self, framework: Literal["np", "pt"] = "np") -> Iterator[Any]:
        """Its tensors, which are read on demand. Raises ``CheckpointDamaged``, also in the block
        for a tensor that it does not have."""
        try:
            with safe_open(self.path / _TENSORS, framework) as tensors:
                yield tensors
        except SafetensorError as error:
            raise CheckpointDamaged(str(self.path), str(error)) from error


class CheckpointFolder:
    """The last few checkpoints of one kind. One process writes; any may read, and ``prune``."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        allowed_bytes: Callable[[], float | None] = lambda: None,
        reads_only: bool = False,
        spares: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        """``allowed_bytes()``: current limit for the whole folder, the next checkpoint included.

        ``spares(path)``: whether a checkpoint stays although newer ones need its place.
        ``reads_only``: damaged checkpoints are passed over and left where they are. A checkpoint
        that another version has written looks damaged, and its peer may be running.
        """
        self.folder = folder
        self.keep = keep
        self._allowed_bytes = allowed_bytes
        self._reads_only = reads_only
        self._spares = spares
        self._passed_over: set[Path] = set()
        self._saving = threading.Lock()
        """Held while saving: a save whose task was cancelled continues in its thread."""

    def __repr__(self) -> str:
        return f"CheckpointFolder({self.folder}, numbers={self.numbers()})"

    def numbers(self) -> list[int]:
        """Numbers of the existing checkpoints, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(p.name) for p in self.folder.iterdir() if _NAME.fullmatch(p.name))
        return []

    def path_of(self, number: int) -> Path:
        return self.folder / f"{number:012d}"

    def were_set_aside(self) -> bool:
        """Return whether there are checkpoints that were found damaged."""
        return any(self.folder.glob(f"*{_DAMAGED}"))

    def save(
        self,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        in_place_of_newest: bool = False,
    ) -> Path:
        """Write a checkpoint, flush it to the disk and remove those beyond ``keep``.

        ``in_place_of_newest``: then also remove what was the newest one until now, so that older
        ones stay for longer.
        Raises ``DiskFull`` and keeps the earlier ones; any other ``OSError`` is not caught.
        """
        with self._saving:
            replaced = self.numbers()[-1:] if in_place_of_newest else []
            path = self._save(tensors, meta)
            others = [number for number in self.numbers() if number not in replaced]
            for doomed in self._spared_by_none([*replaced, *others[: -self.keep]]):
                _remove(doomed)
            return path

    def _save(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        needed = sum(tensor.size_bytes for tensor in tensors.values()) + _SLACK_BYTES
        temporary = self.folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_unfinished()
            self.prune(needed)
            if (left := self._left_bytes()) is not None and left < needed:
                raise QuotaFull(str(self.folder), needed, int(max(0, left)))
            free = _free_bytes(self.folder)
            if free < needed:
                raise DiskFull(str(self.folder), needed, free)
            temporary.mkdir()
            digest, size = _write_tensors(temporary / _TENSORS, tensors)
            envelope = {"format": FORMAT, "tensors_digest": digest, "tensors_bytes": size}
            _write_meta(temporary / _META, {**envelope, "meta": dict(meta)})
            sync_folder(temporary)
            final = self.path_of(self._next_number())
            temporary.rename(final)
            sync_folder(self.folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(str(self.folder), needed, _free_bytes(self.folder)) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def load_latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; damaged ones are set aside with a warning."""
        for number in reversed(self.numbers()):
            path = self.path_of(number)
            if path in self._passed_over:
                continue
            try:
                return open_checkpoint(path)
            except CheckpointDamaged as error:
                aside = self.set_aside(path)
                logger.warning(
                    "checkpoint_damaged path=%s reason=%s kept_as=%s", path, error.reason, aside
                )
            except FileNotFoundError:
                continue  # the writer removed it meanwhile
        return None

    def prune(self, needed_bytes: int = 0) -> None:
        """Remove old checkpoints until ``needed_bytes`` fit the limit; the newest one stays."""
        while not self.fits(needed_bytes):
            damaged = sorted(self.folder.glob(f"*{_DAMAGED}"))
            if not (doomed := [*damaged, *self._spared_by_none(self.numbers()[:-1])]):
                return
            _remove(doomed[0])

    def fits(self, needed_bytes: int = 0) -> bool:
        """True if the limit leaves room for so many bytes more."""
        left = self._left_bytes()
        return left is None or left >= needed_bytes

    def _left_bytes(self) -> float | None:
        allowed = self._allowed_bytes()
        return None if allowed is None else allowed - folder_bytes(self.folder)

    def _spared_by_none(self, numbers: Iterable[int]) -> list[Path]:
        return [path for path in map(self.path_of, numbers) if not self._spares(path)]

    def clear(self, *, spared: bool = False) -> None:
        """Remove all checkpoints. ``spared``: also those that stay otherwise."""
        with self._saving:
            numbers = self.numbers()
            for path in map(self.path_of, numbers) if spared else self._spared_by_none(numbers):
                _remove(path)

    def set_aside(self, path: Path) -> Path:
        """Rename a checkpoint that cannot be used, so that it is not tried again."""
        if self._reads_only:
            self._passed_over.add(path)
            return path
        aside = path.with_name(f"{path.name}{_DAMAGED}")
        _remove(aside)
        path.rename(aside)
        return aside

    def _next_number(self) -> int:
        taken = [0]
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name.removesuffix(_DAMAGED)):
                taken.append(int(path.name.removesuffix(_DAMAGED)))
        return max(taken) + 1

    def _clear_unfinished(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                _remove(path)


def read_meta(path: Path) -> Mapping[str, Any]:
    """The ``meta`` of a checkpoint; its tensors are not verified. Raises ``CheckpointDamaged``."""
    meta: Mapping[str, Any] = _read_meta(path)["meta"]
    return meta


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint's folder and verify its content. Raises ``CheckpointDamaged``."""
    meta = _read_meta(path)
    try:
        with _readable(path), (path / _TENSORS).open("rb") as file:
            if os.fstat(file.fileno()).st_size != meta["tensors_bytes"]:
                raise CheckpointDamaged(str(path), f"{_TENSORS} has the wrong size")
            if digest_of(file) != meta["tensors_digest"]:
                raise CheckpointDamaged(str(path), f"{_TENSORS} does not have its digest")
    except FileNotFoundError as error:
        if not path.exists():
            raise
        raise CheckpointDamaged(str(path), f"{_TENSORS} is missing") from error
    return Checkpoint(path, meta["meta"])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Take what the disk cannot read for damage: an older checkpoint may be on better parts."""
    try:
        yield
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise CheckpointDamaged(str(path), error.strerror or str(error)) from error
        raise


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    with path.open("xb") as file:
        written = write_safetensors(file, tensors)
        file.flush()
        os.fsync(file.fileno())
    return written


def _write_meta(path: Path, envelope: Mapping[str, Any]) -> None:
    body = json.dumps(envelope, sort_keys=True, allow_nan=False).encode()
    with path.open("xb") as file:
        file.write(blake3(body).hexdigest().encode() + b"\n" + body + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        with _readable(path), (path / _META).open("rb") as file:
            content = file.read(_META_MAX_BYTES + 1)
    except FileNotFoundError as error:
        if not path.exists():
            raise
        raise CheckpointDamaged(str(path), f"{_META} is missing") from error
    digest, _, body = content.partition(b"\n")
    if blake3(body.removesuffix(b"\n")).hexdigest().encode() != digest:
        raise CheckpointDamaged(str(path), f"{_META} does not have its digest")
    envelope: dict[str, Any] = json.loads(body)  # written by this module, as the digest matches
    if (written := envelope.get("format")) != FORMAT:
        raise CheckpointDamaged(str(path), f"it has format {written}, this version reads {FORMAT}")
    return envelope


def _free_bytes(folder: Path) -> int:
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    return shutil.disk_usage(existing).free


def _remove(path: Path) -> None:
    """Remove a folder, after renaming it so that no part of it looks like a checkpoint."""
    doomed = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
    with contextlib.suppress(
        FileNotFoundError
    ):  # the agent removes checkpoints of its trainer, too
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

"""A folder of exports: an index, the newest ones, and a link ``latest``, for any web server.

What is being written has a hidden name, and the index names what is whole. So a reader meets whole
exports only, and what a kill has left is swept away before the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dht.whole_files import new_file, read_json, write_whole
from peer.errors import NotWritten, PeerError
from peer.quantities import count_text, loss_at
from peer.run_file.sections import RunFile

if TYPE_CHECKING:  # hosts go without what it needs
    from peer.extras.export.card import Measured

INDEX = "exports.json"
LATEST = "latest"
_UNFINISHED = "."
"""First character of the names of what is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One export on the shelf."""

    name: str
    """Name of its folder."""
    model: str
    """``peer.storage.outer_state.model_name``: equal names have equal parameters."""
    at: float
    """Unix time at which it was written."""
    tokens: int
    loss: float | None
    """Newest held-out loss that was known."""
    loss_tokens: int = 0
    """Merged tokens when it was measured."""
    size_bytes: int
    weights: str
    """Name of the file of parameters, inside its folder."""
    uploaded_to: str = ""
    """Repository on the hub that has it."""

    @property
    def summary(self) -> str:
        loss = ""
        if self.loss is not None:
            loss = f", held-out loss {loss_at(self.loss, self.loss_tokens)}"
        return f"{count_text(self.tokens)} tokens merged{loss}, model {self.model}"


class NotAShelf(PeerError):
    """A folder to publish in holds something else."""

    exit_code = 2
    folder: str
    reason: str
    message = "cannot publish in {folder}: {reason}; give an empty or new folder"


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``exports.json``."""

    run: str
    name: str
    exports: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folder of one run's exports."""

    folder: Path
    run: RunFile
    keep: int
    """Number of exports that stay."""

    def check(self) -> None:
        """Create the folder, or see that it is this run's. Raises ``NotAShelf``."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.folder.iterdir()}
        except OSError as error:
            raise NotAShelf(str(self.folder), error.strerror or str(error)) from error
        index = read_index(self.folder)
        if index is None and names:
            raise NotAShelf(str(self.folder), f"it has other files in it, such as {min(names)!r}")
        if index is not None and index.run != self.run.run_id:
            raise NotAShelf(
                str(self.folder), f"it has exports of run {index.name!r} ({index.run[:16]})"
            )
        if index is None:
            self._write_index([])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process publishes here, and keep others out during the block.

        Two keepers of a run may have one folder: each would remove what the other is writing.
        """
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # network file systems may have no locks for folders
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> list[Entry]:
        """The exports that are there, the oldest first."""
        return published(self.folder)

    def newest(self, model: str) -> Entry | None:
        """The newest export, if it has these parameters."""
        entries = self.entries()
        if not entries or entries[-1].model != model:
            return None
        # The process that made it may have been killed between these.
        self._write_index(entries)
        self._link(entries[-1].name)
        return entries[-1]

    def add(
        self,
        model: str,
        tokens: int,
        measured: Measured | None,
        write: Callable[[Path], None],
        *,
        now: float,
    ) -> Entry:
        """Add an export, which ``write(folder)`` makes. Raises ``NotWritten``."""
        self.sweep()
        name = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H%M%SZ}-{model}"
        write(self.folder / name)
        weights = max((self.folder / name).glob("*.safetensors"), key=lambda p: p.stat().st_size)
        entry = Entry(
            name=name,
            model=model,
            at=now,
            tokens=tokens,
            loss=None if measured is None else measured.loss,
            loss_tokens=0 if measured is None else measured.tokens,
            size_bytes=weights.stat().st_size,
            weights=weights.name,
        )
        try:
            self._write_index([*self.entries(), entry])
            self._link(name)
            self._drop_oldest()
        except OSError as error:
            raise NotWritten(str(self.folder), error.strerror or str(error)) from error
        return entry

    def note_upload(self, entry: Entry, repository: str) -> None:
        """Keep where an export was uploaded to. Raises ``NotWritten``."""
        done = replace(entry, uploaded_to=repository)
        try:
            self._write_index([done if e.name == entry.name else e for e in self.entries()])
        except OSError as error:
            raise NotWritten(str(self.folder), error.strerror or str(error)) from error

    def sweep(self) -> None:
        """Remove files left by processes that were killed while they wrote."""
        known = {each.name for each in self.entries()}
        for path in self.folder.iterdir():
            unfinished = path.name.startswith(_UNFINISHED)
            if path.is_symlink() or path.is_file():
                if unfinished:
                    path.unlink(missing_ok=True)
            elif unfinished or path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def _link(self, name: str) -> None:
        """Have ``latest`` lead to this export: at any moment it leads to one that is whole."""
        with new_file(self.folder / LATEST) as temporary:
            temporary.symlink_to(name, target_is_directory=True)

    def _drop_oldest(self) -> None:
        entries = self.entries()
        if len(entries) > self.keep:
            # First out of the index, then off the disk: nothing is listed that is not there.
            self._write_index(entries[-self.keep :])
            for each in entries[: -self.keep]:
                shutil.rmtree(self.folder / each.name, ignore_errors=True)

    def _write_index(self, entries: list[Entry]) -> None:
        index = Index(run=self.run.run_id, name=self.run.name, exports=tuple(entries))
        write_whole(self.folder / INDEX, msgspec.json.format(msgspec.json.encode(index)) + b"\n")


def read_index(folder: Path) -> Index | None:
    """The exports published in a folder; ``None`` if there are none."""
    return read_json(folder / INDEX, Index)


def published(folder: Path) -> list[Entry]:
    """The exports that are in a folder, the oldest first."""
    index = read_index(folder)
    entries = () if index is None else index.exports
    return [each for each in entries if (folder / each.name).is_dir()]

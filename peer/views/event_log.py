"""The event log: a file with one JSON object per line for every event.

Each line has ``at`` (Unix time of this machine), ``event``, and the fields of the event, which
docs/reference/events.md lists. Lines are appended in one write each. A file that grows too large is
renamed to ``.1``, in place of the one before it, so that a run of months does not fill a disk. The
first line of each file names its owner.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dht.whole_files import append_whole
from peer.events.table import OPENED

logger = logging.getLogger(__name__)

LOG_MAX_BYTES = 32 << 20
"""Size of a file. A peer fills it within two days (small model) to two years (large model)."""

SCHEMA = 1
"""Version of the lines. Fields and events are added, never changed."""


class EventLog:
    """Appends events to a file. If the disk is full, events are lost and training goes on."""

    def __init__(
        self,
        path: Path,
        *,
        owner: Mapping[str, Any] | None = None,
        heard: Callable[[Mapping[str, Any]], None] = lambda event: None,
        max_bytes: int = LOG_MAX_BYTES,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        """``owner``: fields of the first line. ``heard`` is called with every event."""
        self.path = path
        self._owner = owner
        self._heard = heard
        self._usual_max_bytes = self._max_bytes = max_bytes
        self._wall_time = wall_time
        self._descriptor = -1
        self._size = 0
        self._cut_off = False
        """The last line is incomplete, because the writer was killed."""
        self.problem = ""
        """The reason why the last event could not be written."""
        self._closed = False
        self._append(b"")

    def __repr__(self) -> str:
        return f"EventLog({self.path}, {self._size} bytes)"

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an event. Numbers that JSON does not have become ``null``."""
        line = {"at": round(self._wall_time(), 3), "event": event, **plain(fields)}
        data = _encoded(line)
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        self._append(data)
        self._heard(line)

    def _append(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            if self._descriptor < 0:
                self._open()
            data = b"\n" + data if self._cut_off else data
            append_whole(self._descriptor, data)
            self._size += len(data)
            self._cut_off = False
            self.problem = ""
        except OSError as error:
            if not self.problem:
                logger.warning("event_log_not_written path=%s reason=%s", self.path, error)
            self.problem = error.strerror or str(error)

    def keep_within(self, allowed_bytes: float | None) -> None:
        """Limit the size of both files together; ``None``: the default limit."""
        wanted = math.inf if allowed_bytes is None else allowed_bytes / 2
        self._max_bytes = int(min(self._usual_max_bytes, wanted))
        self._delete_surplus()

    def close(self) -> None:
        self._closed = True
        self._close_file()

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._cut_off = self._size > 0 and not self._ends_with_a_line()
        if self._owner is not None:
            opened = {"at": round(self._wall_time(), 3), "event": OPENED, "schema": SCHEMA}
            self._append(_encoded({**opened, **plain(self._owner)}))

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        self._close_file()
        try:
            self.path.replace(_earlier(self.path))
        except OSError as error:
            logger.warning("event_log_not_renamed path=%s reason=%s", self.path, error)
        self._append(b"")
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        """Delete the earlier file if it is larger than what is allowed now."""
        earlier = _earlier(self.path)
        try:
            if earlier.exists() and earlier.stat().st_size > self._max_bytes:
                earlier.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("event_log_not_deleted path=%s reason=%s", earlier, error)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log and its earlier file, oldest first, without incomplete lines."""
    for file in (_earlier(path), path):
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event
    except FileNotFoundError:
        return


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def plain(value: Any) -> Any:
    """``value`` as JSON has it. A number that is not finite becomes ``null``."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return str(value)

"""The event log: one JSON object per line for everything that changed, and why.

Each line has ``at`` (Unix time of this machine), ``event`` and the event's own fields. A
round appears with its members, weights, times, bytes, and who was left out and why. The file
is only ever appended to; a line is written whole or not at all. When it grows too large it
is renamed to ``.1`` and begun anew, so that a run of months does not fill a disk.
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

logger = logging.getLogger(__name__)

LOG_MAX_BYTES = 64 << 20


class EventLog:
    """Appends events to a file. A disk that is full costs events, never training."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = LOG_MAX_BYTES,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._wall_time = wall_time
        self._descriptor = -1
        self._size = 0
        self._broken = False
        self._open()

    def __repr__(self) -> str:
        return f"EventLog({self.path}, {self._size} bytes)"

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add one event. Numbers that JSON does not have become ``null``."""
        line = {"at": round(self._wall_time(), 3), "event": event, **_plain(fields)}
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        if self._size + len(data) > self._max_bytes:
            self._turn_over()
        try:
            # One call, so that readers see whole lines and two writers do not mix theirs.
            self._size += os.write(self._descriptor, data)
            self._broken = False
        except OSError as error:
            if not self._broken:
                logger.warning("event_log_not_written path=%s reason=%s", self.path, error)
            self._broken = True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        if self._size and not self._ends_with_a_line():
            self._size += os.write(self._descriptor, b"\n")  # what a kill -9 cut off

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _turn_over(self) -> None:
        self.close()
        try:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        finally:
            self._open()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log, oldest first; a line that was cut off is left out."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(each) for each in value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return str(value)

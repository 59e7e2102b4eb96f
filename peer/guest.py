"""Keeping to the owner's limits while running: reads their file, and counts the month's bytes.

``peer.limits`` decides; here are the two files and the clock. The file of limits may be written at
any time by anybody who may write to the peer's folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import datetime
from pathlib import Path

from dht.throttled_host import Gate
from peer.limits import BadLimit, Go, Limits, Rest, decide, decode, encode, must_leave

logger = logging.getLogger(__name__)

LIMITS_FILE = "limits.json"
VOLUME_FILE = "volume.json"
SAVE_EVERY_S = 30.0


def read_limits(folder: Path) -> Limits:
    """The limits of a peer's folder; none where nobody set any. Raises ``BadLimit``."""
    try:
        return decode((folder / LIMITS_FILE).read_bytes())
    except FileNotFoundError:
        return Limits()


def write_limits(folder: Path, limits: Limits) -> None:
    """As a whole or not at all."""
    _replace(folder / LIMITS_FILE, encode(limits))


class Guest:
    """One running peer's limits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started_at = time.time()
        self._stamp: tuple[int, int] | None = None
        self.limits = Limits()
        self.up, self.down = Gate(), Gate()
        self._month, self._earlier_bytes = self._saved_volume()
        self._counted_from = 0
        self._saved_at = time.monotonic()
        self.verdict: Go | Rest = Go()

    @property
    def month_bytes(self) -> int:
        """Both directions, this month."""
        return self._earlier_bytes + self._passed - self._counted_from

    @property
    def must_leave(self) -> bool:
        return must_leave(self.limits, started_at=self._started_at)

    def look(self) -> Go | Rest:
        """Read what has changed, and decide. Cheap enough for several times a second."""
        self._read()
        now = datetime.now()
        if (month := f"{now:%Y-%m}") != self._month:
            self._month, self._earlier_bytes, self._counted_from = month, 0, self._passed
        self.up.set_rate(self.limits.up_bytes_s)
        self.down.set_rate(self.limits.down_bytes_s)
        self.verdict = decide(self.limits, now=now, month_used_bytes=self.month_bytes)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()
        return self.verdict

    def save(self) -> None:
        """Keep the month's count. A full disk costs the count, nothing else."""
        self._saved_at = time.monotonic()
        record = {"month": self._month, "bytes": self.month_bytes}
        try:
            _replace(self._folder / VOLUME_FILE, json.dumps(record).encode())
        except OSError as error:
            logger.warning("volume_not_saved reason=%s", error)

    @property
    def _passed(self) -> int:
        return self.up.bucket.passed + self.down.bucket.passed

    def _read(self) -> None:
        try:
            found = (self._folder / LIMITS_FILE).stat()
        except FileNotFoundError:
            self.limits, self._stamp = Limits(), None
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.limits = read_limits(self._folder)
        except (BadLimit, OSError) as error:
            logger.warning("limits_not_read the former ones hold; reason=%s", error)

    def _saved_volume(self) -> tuple[str, int]:
        try:
            record = json.loads((self._folder / VOLUME_FILE).read_bytes())
            return str(record["month"]), int(record["bytes"])
        except FileNotFoundError:
            return "", 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("volume_not_read counting from zero; reason=%s", error)
            return "", 0


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)

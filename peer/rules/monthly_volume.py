"""The traffic of a calendar month, on a clock that may be set, or moved to another time zone.

Bytes count for the month that the local clock shows when they pass. Three things must not give a
month its volume twice, nor take it from a month in which nothing has passed:

- The clock goes back over the begin of a month: by an hour (time zones, daylight saving) or a day.
  Traffic of "next month" counts for this month, too, because it has passed by now. If the clock
  went back by at most ``SLACK``, it keeps counting for next month as well: either clock may be the
  wrong one, and with the smaller count a month would have its volume twice.
- The clock was wrong by more, and is corrected: traffic counted for a later month counts for this
  one alone, or that month would begin with its volume used.
- The clock is not set yet, as on a machine without a battery for it: the count stands still.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec import Struct

SLACK = timedelta(days=2)
"""Largest step back of a clock after which a month that had begun counts on when it comes again."""

FIRST_YEAR = 2026
"""A clock that shows an earlier year is not set: there was no Shoal."""


class MonthlyVolume(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes of the month that the clock shows, and of the one that it showed before."""

    month: str = ""
    """The month, such as 2026-11; empty before anything was counted."""
    bytes: int = 0
    at: datetime | None = None
    """Local time of the last look."""
    other: tuple[str, int] | None = None
    """The month before or after this one, and its bytes."""

    def plus(self, count: int) -> MonthlyVolume:
        return msgspec.structs.replace(self, bytes=self.bytes + count)

    def on(self, now: datetime) -> MonthlyVolume:
        """The volume at a local time: a new month begins with 0 bytes."""
        month = f"{now:%Y-%m}"
        if now.year < FIRST_YEAR:
            return self
        if month == self.month:
            return msgspec.structs.replace(self, at=now)
        if not self.month:
            return msgspec.structs.replace(self, month=month, at=now)
        known = self.other[1] if self.other is not None and self.other[0] == month else 0
        left: tuple[str, int] | None = (self.month, self.bytes)
        if month < self.month:
            known += self.bytes
            if self.at is not None and self.at - now > SLACK:
                left = None
        return MonthlyVolume(month=month, bytes=known, at=now, other=left)


def encode(volume: MonthlyVolume) -> bytes:
    return msgspec.json.encode(volume)


def decode(data: bytes) -> MonthlyVolume:
    """Raises ``ValueError`` for bytes that are no volume."""
    return msgspec.json.decode(data, type=MonthlyVolume)

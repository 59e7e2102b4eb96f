"""Numbers of bytes, seconds and tokens as short texts for people. Pure."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``1.2 MB``: three digits at most, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_text(seconds: float) -> str:
    """``2:05`` or ``1:02:05``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count_text(count: float) -> str:
    """``1.23 M``: for tokens."""
    for unit in ("", " k", " M", " G"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"

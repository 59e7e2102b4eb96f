"""Text of other peers, made safe for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with control characters replaced, for texts of other peers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)

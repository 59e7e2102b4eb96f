"""Choice of the held-out part of a data set, the same at every peer. Pure."""

from __future__ import annotations

from blake3 import blake3


def is_held_out(key: bytes, share: float) -> bool:
    """Whether what has this key is measured on and never trained on. The same at every peer."""
    return rank(key) < share


def rank(key: bytes) -> float:
    return int.from_bytes(blake3(b"held out/" + key).digest(length=8), "little") / 2.0**64

"""Choice of the held-out part of a dataset, the same at every peer. Pure."""

from __future__ import annotations

from blake3 import blake3


def is_held_out(key: bytes, share: float) -> bool:
    """Return whether the item with this key is measured on and never trained on."""
    return rank(key) < share


def rank(key: bytes) -> float:
    """Pseudo-random number from 0 to 1; the items with the lowest ranks are held out."""
    return int.from_bytes(blake3(b"held out/" + key).digest(length=8), "little") / 2.0**64

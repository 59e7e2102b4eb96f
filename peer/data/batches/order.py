"""A pseudo-random order of a dataset for each peer, and the part held out by all. Pure."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.identity import PeerId, RunId


class Order:
    """An endless order of ``count`` items: each once per epoch, permuted anew in every epoch.

    Stateless: the item at a position is a keyed permutation of it (a Feistel network with
    cycle walking), so positions may be read in any sequence.
    """

    def __init__(self, count: int, *, run_id: RunId, peer_id: PeerId) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        self.count = count
        self.key = f"{run_id}/{peer_id}"
        self._half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))

    def at(self, start: int, number: int) -> NDArray[np.int64]:
        """The items at positions ``start`` to ``start + number - 1``."""
        positions = np.arange(start, start + number, dtype=np.int64)
        epochs, places = np.divmod(positions, self.count)
        items = np.empty(number, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            items[chosen] = self._permuted(places[chosen].astype(np.uint64), int(epoch))
        return items

    def draw(self, epoch: int, below: int) -> int:
        """A pseudo-random number from 0 to ``below`` - 1 for an epoch."""
        digest = blake3(f"{self.key}/{epoch}/draw".encode()).digest(length=8)
        return int.from_bytes(digest, "little") % below

    def shares(self, start: int, number: int) -> NDArray[np.float64]:
        """Pseudo-random numbers from 0 to below 1 for positions ``start`` and following."""
        digest = blake3(f"{self.key}/shares".encode()).digest(length=8)
        positions = np.arange(start, start + number, dtype=np.int64).astype(np.uint64)
        mixed = _mixed(_mixed(positions) + np.frombuffer(digest, "<u8"))
        return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53

    def _permuted(self, values: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        digest = blake3(f"{self.key}/{epoch}/order".encode()).digest(length=32)
        keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        values = self._feistel(values, keys)
        while (outside := values >= self.count).any():
            values[outside] = self._feistel(values[outside], keys)
        return values

    def _feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = self._half_bits
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def is_held_out(key: bytes, share: float) -> bool:
    """Return whether the item with this key is measured on and never trained on."""
    return rank(key) < share


def rank(key: bytes) -> float:
    """Pseudo-random number from 0 to 1; the items with the lowest ranks are held out."""
    return int.from_bytes(blake3(b"held out/" + key).digest(length=8), "little") / 2.0**64

"""Sequences of tokens, in an order of one peer's own, and the part held out by all. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.identity import PeerId, RunId

Sequences = NDArray[np.int64]
"""Shape (sequences, sequence_length + 1): the target of each token is the next one."""


class TokenStream(Protocol):
    """One peer's endless stream of sequences, in its own order."""

    def next(self, sequences: int) -> Sequences:
        """Return the next sequences."""
        ...

    def state(self) -> dict[str, int]:
        """Return the position. ``restore_position`` continues with exactly the next sequence."""
        ...

    def restore_position(self, state: Mapping[str, int]) -> None:
        """Continue from a ``state`` of the same peer in the same run."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """One peer's training stream and the held-out sequences."""

    train: TokenStream
    held_out: Sequences
    """The same sequences at every peer that has the same data."""
    description: str


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


class Shuffled:
    """The sequences of an array of tokens, each once, in an order of one peer's own.

    Sequences of text follow one another from an offset that the order draws, so that a token is not
    always at the same position of its sequence; sequences of examples stand side by side.
    """

    def __init__(
        self,
        tokens: NDArray[np.generic],
        *,
        sequence_length: int,
        in_examples: bool,
        run_id: RunId,
        peer_id: PeerId,
    ) -> None:
        offsets = 1 if in_examples else sequence_length
        self._tokens = tokens
        self._length = sequence_length
        self._step = step_of(sequence_length, in_examples=in_examples)
        self.count = max(0, (tokens.size - sequence_length - offsets) // self._step + 1)
        """Number of sequences; 0: the array is too short for one."""
        if self.count:
            self._order = Order(self.count, run_id=run_id, peer_id=peer_id)
            self._offset = self._order.draw(0, offsets)

    def at(self, start: int, number: int) -> Sequences:
        """The sequences at positions ``start`` to ``start + number - 1`` of the order."""
        starts = self._order.at(start, number) * self._step + self._offset
        return _cut(self._tokens, starts, self._length)


def step_of(sequence_length: int, *, in_examples: bool) -> int:
    """Tokens from one sequence to the next: those of text share one, as target and as input."""
    return sequence_length + in_examples


def evenly_spaced(
    tokens: NDArray[np.generic], sequences: int, *, sequence_length: int, in_examples: bool
) -> Sequences:
    """Up to ``sequences`` that do not overlap, spread evenly over the array."""
    step = step_of(sequence_length, in_examples=in_examples)
    fitting = (tokens.size - sequence_length - 1) // step + 1
    sequences = min(sequences, fitting)
    starts = np.arange(sequences) * fitting // max(1, sequences) * step
    return _cut(tokens, starts, sequence_length)


def digest_of(batch: Sequences) -> bytes:
    """Digest of a batch, equal at peers that read the same sequences."""
    hasher = blake3(repr(batch.shape).encode())
    hasher.update(np.ascontiguousarray(batch, "<i8").tobytes())
    return hasher.digest()


def _cut(tokens: NDArray[np.generic], starts: NDArray[np.int64], length: int) -> Sequences:
    chosen: Sequences = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return chosen

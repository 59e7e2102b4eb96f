"""Sequences of tokens, and one peer's endless stream of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dht.identity import PeerId, RunId
from peer.data.batches.order import Order

Sequences = NDArray[np.int64]
"""Shape (sequences, sequence_length + 1): the target of each token is the next one."""


class TokenStream(Protocol):
    """One peer's endless stream of sequences, in its own order."""

    def next(self, sequences: int) -> Sequences:
        """Return the next sequences."""
        ...

    def state(self) -> dict[str, int]:
        """Return the position, from which ``restore`` continues with exactly the next sequence."""
        ...

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a ``state`` of the same peer in the same run."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """One peer's training stream and the held-out sequences."""

    train: TokenStream
    held_out: Sequences
    """The same sequences at every peer that has the same data."""
    description: str


class Shard:
    """One peer's stream of sequences of a token array; each epoch reads all of it once.

    Every epoch cuts the array into consecutive windows from a different offset, so that a token
    is not always at the same position in its sequence.
    """

    def __init__(
        self,
        tokens: NDArray[np.generic],
        *,
        sequence_length: int,
        run_id: RunId,
        peer_id: PeerId,
    ) -> None:
        windows = (tokens.size - sequence_length) // sequence_length
        self._tokens = tokens
        self._length = sequence_length
        self._order = Order(windows, run_id=run_id, peer_id=peer_id)
        self._position = 0

    def __repr__(self) -> str:
        return f"Shard(position={self._position}, epoch={self.epoch:.2f})"

    @property
    def windows(self) -> int:
        """Number of sequences in an epoch."""
        return self._order.count

    @property
    def epoch(self) -> float:
        """Number of times that the array has been read, with fractions."""
        return self._position / self._order.count

    def next(self, sequences: int) -> Sequences:
        windows = self._order.at(self._position, sequences)
        positions = np.arange(self._position, self._position + sequences)
        epochs = positions // self._order.count
        shift = {int(e): self._order.draw(int(e), self._length) for e in np.unique(epochs)}
        starts = windows * self._length + np.array([shift[int(e)] for e in epochs], np.int64)
        self._position += sequences
        return _windows(self._tokens, starts, self._length)

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        position = state["position"]
        if position < 0:
            raise ValueError(f"position is {position}; it must be at least 0")
        self._position = position


class Examples:
    """One peer's stream of sequences that hold whole examples; each epoch reads all of them once.

    ``tokens``: the sequences, one after the other.
    """

    def __init__(
        self,
        tokens: NDArray[np.generic],
        *,
        sequence_length: int,
        run_id: RunId,
        peer_id: PeerId,
    ) -> None:
        self._rows = tokens.reshape(-1, sequence_length + 1)
        self._order = Order(len(self._rows), run_id=run_id, peer_id=peer_id)
        self._position = 0

    @property
    def windows(self) -> int:
        """Number of sequences in an epoch."""
        return self._order.count

    def next(self, sequences: int) -> Sequences:
        chosen: Sequences = self._rows[self._order.at(self._position, sequences)].astype(np.int64)
        self._position += sequences
        return chosen

    def restore(self, state: Mapping[str, int]) -> None:
        self._position = state["position"]


def evenly_chosen(
    tokens: NDArray[np.generic], sequences: int, *, sequence_length: int
) -> Sequences:
    """Return at most ``sequences`` of those that hold whole examples, spread evenly."""
    rows = tokens.reshape(-1, sequence_length + 1)
    sequences = min(sequences, len(rows))
    chosen: Sequences = rows[np.arange(sequences) * len(rows) // max(1, sequences)].astype(np.int64)
    return chosen


def evenly_spaced(
    tokens: NDArray[np.generic], sequences: int, *, sequence_length: int
) -> Sequences:
    """Return at most ``sequences`` non-overlapping sequences, spread evenly over the array."""
    fitting = (tokens.size - 1) // sequence_length
    sequences = min(sequences, fitting)
    starts = np.arange(sequences) * fitting // sequences * sequence_length
    return _windows(tokens, starts, sequence_length)


def digest_of(batch: Sequences) -> bytes:
    """Digest of a batch, equal at peers that read the same sequences."""
    hasher = blake3(repr(batch.shape).encode())
    hasher.update(np.ascontiguousarray(batch, "<i8").tobytes())
    return hasher.digest()


def _windows(tokens: NDArray[np.generic], starts: NDArray[np.int64], length: int) -> Sequences:
    chosen: Sequences = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return chosen

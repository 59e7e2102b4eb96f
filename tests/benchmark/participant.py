"""One peer of the averaging benchmark: the interface that every measured system implements.

All peers average the same known contributions, so that any peer can tell the exact mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from averaging.numbers.arrays import Float32s

Reply = dict[str, Any]

_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The task of one peer: its number, the size of the group and the values."""

    index: int
    peers: int
    values: int
    codec: str
    """``int2/int4``: one for contributions, and one for what comes back."""

    @property
    def codecs(self) -> tuple[str, str]:
        up, _, down = self.codec.partition("/")
        return up, down or up


class Participant(ABC):
    """One peer of one system, ready to meet the others once it is constructed.

    The benchmark then calls ``ready``, ``form`` and ``exchange`` for each round, in this order.
    Methods named ``do_*`` serve commands that only one system has.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @property
    @abstractmethod
    def meeting_point(self) -> str:
        """Address of this peer. The other peers are opened with the first peer's."""

    @property
    def direct_bytes_sent(self) -> int:
        """Bytes sent so far outside of the libp2p daemon."""
        return 0

    @abstractmethod
    def ready(self) -> None:
        """Prepare one round; not measured."""

    def form(self) -> None:
        """Form the group, as far as the system can without moving numbers."""
        return

    @abstractmethod
    def exchange(self) -> None:
        """Average."""

    @abstractmethod
    def result(self) -> Float32s: ...

    @abstractmethod
    def close(self) -> None: ...


def contribution(setup: Setup) -> Float32s:
    """Noise from one peer: a block that repeats, drawn with the peer's index as its seed."""
    return np.resize(_block(setup.index), setup.values)


def _block(index: int) -> Float32s:
    return np.random.default_rng(index).standard_normal(_BLOCK_VALUES, dtype=np.float32)


def largest_error(result: Float32s, peers: int) -> float:
    """The largest distance of ``result`` from the exact mean of all contributions."""
    exact = np.zeros(_BLOCK_VALUES)
    for index in range(peers):
        exact += _block(index)
    exact /= peers
    largest = 0.0
    for start in range(0, result.size, _BLOCK_VALUES):
        part = result[start : start + _BLOCK_VALUES]
        largest = max(largest, float(np.abs(part - exact[: part.size]).max()))
    return largest

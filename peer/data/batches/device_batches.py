"""Batches on the device on which they are used.

For a CUDA device a batch is copied from page-locked memory on a stream of its own, while the
device computes; the stream that uses the batch waits for the copy, the host never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from peer.data.batches.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch whose copy may be under way."""

    tokens: torch.Tensor
    arrived: torch.cuda.Event | None = None


class Placing(Protocol):
    def start(self, batch: Sequences) -> Placed:
        """Begin to bring a batch to the device. Called by any one thread."""
        ...

    def finish(self, placed: Placed) -> torch.Tensor:
        """The batch, for use on the caller's current stream."""
        ...


class CudaBatches:
    """Copies from page-locked memory on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Sequences) -> Placed:
        # torch reuses page-locked memory only when the copies out of it are complete.
        pinned = torch.from_numpy(batch).pin_memory()
        with torch.cuda.stream(self._stream):
            tokens = pinned.to(self._device, non_blocking=True)
            return Placed(tokens, self._stream.record_event())

    def finish(self, placed: Placed) -> torch.Tensor:
        assert placed.arrived is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(placed.arrived)
        # The memory belongs to the side stream: it must outlive what the current one does with it.
        placed.tokens.record_stream(current)
        return placed.tokens


class PlainBatches:
    """Batches for the CPU, and copies to other devices when they are used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Sequences) -> Placed:
        return Placed(torch.from_numpy(batch))

    def finish(self, placed: Placed) -> torch.Tensor:
        return placed.tokens.to(self._device)


def placing(device: torch.device) -> Placing:
    return CudaBatches(device) if device.type == "cuda" else PlainBatches(device)

"""Copies of fragments between a model's parameters and the shared memory.

A safe point starts a copy, and a later one finds it done. On CUDA (``SideStreamCopies``) the copy
runs on a side stream, from and into pinned shared memory, and a fragment has a buffer on the device
meanwhile. Everywhere else (``DirectCopies``) it is made on the trainer's thread, unit by unit, so
that no temporary is larger than a unit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from averaging.numbers.layout import Fragment
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors
from peer.model.naming import local_part

logger = logging.getLogger(__name__)

STEPS_MAX = 6
"""A copy of one fragment is spread over at most so many safe points."""
VALUES_MIN = 1 << 20
"""Values that one safe point copies whatever time it has taken: they take a millisecond. On a busy
machine a trainer that waits for a processor has used its time up before it has copied anything, and
a small fragment whose copy took three steps came too late for its round."""


class Piece(Protocol):
    """One unit of a fragment: consecutive values of a parameter, in this process or in others."""

    @property
    def where(self) -> slice:
        """The place of its values in the fragment."""
        ...

    def offer(self, part: torch.Tensor) -> None:
        """Copy the values into ``part`` of the slot."""
        ...

    def adopt(self, part: torch.Tensor, order: AdoptionOrder, *, coarse: bool) -> None:
        """Change the values by ``part``; if coarse, leave the result of ``adopt_values`` in it."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """One unit whose parameter is whole in this process."""

    parameter: torch.Tensor
    start: int
    end: int
    where: slice

    def offer(self, part: torch.Tensor) -> None:
        part.copy_(self.values())

    def adopt(self, part: torch.Tensor, order: AdoptionOrder, *, coarse: bool) -> None:
        values = self.values()
        held = adopt_values(values, part.to(values.device), order, coarse=coarse)
        self.written(values)
        if held is not None:
            part.copy_(held)

    def values(self) -> torch.Tensor:
        """A view of the parameter's values, or a copy where its memory is not contiguous.

        It is looked up at each safe point: some libraries exchange a parameter's storage.
        """
        return local_part(self.parameter.data).reshape(-1)[self.start : self.end]

    def put(self, given: torch.Tensor) -> None:
        """Overwrite the values."""
        values = self.values()
        values.copy_(given)
        self.written(values)

    def written(self, values: torch.Tensor) -> None:
        """Write changes of ``values()`` back into the parameter, where they are a copy."""
        data = local_part(self.parameter.data)
        if not data.is_contiguous():
            flat = data.reshape(-1)
            flat[self.start : self.end] = values
            data.copy_(flat.view(data.shape))


def local_pieces(
    fragment: Fragment, parameters: Mapping[str, torch.Tensor]
) -> tuple[LocalPiece, ...]:
    return tuple(
        LocalPiece(parameters[unit.tensor], unit.start, unit.end, unit.values)
        for unit in fragment.units
    )


def slots_of(memory: SharedTensors) -> list[torch.Tensor]:
    return [torch.from_numpy(memory.slot(index)) for index in range(memory.fragments)]


def copies_of_device(
    memory: SharedTensors, pieces: Sequence[tuple[LocalPiece, ...]]
) -> DirectCopies | SideStreamCopies:
    """The copies that suit the device of these pieces."""
    devices = {piece.parameter.device for fragment in pieces for piece in fragment}
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        return SideStreamCopies(memory, pieces, device, CudaSideStream(device))
    return DirectCopies(memory, pieces)


@dataclass(slots=True)
class _PieceByPiece:
    """A copy of one fragment that is under way."""

    order: AdoptionOrder | None
    """``None``: an offer."""
    done: int = 0
    """Number of pieces that are copied."""


class DirectCopies:
    """Copies on the trainer's thread, unit by unit: CPU, MPS, and models on several devices."""

    def __init__(self, memory: SharedTensors, pieces: Sequence[Sequence[Piece]]) -> None:
        self._coarse = memory.coarse
        self._slots = slots_of(memory)
        self._pieces = pieces
        self._under_way: dict[int, _PieceByPiece] = {}

    def start_offer(self, fragment: int) -> None:
        self._under_way[fragment] = _PieceByPiece(None)

    def start_adoption(self, fragment: int, order: AdoptionOrder) -> None:
        self._under_way[fragment] = _PieceByPiece(order)
        if order.operation is Adoption.SET:
            # It overwrites steps that are made during the copy, so there must be none.
            self.advance(fragment, lambda: False)

    @torch.no_grad()
    def advance(self, fragment: int, enough: Callable[[], bool]) -> bool:
        """Continue the copy, until ``enough()``, without waiting. Returns whether it is done.

        After an error it continues with the piece that failed.
        """
        slot, pieces, copy = (
            self._slots[fragment],
            self._pieces[fragment],
            self._under_way[fragment],
        )
        pause_at = copy.done + -(-len(pieces) // STEPS_MAX)
        copied = 0
        while copy.done < len(pieces):
            piece = pieces[copy.done]
            if copy.order is None:
                piece.offer(slot[piece.where])
            else:
                piece.adopt(slot[piece.where], copy.order, coarse=self._coarse)
            copy.done += 1
            copied += piece.where.stop - piece.where.start
            is_share = copy.done >= pause_at and copied >= VALUES_MIN
            if is_share and copy.done < len(pieces) and enough():
                return False
        return True

    def wait(self, fragment: int) -> None:
        return

    def close(self) -> None:
        self._under_way.clear()
        self._slots = []


def adopt_values(
    values: torch.Tensor, given: torch.Tensor, order: AdoptionOrder, *, coarse: bool
) -> torch.Tensor | None:
    """Change ``values`` as ordered, in fp32 arithmetic.

    Returns the trainer's answer for coarse parameters, whose values are rounded: for ADD the
    difference by which the values really moved; otherwise the new base, which is the new values.
    """
    if not values.is_floating_point():
        _adopt_counter(values, given, order)
        return given if coarse else None
    if not coarse:
        if order.operation is Adoption.ADD:
            values.add_(given)
        else:
            values.copy_(given)
        return None
    before = values.to(torch.float32)
    if values.dtype == torch.float32:
        before = before.clone()
    if order.operation is Adoption.ADD:
        values.copy_(before + given)
        return values.to(torch.float32) - before
    values.copy_(given)
    return values.to(torch.float32)


def _adopt_counter(values: torch.Tensor, given: torch.Tensor, order: AdoptionOrder) -> None:
    """Set a counter, or add to it. The base that it is rounded from may be a fraction."""
    if order.operation is Adoption.ADD:
        values.add_(given.round().to(values.dtype))
    else:
        values.copy_(given.round())


class CudaSideStream:
    """A second queue of work on a CUDA device, beside the one that trains there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Make later work of this queue wait for all that the trainer has queued so far."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def queue(self) -> AbstractContextManager[Any]:
        """Redirect work that is queued within the block to this queue."""
        return torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event:
        """The present end of this queue."""
        mark: torch.cuda.Event = self._side.record_event()
        return mark

    def pin(self, slot: torch.Tensor) -> bool:
        """Lock host memory so that the device can reach it by itself. Returns whether it could."""
        size_bytes = slot.numel() * slot.element_size()
        if int(_cuda_runtime().cudaHostRegister(slot.data_ptr(), size_bytes, 0)) == 0:
            return True
        # CUDA keeps the error and fails the next kernel launch with it: launch one for that here.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1.0)
        return False

    def unpin(self, slot: torch.Tensor) -> None:
        _cuda_runtime().cudaHostUnregister(slot.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class SideStreamCopies:
    """Copies over a side stream, through a device buffer, into pinned shared memory.

    The trainer's own queue fills the device buffer and adds it, so that the next optimizer step can
    follow at once; the slow copies between device and host run beside it. A buffer belongs to the
    trainer's queue. It is freed only when the side stream is past its copy, and so it needs no
    ``record_stream``. Nothing waits for a whole side stream: it may hold another fragment's copy.
    """

    def __init__(
        self,
        memory: SharedTensors,
        pieces: Sequence[tuple[LocalPiece, ...]],
        device: torch.device,
        queue: CudaSideStream,
    ) -> None:
        self._coarse = memory.coarse
        self._slots = slots_of(memory)
        self._pieces = pieces
        self._device = device
        self._queue = queue
        memory.hold_pages()
        self._pinned = [slot for slot in self._slots if queue.pin(slot)]
        if len(self._pinned) < len(self._slots):
            # Their copies block: they wait for everything that the trainer has queued.
            logger.warning("slots_not_pinned count=%d", len(self._slots) - len(self._pinned))
        self._under_way: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._to_add: dict[int, AdoptionOrder] = {}

    @torch.no_grad()
    def start_offer(self, fragment: int) -> None:
        buffer = self._buffer(fragment)
        for piece in self._pieces[fragment]:
            buffer[piece.where].copy_(piece.values())
        self._copy(fragment, buffer, self._slots[fragment], buffer)

    def start_adoption(self, fragment: int, order: AdoptionOrder) -> None:
        buffer = self._buffer(fragment)
        self._copy(fragment, buffer, buffer, self._slots[fragment])
        self._to_add[fragment] = order

    def advance(self, fragment: int, enough: Callable[[], bool]) -> bool:
        buffer, copied = self._under_way[fragment]
        if not copied.query():  # type: ignore[no-untyped-call]
            return False
        del self._under_way[fragment]
        order = self._to_add.pop(fragment, None)
        if order is None:
            return True
        self._add(fragment, buffer, order)
        # Coarse parameters: the answer is copied to the host before the slot is passed on.
        return fragment not in self._under_way

    def wait(self, fragment: int) -> None:
        """Wait for the device until ``advance`` can finish the copy."""
        if fragment in self._under_way:
            self._under_way[fragment][1].synchronize()

    @torch.no_grad()
    def _add(self, fragment: int, buffer: torch.Tensor, order: AdoptionOrder) -> None:
        for piece in self._pieces[fragment]:
            piece.adopt(buffer[piece.where], order, coarse=self._coarse)
        if self._coarse:
            self._copy(fragment, buffer, self._slots[fragment], buffer)

    def _copy(
        self, fragment: int, buffer: torch.Tensor, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy between buffer and slot, once the trainer's queue is done with the buffer."""
        self._queue.follow()
        with self._queue.queue():
            target.copy_(source, non_blocking=True)
            self._under_way[fragment] = (buffer, self._queue.mark())

    def _buffer(self, fragment: int) -> torch.Tensor:
        return torch.empty(self._slots[fragment].numel(), dtype=torch.float32, device=self._device)

    def close(self) -> None:
        for _, copied in self._under_way.values():
            copied.synchronize()
        self._under_way.clear()
        for slot in self._pinned:
            self._queue.unpin(slot)
        self._pinned = []
        self._slots = []

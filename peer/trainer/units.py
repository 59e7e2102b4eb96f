"""Units of fragments whose values are spread over the ranks of an island.

A unit (``averaging.numbers.layout``) is a range of a flattened tensor, and a rank holds a box of
the tensor. ``overlap`` computes the places of what they have in common, and copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from averaging.numbers.layout import Layout, Unit
from peer.bridge.shared_memory import AdoptionOrder
from peer.model.naming import local_part
from peer.trainer.channel import Channel, Command, IslandBroken
from peer.trainer.device_copies import adopt_values

Places: TypeAlias = slice | NDArray[np.int64]
"""Indices of values in a flat vector."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that a process holds: ``shape`` values beginning at ``offset``."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.offset) == len(self.shape):
            raise ValueError(f"{self}: full, offset and shape have different numbers of dimensions")

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full


@dataclass(frozen=True, slots=True)
class Overlap:
    """The values of a unit that are in a box, by their places in both.

    Both are in the tensor's order, in which a box has all values of a unit one after another.
    """

    in_unit: Places
    in_box: slice

    @property
    def size(self) -> int:
        return int(self.in_box.stop - self.in_box.start)


def overlap(box: Box, start: int, end: int) -> Overlap | None:
    """Return the places of values ``start`` to ``end`` of the tensor in a box, or ``None``."""
    runs, length = _runs(box)
    begin = np.maximum(runs, start)
    stop = np.minimum(runs + length, end)
    kept = np.flatnonzero(begin < stop)
    if not kept.size:
        return None
    begin, sizes = begin[kept], stop[kept] - begin[kept]
    first, size = int(kept[0] * length + begin[0] - runs[kept[0]]), int(sizes.sum())
    in_box = slice(first, first + size)
    if kept.size == 1:
        return Overlap(slice(int(begin[0]) - start, int(begin[0]) - start + size), in_box)
    within = np.arange(size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Overlap(np.repeat(begin - start, sizes) + within, in_box)


def _runs(box: Box) -> tuple[NDArray[np.int64], int]:
    """Return the starts of the box's runs of consecutive values, and their length."""
    if not math.prod(box.shape):
        return np.empty(0, np.int64), 0
    # All dimensions after this one are whole, so a run extends through it and them.
    through = len(box.full) - 1
    while through > 0 and box.shape[through] == box.full[through]:
        through -= 1
    starts = np.zeros(1, np.int64)
    stride, length = math.prod(box.full), 1
    for dimension, (extent, offset, shape) in enumerate(
        zip(box.full, box.offset, box.shape, strict=True)
    ):
        stride //= extent
        if dimension < through:
            places = offset + np.arange(shape, dtype=np.int64)
            starts = (starts[:, None] + places * stride).reshape(-1)
        elif dimension == through:
            starts = starts + offset * stride
            length = shape * stride
    return starts, length


def owners(boxes: list[Box]) -> list[int]:
    """Return the processes, lowest first, that together hold each value once."""
    chosen: list[int] = []
    for number, box in enumerate(boxes):
        if math.prod(box.shape) and box not in (boxes[other] for other in chosen):
            chosen.append(number)
    return chosen


@dataclass(frozen=True, slots=True)
class SharedUnit:
    """One unit, and which part of it is at which rank."""

    channel: Channel
    fragment: int
    index: int
    unit: Unit
    parameter: torch.Tensor
    holders: Mapping[int, Overlap]
    """All ranks that hold some of it."""
    owners: tuple[int, ...]
    """Holders that together hold every value exactly once."""
    whole: bool
    """True if every rank holds all of it."""

    @property
    def where(self) -> slice:
        return self.unit.values

    # At rank 0, whose learner has it as a ``peer.trainer.device_copies.Piece``.

    def offer(self, part: torch.Tensor) -> None:
        if self.owners != (0,):  # otherwise rank 0 has it all, as with DDP
            self.channel.command(Command.OFFER, self.fragment, self.index)
        self._gather(part, self._own())

    def adopt(self, part: torch.Tensor, order: AdoptionOrder, *, coarse: bool) -> None:
        if not self.channel.is_open:
            return  # without the other ranks it would tear the model apart
        self.channel.command(Command.ADOPT, self.fragment, self.index, order.operation, coarse)
        own = self.holders.get(0)
        if self.whole:
            self.channel.broadcast(part)
        else:
            for rank, held in self.holders.items():
                if rank:
                    self.channel.send(part[held.in_unit].contiguous(), rank)
        answer = None if own is None else self._adopt(part[own.in_unit], order, coarse=coarse)
        if coarse:
            self._gather(part, answer)

    def _gather(self, part: torch.Tensor, own: torch.Tensor | None) -> None:
        """Fill ``part`` with what the owners send, and with rank 0's ``own`` values."""
        for rank in self.owners:
            held = self.holders[rank]
            if rank:
                part[held.in_unit] = self.channel.receive(held.size, rank)
            elif own is not None:
                part[held.in_unit] = own.to(part.device, torch.float32)

    # At the other ranks.

    def send_own(self) -> None:
        """Send rank 0 what it is offered."""
        self._send(self._own())

    def adopt_own(self, order: AdoptionOrder, *, coarse: bool) -> None:
        """Adopt this rank's part, which rank 0 sends, and answer it."""
        held = self.holders.get(self.channel.rank)
        if held is None:
            return
        if self.whole:
            given = torch.empty(self.unit.size, dtype=torch.float32)
            self.channel.broadcast(given)
        else:
            given = self.channel.receive(held.size, 0)
        self._send(self._adopt(given, order, coarse=coarse))

    def _send(self, values: torch.Tensor | None) -> None:
        """Send ``values`` to rank 0, if this rank is an owner."""
        if values is not None and self.channel.rank in self.owners:
            self.channel.send(values.to("cpu", torch.float32).contiguous(), 0)

    # At all ranks.

    def _own(self) -> torch.Tensor | None:
        """A view of the values at this rank."""
        held = self.holders.get(self.channel.rank)
        return None if held is None else _local(self.parameter)[held.in_box]

    def _adopt(
        self, given: torch.Tensor, order: AdoptionOrder, *, coarse: bool
    ) -> torch.Tensor | None:
        """Change this rank's values; returns the same as ``device_copies.adopt_values``."""
        values = self._own()
        assert values is not None, "what nobody holds here is not given"
        return adopt_values(values, given.to(values.device), order, coarse=coarse)


def agree_on_units(
    channel: Channel,
    layout: Layout,
    parameters: Mapping[str, torch.Tensor],
    *,
    fits: bool,
) -> list[list[SharedUnit]]:
    """Exchange who holds what, in every rank at once. Raises ``IslandBroken`` if models differ."""
    boxes = channel.gathered({n: _box(p) for n, p in parameters.items()} if fits else None)
    by_rank = [rank for rank in boxes if rank is not None]
    if len(by_rank) < len(boxes):
        raise IslandBroken("the ranks have models with other parameters; build the same in all")
    by_name = {spec.name: [rank[spec.name] for rank in by_rank] for spec in layout.specs}
    owners_of = {name: owners(held) for name, held in by_name.items()}
    units = []
    for fragment in layout.fragments:
        shared = []
        for index, unit in enumerate(fragment.units):
            held = by_name[unit.tensor]
            overlaps = {rank: overlap(box, unit.start, unit.end) for rank, box in enumerate(held)}
            holders = {rank: part for rank, part in overlaps.items() if part is not None}
            shared.append(
                SharedUnit(
                    channel,
                    fragment.index,
                    index,
                    unit,
                    parameters[unit.tensor],
                    holders,
                    tuple(rank for rank in owners_of[unit.tensor] if rank in holders),
                    all(box.is_whole for box in held),
                )
            )
        units.append(shared)
    return units


def _local(parameter: Any) -> torch.Tensor:
    """The values at this rank, flat. Writing to them changes the parameter."""
    return local_part(parameter.detach()).view(-1)


def _box(parameter: Any) -> Box:
    full = tuple(parameter.shape)
    if not hasattr(parameter, "to_local"):
        return Box(full, (0,) * len(full), full)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        full, parameter.device_mesh, parameter.placements
    )
    return Box(full, tuple(offset), tuple(shape))

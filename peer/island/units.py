"""Units of fragments whose values are spread over the ranks of an island."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from averaging.numbers.layout import Layout, Unit
from averaging.numbers.tensor_shards import Box, Overlap, overlap, owners
from peer.bridge.shared_memory import AdoptionOrder
from peer.island.channel import Channel, IslandBroken
from peer.model.naming import local_part
from peer.trainer.device_copies import adopt_values


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

    # At rank 0, with the unit's part of the slot.

    def gather(self, part: torch.Tensor, own: torch.Tensor | None) -> None:
        """Fill ``part`` with what the owners send, and with rank 0's ``own`` values."""
        for rank in self.owners:
            held = self.holders[rank]
            if rank:
                part[held.in_unit] = self.channel.receive(held.size, rank)
            elif own is not None:
                part[held.in_unit] = own.to(part.device, torch.float32)

    def distribute(self, part: torch.Tensor) -> None:
        """Send every other holder its part."""
        if self.whole:
            self.channel.broadcast(part)
            return
        for rank, held in self.holders.items():
            if rank:
                self.channel.send(part[held.in_unit].contiguous(), rank)

    # At the other ranks.

    def send_own(self, values: torch.Tensor) -> None:
        """Send ``values`` to rank 0, if this rank is an owner."""
        if self.channel.rank in self.owners:
            self.channel.send(values.to("cpu", torch.float32).contiguous(), 0)

    def receive(self) -> torch.Tensor | None:
        """This rank's part, from rank 0; ``None`` if it holds nothing of the unit."""
        held = self.holders.get(self.channel.rank)
        if self.whole:
            values = torch.empty(self.unit.size, dtype=torch.float32)
            self.channel.broadcast(values)
            return None if held is None else values[held.in_unit]
        return None if held is None else self.channel.receive(held.size, 0)

    # At all ranks.

    def own(self) -> torch.Tensor | None:
        """A copy, or a view, of the values at this rank."""
        held = self.holders.get(self.channel.rank)
        return None if held is None else _local(self.parameter)[held.in_box]

    def adopt_values(
        self, given: torch.Tensor, order: AdoptionOrder, *, coarse: bool
    ) -> torch.Tensor | None:
        """Change this rank's values; returns the same as ``device_copies.adopt_values``."""
        held = self.holders[self.channel.rank]
        local = _local(self.parameter)
        values = local[held.in_box]
        answer = adopt_values(values, given.to(values.device), order, coarse=coarse)
        if not isinstance(held.in_box, slice):
            local[held.in_box] = values
        return answer


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

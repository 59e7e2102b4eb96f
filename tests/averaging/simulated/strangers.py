"""Peers that say in their own names what others have said, some of it altered, at any time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from averaging.messages import Message, Opening
from averaging.simulated.wires import Part
from dht.identity import PeerId
from tests.averaging.simulated.swarm import Swarm

HEARD_MAX = 64


class Chatterers:
    """Send what they have overheard, at any time, to anybody."""

    def __init__(self, swarm: Swarm, seed: int, ids: Sequence[PeerId], *, every_s: float) -> None:
        self.swarm = swarm
        self.rng = random.Random(f"strangers {seed}")
        self.ids = ids
        self.every_s = every_s
        self.overheard: list[Message] = []
        self.said = 0
        swarm.on_send = self.overhear
        for each in ids:
            swarm.heap.call_in(self.rng.uniform(0.0, 2.0), self.speak, each)

    def overhear(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        self.overheard.append(message)
        del self.overheard[:-HEARD_MAX]
        return True

    def speak(self, speaker: PeerId) -> None:
        rng, wires = self.rng, self.swarm.wires
        self.swarm.heap.call_in(rng.expovariate(1.0 / self.every_s), self.speak, speaker)
        to = rng.choice(self.swarm.names)
        if self.overheard and rng.random() < 0.9:
            wires.deliver(speaker, to, 0, self.altered(rng.choice(self.overheard)))
        else:
            opening = Opening(
                fragment=0,
                round=rng.randbytes(32),
                slice=rng.randrange(4),
                commit=rng.randbytes(64),
                signature=rng.randbytes(64),
            )
            wires.deliver_upload(speaker, to, 0, opening, Part(b"", None), rng.randrange(1 << 20))
        self.said += 1

    def altered(self, message: Message) -> Message:
        """The message, or one with another number in one of its fields."""
        fields: dict[str, Any] = msgspec.structs.asdict(message)
        numbers = [
            name for name, value in fields.items() if type(value) is int and name != "fragment"
        ]
        if not numbers or self.rng.random() < 0.5:
            return message
        return msgspec.structs.replace(
            message, **{self.rng.choice(numbers): self.rng.randrange(99)}
        )

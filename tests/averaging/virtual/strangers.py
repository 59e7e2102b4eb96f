"""Peers that say in their own names what others have said, some of it altered, at any time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from averaging.messages import Message
from dht.identity import PeerId
from tests.averaging.virtual.swarm import Swarm

HEARD_MAX = 64


class Chatterers:
    """Send what they have overheard, at any time, to anybody."""

    def __init__(self, swarm: Swarm, seed: int, ids: Sequence[PeerId], *, every_s: float) -> None:
        self.swarm = swarm
        self.rng = random.Random(f"strangers {seed}")
        self.every_s = every_s
        self.overheard: list[Message] = []
        swarm.on_send = self.overhear
        for each in ids:
            swarm.call_in(self.rng.uniform(0.0, 2.0), self.speak, each)

    def overhear(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        self.overheard.append(message)
        del self.overheard[:-HEARD_MAX]
        return True

    def speak(self, speaker: PeerId) -> None:
        rng = self.rng
        self.swarm.call_in(rng.expovariate(1.0 / self.every_s), self.speak, speaker)
        to = rng.choice(self.swarm.names)
        if self.overheard:
            self.swarm.say(speaker, to, self.altered(rng.choice(self.overheard)))

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

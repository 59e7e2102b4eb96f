"""Peers without a credential have no effect on a swarm: its trace is the same to the last bit.

The door of the simulated peers asks the same ``Admission`` as a live peer's. Strangers send what
members have said before, some of it altered, in the name of keys of their own, over links that they
do not share with the swarm.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from averaging.messages import Message, Opening
from averaging.simulated.wires import Part
from dht.identity import PeerId
from dht.membership.admission import Admission
from tests.averaging.simulated.swarm import PeerPlan, Storm, Swarm, cause_storm
from tests.dht.membership.signers import NOW, admission, credential, key

PEERS_MAX = 20
STRANGERS = 20
HEARD_MAX = 64
SHORT = Storm(peers=(3, 6), accidents=(1, 4), rough_s=60.0)


@cache
def doors() -> Admission:
    """A run with an invite for every member, and for nobody else."""
    door = admission()
    for peer in members():
        assert door.show(peer, credential(peer), now=NOW) is None
    return door


@cache
def members() -> tuple[PeerId, ...]:
    return tuple(key(f"member {number}").peer_id for number in range(PEERS_MAX))


class Strangers:
    """Send what they have overheard, at any time, to anybody."""

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.swarm = swarm
        self.rng = random.Random(f"strangers {seed}")
        self.ids = [key(f"stranger {number}").peer_id for number in range(STRANGERS)]
        self.overheard: list[Message] = []
        self.said = 0
        swarm.on_send = self.overhear
        for stranger in self.ids:
            swarm.heap.call_in(self.rng.uniform(0.0, 2.0), self.speak, stranger)

    def overhear(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        self.overheard.append(message)
        del self.overheard[:-HEARD_MAX]
        return True

    def speak(self, stranger: PeerId) -> None:
        rng, wires = self.rng, self.swarm.wires
        self.swarm.heap.call_in(rng.expovariate(1.0), self.speak, stranger)
        to = rng.choice(self.swarm.names)
        if self.overheard and rng.random() < 0.9:
            wires.deliver(stranger, to, 0, self.altered(rng.choice(self.overheard)))
        else:
            opening = Opening(
                fragment=0,
                round=rng.randbytes(32),
                slice=rng.randrange(4),
                commit=rng.randbytes(64),
                signature=rng.randbytes(64),
            )
            wires.deliver_upload(stranger, to, 0, opening, Part(b"", None), rng.randrange(1 << 20))
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


def trace(seed: int, *, strangers: bool, guarded: bool = True) -> tuple[str, int, int]:
    """Hash of everything that a swarm did in a storm, the versions that it made, and how much the
    strangers said."""

    def make(seed: int, plans: Sequence[PeerPlan], **rest: Any) -> Swarm:
        return Swarm(seed, plans, names=members()[: len(plans)], **rest)

    swarm = cause_storm(make, seed, SHORT)
    if guarded:
        swarm.wires.admits = lambda peer: (
            doors().refusal(peer, now=NOW + swarm.heap.now, role="learner") is None
        )
    crowd = Strangers(swarm, seed) if strangers else None
    swarm.run(SHORT.rough_s)
    made = max(swarm.versions(), default=0)
    return swarm.trace.hexdigest(), made, crowd.said if crowd is not None else 0


QUICK = 100
CHUNK = 20


@pytest.mark.parametrize(
    "first",
    [
        *range(0, QUICK, CHUNK),
        *(pytest.param(n, marks=pytest.mark.soak) for n in range(QUICK, 1000, CHUNK)),
    ],
)
def test_strangers_do_not_change_one_bit_of_a_swarms_trace(first: int) -> None:
    versions = 0
    for seed in range(first, first + CHUNK):
        alone, made, _ = trace(seed, strangers=False)
        among, _, said = trace(seed, strangers=True)
        assert said > STRANGERS * SHORT.rough_s / 2
        assert among == alone, f"seed {seed}"
        versions += made

    assert versions > 2 * CHUNK, "these swarms hardly merged anything"


def test_without_the_door_they_do() -> None:
    def changed(seed: int) -> bool:
        try:
            return trace(seed, strangers=True, guarded=False)[0] != trace(seed, strangers=False)[0]
        except (AssertionError, KeyError):  # a promise to the swarm is broken
            return True

    assert any(changed(seed) for seed in range(5))

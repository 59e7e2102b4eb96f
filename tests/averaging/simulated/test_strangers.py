"""Peers without a credential have no effect on a swarm: its trace is the same to the last bit.

The door of the simulated peers asks the same ``Admission`` as a live peer's. Strangers send what
members have said before, some of it altered, in the name of keys of their own, over links that they
do not share with the swarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from dht.identity import PeerId
from dht.membership.admission import Admission
from tests.averaging.simulated.strangers import Chatterers
from tests.averaging.simulated.swarm import PeerPlan, Storm, Swarm, cause_storm
from tests.dht.membership.signers import NOW, admission, credential, key
from tests.seeds import seeds

PEERS_MAX = 20
STRANGERS = 20
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
    ids = [key(f"stranger {number}").peer_id for number in range(STRANGERS)]
    crowd = Chatterers(swarm, seed, ids, every_s=1.0) if strangers else None
    swarm.run(SHORT.rough_s)
    made = max(swarm.versions(), default=0)
    return swarm.trace.hexdigest(), made, crowd.said if crowd is not None else 0


QUICK = 10
CHUNK = 10


@pytest.mark.parametrize("first", seeds(QUICK, soak=1000, step=CHUNK))
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

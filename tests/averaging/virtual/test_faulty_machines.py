"""Storms of honest peers whose machines fail: nobody is convicted, and the swarm goes on.

Peers crash and come back with other clocks, and the uploads that they keep for auditors rot in
memory. What an auditor is shown then is not what was merged: that costs its owner a strike, and
proves nothing, because nobody has signed it. Not among them: a memory that fails while a reducer
merges (``averaging.guard.rules.proofs``).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from averaging.virtual.swarm import Peer
from tests.averaging.virtual.swarm import Storm, Swarm, storm, weather_out
from tests.seeds import all_that_happens, seeds

FAULTY = Storm(peers=(4, 7), accidents=(3, 6), audit_rate=0.4)
ROT_EVERY_S = 3.0
CLOCK_OFF_S = 1e5
KEPT = 20
"""Uploads that are young enough to be asked for."""
QUICK, SOAK, CHUNK = 2, 10_000, 2


def rot(swarm: Swarm, rng: random.Random) -> None:
    """Now and then one bit flips in what a peer keeps of a round that is over."""
    swarm.call_in(rng.expovariate(1 / ROT_EVERY_S), rot, swarm, rng)
    over = [
        slices
        for peer, round_id, slices in swarm.uploads
        if peer.alive and round_id not in peer.machine.rounds
    ]
    data = rng.choice([each for slices in over[-KEPT:] for each in slices if each] or [None])
    if data is not None:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        swarm.truth.coverage["rotten upload"] += 1


def lose_clocks(swarm: Swarm, rng: random.Random) -> None:
    """A peer that starts again has another idea of the time."""

    def started(node: Peer) -> None:
        name = node.name
        off_s = rng.uniform(-CLOCK_OFF_S, CLOCK_OFF_S)
        swarm.plans[name] = replace(swarm.plans[name], clock_offset_s=off_s)
        swarm.truth.coverage["another clock"] += node.incarnation > 1

    swarm.on_start = started


def failing(seed: int) -> Counter[str]:
    """One storm. Raises ``Broken``, also if an honest peer is convicted."""
    rng = random.Random(f"faulty {seed}")
    swarm = storm(seed, FAULTY)
    lose_clocks(swarm, rng)
    rot(swarm, rng)
    weather_out(swarm, FAULTY)
    for peer in swarm.alive:
        swarm.truth.coverage["audited"] += peer.averager.guard.counters["audits"]
    swarm.close()
    return swarm.truth.coverage


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK, step=CHUNK))
def test_no_machine_that_fails_convicts_its_owner(first: int) -> None:
    """A kept upload is never signed a second time: the claim is the one that was uploaded."""
    happened = all_that_happens(failing, first=first, count=CHUNK)
    assert happened["audited"] > 3 * CHUNK
    assert happened["rotten upload"] > 5 * CHUNK
    assert happened["another clock"] > CHUNK // 2

"""Founders of one run that meet after each has founded it: their histories are one fork.

The first weights follow from the run file, so both begin with equal bits and one lineage. What each
folded alone is mixed, or offered again by the side with much less, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, check_tokens, swarm
from tests.seeds import seeds

PATIENT = replace(POLICY, quorum=QuorumPolicy(wait_s=30.0))
"""A leader that nobody comes to stands still for this long."""
OFFSETS_S = (0.0, 0.3, 1.0, 2.0, 3.0)
STILL_MAX_S = 3.0
LIVED_S = 30.0


async def foundings_meet(seed: int) -> None:
    """Two founders, the second one so much later, that know one another some seconds after that."""
    rng = random.Random(seed)
    offset_s, apart_s = OFFSETS_S[seed % len(OFFSETS_S)], rng.choice((0.5, 2.0, 5.0, 10.0, 20.0))
    names = rng.sample(("anna", "boris"), 2)
    loop = asyncio.get_running_loop()
    async with swarm(MemoryNetwork()) as made:
        views = {}
        for name in names:
            step_time_s = rng.uniform(0.2, 0.4)
            peer = await made.add(name, policy=PATIENT, founder=True, step_time_s=step_time_s)
            await made.live(offset_s if name == names[0] else 0.0)
        for peer in made.peers:
            views[peer.name] = dict(peer.view)
            peer.view.clear()
        await made.live(apart_s)
        met_at = loop.time()
        for peer in made.peers:
            peer.view.update(views[peer.name])
        await made.live(LIVED_S)

        made.check()
        check_tokens(made.peers)
        assert not any(peer.told("founded_apart") for peer in made.peers)
        assert not any(peer.told("no_quorum") for peer in made.peers)
        cycle_s = max(p.learner.step_time_s for p in made.peers if p.learner) * 8
        for fragment in range(len(made.layout.fragments)):
            assert not any(p.learner and p.learner.discarded(fragment) for p in made.peers)
            merges = [met_at, loop.time()]
            for peer in made.peers:
                merges += [
                    at
                    for at, event, fields in peer.events
                    if event == "round"
                    and at > met_at
                    and (fields["fragment"], fields["outcome"]) == (fragment, "finished")
                ]
            merges.sort()
            longest_s = max(later - at for at, later in pairwise(merges))
            assert longest_s < cycle_s + STILL_MAX_S, f"nothing was merged for {longest_s:.1f} s"


@pytest.mark.parametrize("seed", seeds(2, soak=300))
def test_founders_with_equal_first_weights_merge_at_once_and_lose_nothing(seed: int) -> None:
    run(foundings_meet(seed))

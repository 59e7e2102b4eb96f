"""A run that ends by tokens: what its peers have trained when the last fragment is final."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from averaging.rules.due import DuePolicy
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, layout_of, swarm

FRAGMENTS, CYCLE = 4, 120


async def pending_at_the_end(*, hurries: bool) -> float:
    """Steps of one peer that are in no version at the end, in cycles."""
    due = DuePolicy(cycle_steps=CYCLE, fragments=FRAGMENTS)
    terms = replace(POLICY, due=due, tokens_end=12_000)
    async with swarm(MemoryNetwork(), layout=layout_of(FRAGMENTS)) as made:
        peers = [await made.add(name, policy=terms) for name in ("anna", "boris")]
        averagers = [peer.averager for peer in peers]
        while any(len(each.final_fragments) < FRAGMENTS for each in averagers):
            await made.live(1.0)
            for averager in averagers if hurries else ():
                averager.hurry_to_the_end()
            assert asyncio.get_running_loop().time() < 20_000
        made.check()
        shares = []
        for peer in peers:
            assert peer.learner is not None
            step = peer.learner.progress().step
            marks = [
                peer.averager.life.mark_in(state.merged) for state in peer.averager.states if state
            ]
            shares.append(sum(step - mark for mark in marks) / FRAGMENTS / CYCLE)
        return max(shares)


def test_fragments_that_wait_for_their_turn_are_merged_when_another_one_is_final() -> None:
    hurried, usual = (run(pending_at_the_end(hurries=hurries)) for hurries in (True, False))
    assert usual > 0.3, "fragments are merged one after another, over a cycle"
    assert hurried < 0.1

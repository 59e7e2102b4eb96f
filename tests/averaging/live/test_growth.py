"""The memory of a live averager is bounded over hundreds of rounds in which a peer comes and
goes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from averaging.guard.rules.witness import ROUNDS_KEPT_MAX
from averaging.history.chain import CHAIN_MAX_LINKS
from averaging.live.settings import AveragerSettings
from averaging.rules.due import DuePolicy
from averaging.rules.electors import SEEN_MAX
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests import growth
from tests.averaging.live.quadratic import LAYOUT, POLICY, Peer, swarm

FULL_MINUTES = 10
"""After this time all containers but those of ``NOT_FULL`` are full."""

NOT_FULL = {
    ".counters": 100,
    "electors._seen": SEEN_MAX,
    "probation._tokens_unseen": SEEN_MAX,
    ".chain._links": CHAIN_MAX_LINKS,
    "audits._witness._rounds": ROUNDS_KEPT_MAX,
}
"""Containers with a bound that half an hour does not reach."""


@pytest.mark.slow
def test_the_memory_of_an_averager_is_bounded_over_hundreds_of_rounds() -> None:
    async def main() -> list[growth.Sizes]:
        network = MemoryNetwork()
        policy = replace(POLICY, due=DuePolicy(cycle_steps=4, fragments=len(LAYOUT.fragments)))
        settings = AveragerSettings(progress_s=1.0, replay_bytes_max=64 << 10)
        measured = []
        async with swarm(network) as made:

            async def comes(name: str, incarnation: int) -> Peer:
                return await made.add(
                    name, policy=policy, settings=settings, incarnation=incarnation
                )

            stays = [await comes(name, 1) for name in ("anna", "boris")]
            for minute in range(30):
                guest = await comes("clara", 1 + minute)
                await made.live(45.0)
                await guest.ended()
                await guest.host.close()
                made.peers.remove(guest)
                await made.live(15.0)
                if minute >= FULL_MINUTES:
                    measured.append(sizes_of(stays[0], made.peers, beyond=[network, made]))
            assert min(version or 0 for version in stays[0].versions()) > 300
        return measured

    assert not growth.growing(run(main()), each_of=1, allowed=NOT_FULL)


def sizes_of(peer: Peer, peers: Sequence[Peer], *, beyond: Collection[Any]) -> growth.Sizes:
    """A stream that is open just now leads to the peer at its other end."""
    others = [*beyond, asyncio.get_running_loop()]
    for each in peers:
        others += [each.learner, each.host, each.events]
        others += [each.averager] if each is not peer else []
    return growth.sizes({"averager": peer.averager}, beyond=others)

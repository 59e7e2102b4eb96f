"""Two sides that merge nothing any more end on one state; storms: rules/test_final_mix.py."""

from __future__ import annotations

from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import lineages, swarm


async def test_two_sides_of_a_partition_that_have_merged_their_last_end_on_one_state() -> None:
    network = MemoryNetwork()
    async with swarm(network) as made:
        peers = [await made.add(f"peer-{number}") for number in range(4)]
        await made.live(20.0)
        network.partition([[peer.id for peer in peers[:2]]])
        await made.live(30.0)
        assert all(len(each) == 2 for each in lineages(made)), "both sides go on"
        for peer in peers:
            peer.averager.end_merges()
        network.heal()
        await made.live(40.0)
        assert [len(each) for each in lineages(made)] == [1] * len(made.layout.fragments)
        made.check()  # equal lineage, equal bits
        assert not [r for p in peers for r in p.told("round") if r["kind"] == "meld"]

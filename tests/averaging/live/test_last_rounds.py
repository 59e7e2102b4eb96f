"""A swarm of several groups ends in agreement: once more, all in one group."""

from __future__ import annotations

from dataclasses import replace

from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, lineages, swarm


async def test_a_swarm_of_several_groups_ends_in_agreement_when_all_gather_once_more() -> None:
    policy = replace(POLICY, group_size=3, slice_bytes_min=1024)
    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(f"peer-{number}", policy=policy) for number in range(7)]
        await made.live(35.0)
        assert all(len(each) > 1 for each in lineages(made)), "groups have their own"
        for peer in peers:
            peer.averager.gather_everybody()
        await made.live(25.0)
        assert [len(each) for each in lineages(made)] == [1] * len(made.layout.fragments)
        made.check()  # equal lineage, equal bits
        rounds = [r for p in peers for r in p.told("round") if r["outcome"] == "finished"]
        assert "meld" in {r["kind"] for r in rounds}
        assert len(rounds[-1]["members"]) == 7


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

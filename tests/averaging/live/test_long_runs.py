"""Events of a run that takes hours: nobody trains, or the peers change entirely."""

from __future__ import annotations

from averaging.live.settings import AveragerSettings
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import Peer, check_tokens, swarm

FOLLOWING = AveragerSettings(look_round_s=4.0)


def lowest(peer: Peer) -> int:
    return min(-1 if version is None else version for version in peer.versions())


async def test_every_learner_is_gone_for_an_hour_and_the_run_goes_on_from_its_keepers() -> None:
    """No peer that made the states is there any more when others begin to train."""
    async with swarm(MemoryNetwork()) as made:
        keepers = [
            await made.add(name, trains=False, knows_start=False, settings=FOLLOWING)
            for name in ("keeper", "second")
        ]
        learners = [await made.add(name) for name in ("anna", "boris")]
        await made.live(100.0)
        for learner in learners:
            await learner.ended()
            await learner.host.close()
            made.peers.remove(learner)
        await made.live(10.0)
        kept = {keeper.id: keeper.averager.states for keeper in keepers}
        left = [lowest(keeper) for keeper in keepers]
        assert min(left) >= 5
        await made.live(3600.0)
        assert {keeper.id: keeper.averager.states for keeper in keepers} == kept

        later = []
        for name in (
            "clara",
            "dora",
        ):  # or each would wait for the other
            later.append(await made.add(name, knows_start=False))
            await made.live(75.0)
        check_tokens(later)
        for peer in (*later, *keepers):
            assert lowest(peer) > max(left), peer.versions()
        for before in kept[keepers[0].id]:
            assert before is not None
            for peer in later:
                state = peer.averager.states[before.fragment]
                assert state is not None
                assert state.chain.find(before.version, before.lineage) is not None

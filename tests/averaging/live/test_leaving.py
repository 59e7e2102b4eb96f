"""Peers that leave have their pending work merged first: by the others, or by a keeper alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from averaging.live.settings import AveragerSettings
from averaging.live.streams.bulk import TransportSettings
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.interface.phase import Phase
from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, Peer, Swarm, check_tokens, layout_of, swarm

VALUES = 160_000
LARGE = Layout.build([TensorSpec(f"block.{i}.weight", (400, VALUES // 400)) for i in range(4)], 4)
LAYOUT = layout_of(4)
UPLOAD_S = 20.0


def policy(*, cycle: int, layout: Layout = LAYOUT) -> RoundPolicy:
    due = DuePolicy(cycle_steps=cycle, fragments=len(layout.fragments))
    return replace(POLICY, due=due, quorum=QuorumPolicy(wait_s=30.0), alone_s=600.0)


def pending(peer: Peer) -> int:
    assert peer.learner is not None
    return sum(peer.learner.pending(index) for index in range(len(peer.averager.states)))


async def merged_within(peer: Peer, patience_s: float) -> float | None:
    """Let a peer leave; returns the time until all its work was merged, if it was in time."""
    assert peer.learner is not None
    peer.learner.rests = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    while peer.averager.offer_before_leaving():
        if loop.time() - began >= patience_s:
            return None
        await asyncio.sleep(0.25)
    assert not pending(peer)
    return loop.time() - began


async def gone(made: Swarm, peer: Peer) -> None:
    assert await peer.averager.drain(timeout_s=10.0)
    await peer.ended()
    for other in made.peers:
        other.view.pop(peer.id, None)


def mark_at(peer: Peer, of: Peer) -> list[int]:
    """The own step of ``of`` up to which each state of ``peer`` contains its work."""
    assert all(peer.averager.states)
    return [of.averager.life.mark_in(each.merged) for each in peer.averager.states if each]


@pytest.mark.parametrize("reachable", [True, False])
async def test_homes_that_leave_one_by_one_leave_all_their_work_to_a_keeper(
    reachable: bool,
) -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        terms = policy(cycle=120)
        # Away from the others a quadratic learner goes much further than with them.
        settings = AveragerSettings(progress_s=1.0, norm_ratio_max=1e6)
        keeper = await made.add("keeper", policy=terms, settings=settings, trains=False)
        anna, boris = [
            await made.add(name, policy=terms, settings=settings, reachable=reachable)
            for name in ("anna", "boris")
        ]
        await made.live(700.0)
        living = asyncio.create_task(made.live(1000.0))

        assert pending(anna)
        took_s = await merged_within(anna, 60.0)
        assert took_s is not None and took_s < 20.0, "an eighth of a cycle is 15 s"
        assert anna.learner is not None
        assert mark_at(boris, anna) == [anna.learner.step] * 4
        await gone(made, anna)

        await asyncio.sleep(40.0)
        assert pending(boris)
        took_s = await merged_within(boris, 60.0)
        assert took_s is not None and took_s < 5.0
        assert boris.averager.stats.folds == 0, "a fold costs the keeper a whole state"
        check_tokens([boris])
        await asyncio.sleep(35.0)  # a keeper looks round every 30 s
        assert keeper.versions() == boris.versions()
        assert boris.learner is not None
        assert mark_at(keeper, boris) == [boris.learner.step] * 4
        made.check()
        living.cancel()


async def test_homes_on_lines_that_take_20_s_for_a_fragment_leave_nothing_behind() -> None:
    network = MemoryNetwork()
    async with swarm(network, layout=LARGE) as made:
        terms = replace(
            policy(cycle=240, layout=LARGE),
            upload_s=15.0,
            round_s=180.0,
            slow_link_bytes_s=40e3,
            slice_bytes_min=64 << 10,
        )
        # The simulated line carries one stream after the other.
        transport = TransportSettings(piece_bytes=20_000, stall_max_s=60.0)
        settings = AveragerSettings(progress_s=0.5, transport=transport)
        await made.add("keeper", policy=terms, settings=settings, trains=False)
        homes = [
            await made.add(name, policy=terms, settings=settings, reachable=False)
            for name in ("anna", "boris")
        ]
        rate = VALUES / UPLOAD_S  # a byte for each value
        for home in homes:
            assert home.learner is not None
            home.learner.is_noisy = False
            network.simulated.set_link(home.id, up_bytes_s=rate, down_bytes_s=2 * rate)
        await made.live(400.0)
        living = asyncio.create_task(made.live(1000.0))
        for home in homes:
            took_s = await merged_within(home, 300.0)
            assert took_s is not None and took_s < 5.5 * UPLOAD_S, "four fragments"
            await gone(made, home)
        assert homes[1].averager.stats.folds == 0
        living.cancel()


async def test_fragments_that_cannot_be_offered_leave_places_on_a_slow_line_to_others() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        terms = replace(policy(cycle=48), slow_link_bytes_s=1.0)  # two merges at once
        anna, _ = [await made.add(name, policy=terms) for name in ("anna", "boris")]
        await made.live(8.0)
        assert anna.learner is not None
        anna.learner.rests = True
        for work in anna.averager._works[:2]:
            assert work.machine is not None
            work.machine.phase = Phase.CATCHING
        anna.averager.offer_before_leaving()
        assert [work.is_busy for work in anna.averager._works] == [False, False, True, True]


async def test_a_peer_that_rests_is_hurried_for_and_is_one_of_many_again_when_it_trains() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        terms = policy(cycle=48)
        anna, *_ = [await made.add(name, policy=terms) for name in ("anna", "boris", "clara")]
        await made.live(60.0)
        assert await merged_within(anna, 20.0) is not None
        anna.averager.stay()
        assert anna.learner is not None
        anna.learner.rests = False
        for work in anna.averager._works:
            assert work.machine is not None
            assert not work.machine.joining.leaves and not work.machine.pace.due_time.eager
        marks = mark_at(anna, anna)
        await made.live(120.0)
        assert all(now > then for now, then in zip(mark_at(anna, anna), marks, strict=True))
        made.check()


async def test_a_peer_without_any_company_folds() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        anna = await made.add("anna", policy=policy(cycle=24))
        await made.live(20.0)
        assert pending(anna)
        assert await merged_within(anna, 5.0) is not None
        assert anna.averager.stats.folds > 0


async def test_the_work_of_a_peer_that_comes_back_while_it_is_in_flight_is_merged_once() -> None:
    network = MemoryNetwork()
    async with swarm(network, layout=LAYOUT) as made:
        terms = policy(cycle=48)
        for name in ("keeper", "boris", "clara"):
            await made.add(name, policy=terms, trains=name != "keeper")
        anna = await made.add("anna", policy=terms)
        await made.live(200.0)
        assert anna.learner is not None
        anna.learner.rests = True
        step = anna.learner.step
        while not any(anna.averager.phases[i] == "entered" for i in range(4)):
            assert anna.averager.offer_before_leaving()
            await asyncio.sleep(0.001)
        # It is killed while its uploads are under way, and starts again from its states.
        states = [each for each in anna.averager.states if each is not None]
        network.crash(anna.id)
        await anna.ended()
        made.peers.remove(anna)
        await made.live(1.0)
        again = await made.add("anna", policy=terms, incarnation=2, states=states)
        await made.live(200.0)
        made.check()
        for index in range(4):
            mark = again.averager.states[index].merged[again.id]  # type: ignore[union-attr]
            assert again.learner is not None
            new = again.learner.step - again.learner.pending(index) // 100
            assert mark.tokens <= (step + new) * 100, "no token is merged twice"
            assert mark.incarnation == 2


async def test_a_keeper_that_goes_away_meanwhile_costs_nothing_but_the_time() -> None:
    network = MemoryNetwork()
    async with swarm(network, layout=LAYOUT) as made:
        terms = policy(cycle=48)
        keeper = await made.add("keeper", policy=terms, trains=False)
        anna = await made.add("anna", policy=terms, reachable=False)
        await made.live(30.0)
        assert anna.learner is not None
        anna.learner.rests = True
        while not any(anna.averager.phases[i] == "entered" for i in range(4)):
            assert anna.averager.offer_before_leaving()
            await asyncio.sleep(0.001)
        network.crash(keeper.id)
        await keeper.ended()
        made.peers.remove(keeper)
        del anna.view[keeper.id]
        assert await merged_within(anna, 120.0) is not None, "it folds what was in flight"
        check_tokens([anna])

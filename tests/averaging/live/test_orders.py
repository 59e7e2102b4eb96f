"""Real averagers and the orders of the run's owner, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from averaging.history.manifest import numbers_digest, rolled_back
from averaging.history.state import FragmentState
from averaging.messages import Stamp
from averaging.rules.line_levels import Level
from averaging.rules.orders import Place, RoundOrders
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, Peer, Swarm, swarm


def orders(number: int, **said: object) -> RoundOrders:
    stamp = Stamp(number, number.to_bytes(16, "big"))
    return RoundOrders(stamp=stamp, encoded=b"directive %d" % number, **said)  # type: ignore[arg-type]


def copies(states: Sequence[FragmentState | None]) -> list[FragmentState]:
    """States whose arrays nobody else writes to."""
    return [
        replace(state, theta=state.theta.copy(), momentum=state.momentum.copy())
        for state in states
        if state is not None
    ]


async def test_rounds_that_follow_lines_since_an_amendment_are_told_of() -> None:
    async with swarm(MemoryNetwork()) as made:
        averager = (await made.add("anna")).averager
        assert averager.level() is None
        longer = Level(codec="int8", codec_down="int8", cycle_steps=16)
        amended = replace(POLICY, smaller_levels=(longer,))
        averager.follow(orders(1, policies=((1, amended),)))
        level = averager.level()
        assert level is not None and level[0] == amended.levels[0]


async def at_one_version(made: Swarm) -> list[FragmentState]:
    """The states of a swarm, once all peers are at the same ones."""
    while len({tuple(peer.versions()) for peer in made.peers}) > 1:
        await made.live(1.0)
    return copies(made.peers[0].averager.states)


def places(states: Sequence[FragmentState]) -> dict[Place, bytes]:
    return {(s.fragment, s.version, s.lineage): numbers_digest(s) for s in states}


async def test_an_attested_state_of_one_peer_that_does_not_count_is_taken() -> None:
    network = MemoryNetwork()
    async with swarm(network) as made:
        anna, boris = await made.add("anna"), await made.add("boris")
        await made.live(60.0)
        states = await at_one_version(made)
        for peer in (anna, boris):
            await peer.ended()
        await made.add("holder", states=copies(states), trains=False)
        for peer in (anna, boris):
            network.crash(peer.id)
            made.peers.remove(peer)
        late = await made.add("late", knows_start=False)
        for known in ("one", "two"):  # they count, and have nothing
            other = await made.add(known, knows_start=False, trains=False)
            assert other.id in late.view
        await made.live(30.0)
        attested = orders(1, attested=places(states))
        changed = orders(2, attested=dict.fromkeys(places(states), bytes(32)))
        late.averager.follow(changed)
        await made.live(60.0)
        assert late.versions() == [None] * len(states), "other bits than those attested"
        late.averager.follow(attested)
        there = [state.version for state in states]
        await made.until(lambda: late.versions() == there, within_s=60.0)


async def test_a_run_that_is_taken_back_goes_on_from_there_at_every_peer() -> None:
    network = MemoryNetwork()
    async with swarm(network) as made:
        peers = [await made.add(name) for name in ("anna", "boris", "clara", "dora")]
        await made.live(40.0)
        good = await at_one_version(made)
        await made.live(30.0)
        gone = [copies(peer.averager.states) for peer in peers]
        dora = peers[3]
        network.partition([[dora.id]])  # away while it happens
        await made.live(10.0)
        roots = [rolled_back(state, 7) for state in good]
        attested = orders(7, attested=places(good) | places(roots))

        async def take_back(peer: Peer, states: Sequence[FragmentState | None]) -> None:
            peer.averager.follow(attested)
            await peer.averager.begin_again(states, rollback=7, reason="rolled back")

        for peer in peers[:2]:
            await take_back(peer, copies(roots))
        await take_back(peers[2], [None] * len(roots))  # it has not kept them
        await made.until(lambda: None not in peers[2].versions(), within_s=60.0)
        network.heal()
        await made.live(30.0)
        old = [state.version for state in gone[3]]
        assert [v for v in dora.versions() if v is not None] >= old, "it does not know yet"
        assert all(
            root.chain.tip.lineage in {link.lineage for link in state.chain}
            for root, state in zip(roots, peers[0].averager.states, strict=True)
            if state is not None
        ), "the heavier history of the one that was away moves nobody"
        await take_back(dora, copies(roots))
        await made.live(50.0)
        made.check()
        for peer in peers:
            for root, before, state in zip(roots, gone[0], peer.averager.states, strict=True):
                assert state is not None and state.version > root.version
                assert state.chain.find(root.version, root.lineage) is not None
                assert state.chain.find(before.version, before.lineage) is None
            assert peer.averager.stats.contributed > 0
        assert len({tuple(peer.versions()) for peer in peers}) == 1
        assert peers[3].told("round")[-1]["contributors"]


async def test_merges_are_audited_after_a_rollback_as_before_it() -> None:
    async with swarm(MemoryNetwork()) as made:
        policy = replace(POLICY, audit_rate=1.0)
        peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
        await made.live(20.0)
        roots = [rolled_back(state, 7) for state in await at_one_version(made)]
        for peer in peers:
            peer.averager.follow(orders(7, attested=places(roots)))
            await peer.averager.begin_again(copies(roots), rollback=7, reason="rolled back")
        await made.live(10.0)  # audits of rounds from before are over
        before = [peer.averager.guard.counters["audits"] for peer in peers]
        await made.live(20.0)
        made.check()
        for peer, audits in zip(peers, before, strict=True):
            assert peer.averager.guard.counters["audits"] > audits

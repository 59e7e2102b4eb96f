"""The virtual swarm itself: its clocks, the lives of its peers, and what a watch can do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from averaging.history.state import FragmentState
from averaging.messages import Join
from averaging.round.interface.effects import Effect, Merge
from averaging.virtual.swarm import Peer, PeerPlan, VirtualRun
from averaging.virtual.swarm import Swarm as AnySwarm
from dht.identity import PeerId
from tests.averaging.live import quadratic
from tests.averaging.virtual.membership import Everybody
from tests.averaging.virtual.swarm import Swarm, learner_of
from tests.averaging.virtual.truth import Broken

THREE = [PeerPlan(founder=number == 0, clock_offset_s=1e4 * number) for number in range(3)]


def test_peers_with_clocks_of_their_own_merge_one_history_the_same_each_time() -> None:
    traces = set()
    for _ in range(2):
        with Swarm(1, THREE) as swarm:
            swarm.run(45.0)
            assert min(swarm.versions()) >= 3 and len(swarm.lineages()) == 1
            assert [round(peer.now() - swarm.now) for peer in swarm.alive] == [0, 10_000, 20_000]
            traces.add(swarm.trace.hexdigest())
    assert len(traces) == 1


def test_a_peer_that_comes_back_begins_with_its_disk_and_a_new_life() -> None:
    with Swarm(2, THREE) as swarm:
        swarm.run(30.0)
        name = swarm.names[1]
        swarm.crash(name)
        swarm.run(45.0)
        kept = swarm.disks[name][0].version
        swarm.restart(name)
        peer = swarm.nodes[name]
        assert peer.incarnation == 2 and peer.state is not None and peer.state.version == kept
        swarm.run(70.0)
        assert peer.state.version > kept and len(swarm.lineages()) == 1


def test_a_machine_that_sleeps_neither_trains_nor_ticks_until_it_wakes() -> None:
    with Swarm(3, THREE) as swarm:
        swarm.run(25.0)
        peer = swarm.nodes[swarm.names[2]]
        learner = learner_of(peer)
        assert learner is not None and peer.state is not None
        swarm.pause(peer.name)
        step, version = learner.step, peer.state.version
        swarm.run(60.0)
        assert (learner.step, peer.state.version) == (step, version)
        assert max(swarm.versions()) > version, "the others go on"
        swarm.resume(peer.name)
        swarm.run(90.0)
        assert learner.step > step and len(swarm.lineages()) == 1


def test_a_watch_that_drops_messages_and_effects_keeps_versions_from_coming() -> None:
    def no_merge(peer: Peer, effect: Effect) -> Effect | None:
        return None if isinstance(effect, Merge) else effect

    with Swarm(4, THREE) as swarm:
        swarm.on_send = lambda sender, to, message: not isinstance(message, Join)
        swarm.run(40.0)
        assert max(swarm.versions()) == 0
        swarm.on_send, swarm.on_effect = None, no_merge
        swarm.run(80.0)
        assert max(swarm.versions()) == 0


def test_what_a_watch_raises_ends_the_run_at_once() -> None:
    def complain(peer: Peer, effect: Effect) -> Effect | None:
        raise Broken("as planned")

    with Swarm(5, THREE) as swarm:
        swarm.run(3.0)
        swarm.on_effect = complain
        with pytest.raises(Broken, match="as planned"):
            swarm.run(100.0)
        assert swarm.now < 20.0


def test_any_learner_of_any_fragments_trains_in_a_swarm() -> None:
    first = quadratic.start_of(quadratic.LAYOUT)
    numbers = iter(range(1, 10))

    def learner(
        swarm: AnySwarm, name: PeerId, plan: PeerPlan, states: Sequence[FragmentState]
    ) -> quadratic.QuadraticLearner:
        return quadratic.QuadraticLearner(quadratic.LAYOUT, seed=next(numbers), states=states)

    run = VirtualRun(quadratic.LAYOUT, quadratic.POLICY, first)
    with AnySwarm(THREE, run, learner=learner, membership=Everybody(), seed=1) as swarm:
        swarm.run(40.0)
        states = [peer.averager.states for peer in swarm.alive]
        for fragment in quadratic.LAYOUT.fragments:
            held = [each[fragment.index] for each in states]
            assert min(state.version for state in held if state is not None) >= 3
            assert len({state.lineage for state in held if state is not None}) == 1

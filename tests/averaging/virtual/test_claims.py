"""The bounds on claimed work refuse no honest peer, in any weather and among all speeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from averaging.rules.policy import ProbationPolicy
from averaging.rules.quorum import ALL
from averaging.virtual.swarm import Peer, PeerPlan
from tests.averaging.virtual.swarm import Storm, Swarm, learner_of, storm, weather_out
from tests.seeds import seeds

ALL_SPEEDS = Storm(speeds=(0.1, 1.0, 2.5), calm_s=400.0)
STORMS = (
    ALL_SPEEDS,
    replace(ALL_SPEEDS, probation=ProbationPolicy(rounds=8, seconds=40.0)),
    replace(ALL_SPEEDS, peers=(6, 9), group_size=4),
)
QUICK, CHUNK = 2, 2


def refusals(swarm: Swarm) -> list[str]:
    """The reasons for which joins were refused, and commits declined, for the steps in them."""
    notes = [note for _, _, note in swarm.events if note.event in ("strange_join", "declined")]
    return [str(note.fields) for note in notes if "the most that I believe" in str(note.fields)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=1000, step=CHUNK))
def test_no_storm_makes_honest_work_incredible(first: int) -> None:
    for seed in range(first, first + CHUNK):
        how = STORMS[seed % len(STORMS)]
        swarm = storm(seed, how)
        if swarm.policy.quorum.required == ALL:
            continue  # such runs ask for peers that are alike
        swarm.keep_events = True
        weather_out(swarm, how)
        assert not refusals(swarm), f"seed {seed}"


def merged_tokens(swarm: Swarm, node: Peer) -> tuple[int, int]:
    """Tokens of a peer that are merged, by its own state, and all that it processed."""
    learner = learner_of(node)
    assert node.state is not None and learner is not None
    mark = node.state.merged.get(node.name)
    processed = learner.step * learner.tokens_per_step
    return (mark.tokens if mark is not None else 0), processed


def test_all_the_work_of_a_rack_beside_laptops_is_merged_and_counts() -> None:
    laptops = [PeerPlan(founder=number == 0, step_time_s=4.0) for number in range(4)]
    rack = PeerPlan(step_time_s=0.1, tokens_per_step=800)  # three hundred times the tokens
    swarm = Swarm(1, [*laptops, rack])
    swarm.keep_events = True
    swarm.run(400.0)

    merged, processed = merged_tokens(swarm, swarm.nodes[swarm.names[-1]])
    assert merged > 0.8 * processed > 10**6
    assert not refusals(swarm)


def test_a_peer_that_returns_with_much_pending_work_is_merged() -> None:
    """The others have met it only now: it trained on a side of its own, for long."""
    plans = [PeerPlan(founder=number == 0) for number in range(4)]
    swarm = Swarm(2, plans)
    swarm.keep_events = True
    away = swarm.names[-1]
    swarm.call_at(5.0, swarm.partition, [[away]])
    swarm.call_at(300.0, swarm.heal)
    swarm.run(420.0)

    state = swarm.trainers()[0].state
    assert state is not None and away in state.merged
    assert len(swarm.lineages()) == 1
    assert not refusals(swarm)


def test_a_restarted_peer_is_merged_as_before() -> None:
    swarm = Swarm(3, [PeerPlan(founder=number == 0) for number in range(4)])
    swarm.keep_events = True
    for at in (60.0, 120.0, 180.0):
        swarm.call_at(at, swarm.crash, swarm.names[2])
        swarm.call_at(at + 5.0, swarm.restart, swarm.names[2])
    swarm.run(260.0)

    node = swarm.nodes[swarm.names[2]]
    assert node.state is not None
    assert node.state.merged[node.name].incarnation == 4
    assert not refusals(swarm)


def test_steps_that_do_not_fit_into_the_time_are_refused() -> None:
    swarm = Swarm(4, [PeerPlan(founder=number == 0) for number in range(4)])
    swarm.keep_events = True
    liar = swarm.names[-1]

    def exaggerates(peer: Peer) -> None:
        learner = learner_of(peer)
        if peer.name == liar and learner is not None:
            plain = learner.offer
            lie = partial(msgspec.structs.replace, steps=10**12, tokens=10**14)
            learner.offer = lambda: lie(plain())

    swarm.on_start = exaggerates
    swarm.run(100.0)

    assert refusals(swarm)
    honest = swarm.nodes[swarm.names[0]]
    assert honest.state is not None and honest.state.version > 3
    assert liar not in honest.state.merged

"""Simulated members that poison: what they upload, and what a swarm makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer.simulate.roles import directions, poisoned
from peer.simulate.settings import Swarm
from peer.simulate.simulation import SimulatedSwarm, run

BASE = np.arange(6, dtype=np.float32)
MOVED = np.array([3, 4, 0, 1, 0, 0], dtype=np.float32)
SIZES = (3, 3)


def experiment(**settings: Any) -> Swarm:
    small = {
        "peers.count": 10,
        "problem.size": 4,
        "outer.fragments": 2,
        "outer.steps_per_cycle": 12,
        "rounds.norm_max_ratio": 50.0,
        "end.cycles": 2.0,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return Swarm().with_settings({**small, **given})


def test_a_reversed_upload_goes_back_as_far_as_the_member_moved() -> None:
    told = poisoned(BASE, BASE + MOVED, direction=None, length=2.0, sizes=SIZES)
    assert told.tolist() == (BASE - 2 * MOVED).tolist()


@pytest.mark.parametrize("kind", ["noise", "drift"])
def test_every_unit_of_a_made_up_upload_is_as_long_as_the_true_one(kind: Any) -> None:
    draw = directions(kind, 6, seed=1, fragment=0, peer=2, life=1)
    told = poisoned(BASE, BASE + MOVED, direction=draw(), length=1.5, sizes=SIZES) - BASE
    lengths = [float(np.linalg.norm(unit)) for unit in (told[:3], told[3:])]
    assert lengths == pytest.approx([7.5, 1.5], rel=1e-5)


def test_drifting_members_agree_on_a_direction_and_noisy_ones_never_repeat_theirs() -> None:
    def drawn(kind: Any, peer: int) -> list[list[float]]:
        draw = directions(kind, 4, seed=1, fragment=0, peer=peer, life=1)
        return [np.asarray(draw()).tolist() for _ in range(2)]

    first, second = drawn("drift", 8), drawn("drift", 9)
    assert first[0] == first[1] == second[0]
    first, second = drawn("noise", 8), drawn("noise", 9)
    assert first[0] != first[1] and first[0] != second[0]


def test_the_last_members_lie_and_their_own_parameters_are_honest() -> None:
    with SimulatedSwarm(experiment(peers__liars=0.3), 1) as swarm:
        swarm.pass_time(3.5)
        slots = swarm.lives.slots
        assert [slot.lies for slot in slots] == [False] * 7 + [True] * 3
        for number, sign in ((0, 1), (9, -1)):
            learner = slots[number].learner
            assert learner is not None and learner.trainee.step == 3
            seat = learner.seats[0]
            seat.offer()
            assert seat.snapshot is not None and seat.own.snapshot is not None
            moved = seat.own.snapshot - seat.base
            assert np.abs(moved).max() > 0
            assert np.allclose(seat.snapshot - seat.base, sign * moved, atol=1e-6)


def test_long_poison_within_the_bound_ruins_a_mean_and_not_a_clipped_one() -> None:
    poison = {"peers__liars": 0.3, "peers__poison_length": 10.0}
    honest = run(experiment(), 1).final.loss
    mean = run(experiment(**poison), 1)
    clipped = run(experiment(**poison, outer__merge="centered_clip"), 1)
    assert {record.contributors for record in mean.rounds} == {10}  # nobody is refused
    assert mean.final.loss > 10 * honest
    assert clipped.final.loss < 5 * honest


def test_a_problem_without_data_of_peers_has_no_spot_checks() -> None:
    with pytest.raises(ValueError, match="has no spot checks"):
        SimulatedSwarm(experiment(rounds__spot_checks=1.0), 1)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from averaging.numbers.arrays import Float32s
from averaging.numbers.outer import Nesterov
from examples.paper.methods.members import (
    Contribution,
    Late,
    Trial,
    as_live_peers,
    mean_of_its_cycles,
    noise_scale,
    train,
)
from examples.paper.paired import Job
from examples.paper.paired import train as train_job
from peer.simulate import Swarm, run
from peer.simulate.problems.text_gpt import TextGpt
from peer.simulate.settings import ProblemChoice

SMALL = TextGpt(layers=1, width=16, length=16, batch=4, optimizer="muon")
SMALL_BY = {"muon": SMALL, "adamw": replace(SMALL, optimizer="adamw")}
CONSTANT = ProblemChoice(warmup_share=0.0, decay="constant")
TRIAL = Trial(steps=64, members=3, cycle=16, overlap=0, schedule=CONSTANT, rate=3e-3)


@pytest.fixture(scope="module", params=SMALL_BY)
def optimizer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def simulated(optimizer: str) -> Swarm:
    return Swarm().with_settings(
        {
            "problem.name": "text_gpt",
            "problem.optimizer": optimizer,
            "problem.learning_rate": TRIAL.rate,
            "problem.layers": SMALL.layers,
            "problem.size": SMALL.width,
            "problem.length": SMALL.length,
            "problem.batch": SMALL.batch,
            "outer.steps_per_cycle": TRIAL.cycle,
            "outer.late_work": "per_cycle",
            "outer.momentum": 0.5,
            "peers.count": TRIAL.members,
            "measure.peers_max": 0,
            "end.cycles": TRIAL.steps / TRIAL.cycle,
            "end.time_s": TRIAL.steps + 0.9,
        }
    )


def test_losses_are_those_of_a_swarm_of_live_averagers(simulated: Swarm, optimizer: str) -> None:
    [ours] = train([TRIAL], SMALL_BY[optimizer])
    result = run(simulated, seed=0)
    assert ours.loss == pytest.approx(result.learners_loss, rel=0.005)
    assert ours.merged_loss == pytest.approx(result.final.loss, rel=0.005)


def test_data_parallel_is_that_of_the_simulator(simulated: Swarm, optimizer: str) -> None:
    [ours] = train([replace(TRIAL, central=True)], SMALL_BY[optimizer])
    assert ours.loss == pytest.approx(
        train_job(Job("", simulated, 0, central=True)).loss, rel=0.002
    )


def test_a_trial_does_not_depend_on_those_beside_it() -> None:
    short = replace(TRIAL, steps=20, cycle=8, misses=0.3)
    others = [replace(short, seed=1), replace(short, central=True), short]
    *_, beside = train(others, SMALL)
    [alone] = train([short], SMALL)
    assert beside.loss == pytest.approx(alone.loss, rel=1e-4)


def test_functions_of_a_trial_are_those_that_merge() -> None:
    short = replace(TRIAL, steps=16, cycle=8)
    nothing = replace(short, late=lambda late: np.zeros_like(late.moved))
    still = replace(short, outer=lambda part, version: Nesterov(1e-9, 0.0))
    _, *unmoved = train([short, nothing, still], SMALL)
    first = SMALL.evaluate(SMALL.first_values(0))
    assert [one.merged_loss for one in unmoved] == pytest.approx([first, first], rel=1e-3)


def test_work_is_as_late_as_versions_have_passed_since_it_was_merged_last() -> None:
    ages: list[int] = []
    moved: list[float] = []

    def noted(late: Late) -> Float32s:
        ages.append(late.age)
        moved.append(float(np.abs(late.meanwhile).sum()))
        return late.moved

    train([replace(TRIAL, steps=40, cycle=8, misses=0.5, late=noted)], SMALL)
    assert {0, 1, 2} <= set(ages)
    assert [bool(age) for age in ages] == [distance > 0 for distance in moved]


def test_a_slow_member_makes_a_tenth_of_the_steps_and_says_so() -> None:
    claimed: list[list[int]] = []

    def noted(claims: Sequence[Contribution], new: Sequence[int]) -> Sequence[float]:
        claimed.append([claim.steps for claim in claims])
        return as_live_peers(claims, new)

    train([replace(TRIAL, steps=40, cycle=20, fragments=1, slow=1, weights=noted)], SMALL)
    assert claimed == [[20, 20, 2], [20, 20, 2]]


def test_the_weights_of_a_trial_are_those_of_its_merges() -> None:
    short = replace(TRIAL, steps=16, cycle=8)
    [nothing] = train([replace(short, weights=lambda claims, new: [0.0] * len(claims))], SMALL)
    first = SMALL.evaluate(SMALL.first_values(0))
    assert nothing.merged_loss == pytest.approx(first, rel=1e-3)


def test_newcomers_without_a_share_in_their_first_cycle_add_nothing_to_it() -> None:
    trial = replace(
        TRIAL, members=2, steps=16, cycle=8, half_replaced_at=8, measured_cycles=1, rate=0.05
    )
    silent, plain = train(
        [replace(trial, newcomers="silent"), replace(trial, newcomers="plain")], SMALL
    )
    before, after = zip(silent.points, plain.points, strict=True)
    assert before[0] == before[1]
    assert after[0] != after[1]


@pytest.mark.parametrize(("age", "kept"), [(0, 1.0), (1, 0.5), (3, 0.25)])
def test_late_work_is_shortened_as_a_live_peer_does_it(age: int, kept: float) -> None:
    moved = np.ones(3, np.float32)
    assert mean_of_its_cycles(Late(moved, age, moved)).tolist() == [kept] * 3


def test_the_noise_scale_is_the_batch_with_as_much_noise_as_gradient() -> None:
    # A gradient of squared norm 4; each batch of 100 tokens has noise of squared norm 8.
    batches = 5
    small, large = 4 + 8, 4 + 8 / batches
    assert noise_scale([(small, large)] * 2, batches, 100) == pytest.approx(200)
    assert noise_scale([(small, 0.0)], batches, 100) is None, "no gradient above the noise"
    assert noise_scale([], 1, 100) is None

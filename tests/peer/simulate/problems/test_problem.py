"""The problems that simulated swarms train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from peer.simulate.names import PROBLEMS, problem_named, problem_of
from peer.simulate.problems.problem import Places, Problem, Quadratic, layout_of
from peer.simulate.settings import BadExperiment, Swarm


@pytest.fixture(params=PROBLEMS, scope="module")
def problem(request: pytest.FixtureRequest) -> Problem:
    if request.param != "quadratic":
        pytest.importorskip("torch")
    return problem_named(request.param)


def test_the_same_learner_learns_the_same_to_the_last_bit(problem: Problem) -> None:
    results = []
    for _ in range(2):
        learner = problem.learner([3], seed=1)
        learner.train(5)
        results.append(learner.values.copy())
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("changed", [([4], 1), ([3], 2)])
def test_another_peer_or_seed_sees_other_data(
    problem: Problem, changed: tuple[list[int], int]
) -> None:
    learner, other = problem.learner([3], seed=1), problem.learner(changed[0], seed=changed[1])
    other.values[:] = learner.values
    learner.train(2)
    other.train(2)
    assert not np.array_equal(learner.values, other.values)


def test_training_lowers_the_loss_and_the_data_of_more_peers_lowers_it_further(
    problem: Problem,
) -> None:
    alone, together = problem.learner([0], seed=0), problem.learner(range(4), seed=0)
    begun = problem.evaluate(alone.values)
    steps = 60 if isinstance(problem, Quadratic) else 20
    alone.train(steps)
    together.train(steps)
    assert problem.evaluate(together.values) < problem.evaluate(alone.values) < begun


def test_a_rate_of_zero_leaves_the_parameters_alone(problem: Problem) -> None:
    learner = problem.learner([0], seed=0)
    before = learner.values.copy()
    learner.train(3, rate=0.0)
    assert np.array_equal(learner.values, before)


def test_training_continues_from_parameters_that_were_changed_between_steps(
    problem: Problem,
) -> None:
    learner, other = problem.learner([0], seed=0), problem.learner([0], seed=0)
    np.add(learner.values, 1.0, out=learner.values)
    learner.train(1)
    other.train(1)
    assert np.abs(learner.values - other.values).mean() > 0.5


def test_fragments_are_found_in_the_flat_vector_and_put_back(problem: Problem) -> None:
    layout = layout_of(problem, 5)  # some tensors are cut in two
    places = Places(layout, problem.specs)
    values = problem.first_values(0)
    values += np.arange(values.size, dtype=np.float32)
    thetas = [places.read(fragment.index, values) for fragment in layout.fragments]

    assert np.array_equal(places.join(thetas), values)

    changed = values.copy()
    places.add(1, changed, np.ones_like(thetas[1]))
    assert np.array_equal(places.read(1, changed), thetas[1] + 1)
    assert np.array_equal(places.read(0, changed), thetas[0])


def test_many_steps_at_once_are_worth_as_much_as_one_after_the_other() -> None:
    """Without noise: the closed form of gradient descent is gradient descent."""
    problem = Quadratic(noise=0.0)
    at_once, one_by_one = problem.learner([0], seed=0), problem.learner([0], seed=0)
    at_once.train(40)
    for _ in range(40):
        one_by_one.train(1)
    assert np.allclose(at_once.values, one_by_one.values, atol=1e-5)


def test_the_noise_of_many_steps_at_once_spreads_as_far_as_that_of_one_after_the_other() -> None:
    problem = Quadratic(tensors=64, spread=0.0)
    at_once, one_by_one = problem.learner([0], seed=0), problem.learner([0], seed=0)
    at_once.train(200)
    for _ in range(200):
        one_by_one.train(1)
    assert at_once.values.std() == pytest.approx(one_by_one.values.std(), rel=0.05)


def test_a_problem_has_the_optimizer_that_its_experiment_names() -> None:
    pytest.importorskip("torch")
    values = []
    for optimizer in ("adamw", "muon"):
        settings = {"problem.name": "text_gpt", "problem.optimizer": optimizer}
        learner = problem_of(Swarm().with_settings(settings)).learner([0], seed=0)
        learner.train(2)
        values.append(learner.values.copy())
    assert np.abs(values[0] - values[1]).max() > 1e-3


@pytest.mark.parametrize(("optimizer", "setting"), [("adamw", "beta1"), ("muon", "momentum")])
def test_a_problem_has_the_momentum_that_its_experiment_sets(optimizer: str, setting: str) -> None:
    pytest.importorskip("torch")
    from peer.simulate.problems.text_gpt import TextGpt

    settings = {"problem.name": "text_gpt", "problem.optimizer": optimizer}
    chosen = problem_of(Swarm().with_settings({**settings, "problem.momentum": 0.8}))
    assert isinstance(chosen, TextGpt)
    assert getattr(chosen.run(0).inner, setting) == 0.8


def test_a_learner_has_the_same_data_whatever_its_optimizer() -> None:
    pytest.importorskip("torch")
    losses = []
    for changes in ({}, {"problem.optimizer": "muon"}, {"problem.learning_rate": 0.02}):
        settings = {"problem.name": "text_gpt", **changes}
        learner = problem_of(Swarm().with_settings(settings)).learner([3], seed=0)
        losses.append(learner.train(1))  # of the first weights, on the first batch
    assert losses[1:] == losses[:1] * 2


def test_a_problem_has_the_batch_that_its_experiment_sets() -> None:
    pytest.importorskip("torch")
    for name, tokens in (("text_gpt", 3 * 32), ("examples.paper.text_mlp:TextMlp", 3)):
        settings = {"problem.name": name, "problem.batch": 3}
        assert problem_of(Swarm().with_settings(settings)).step_tokens == tokens


def test_a_problem_has_the_size_that_its_experiment_sets() -> None:
    pytest.importorskip("torch")
    shape = {"size": 32, "layers": 2, "length": 16, "device": "cpu"}
    settings = {f"problem.{setting}": value for setting, value in shape.items()}
    problem = problem_of(Swarm().with_settings({"problem.name": "text_gpt", **settings}))
    assert problem.step_tokens == 8 * 16
    names = {spec.name for spec in problem.specs}
    assert any("1" in name for name in names) and not any("2" in name for name in names)
    assert (256, 32) in {spec.shape for spec in problem.specs}


def test_a_problem_learns_the_text_that_its_experiment_names(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("shoal " * 20_000)
    settings = {"problem.name": "text_gpt", "problem.text": f"{tmp_path}/*.txt"}
    problem = problem_of(Swarm().with_settings(settings))
    learner = problem.learner([0], seed=0)
    learner.train(30)
    assert problem.evaluate(learner.values) < 1.5, "one word again and again is soon learned"


def test_a_text_that_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = {"problem.name": "text_gpt", "problem.text": f"{tmp_path}/*.txt"}
    with pytest.raises(BadExperiment, match=r"problem: .*no file in / matches '.*\*.txt'"):
        problem_of(Swarm().with_settings(settings))


def test_a_device_that_is_missing_is_named() -> None:
    pytest.importorskip("torch")
    settings = {"problem.name": "text_gpt", "problem.device": "cuda:7"}
    with pytest.raises(BadExperiment, match="problem: device 'cuda:7' cannot be used here: "):
        problem_of(Swarm().with_settings(settings))


def test_a_learner_in_bf16_learns_as_one_in_fp32() -> None:
    pytest.importorskip("torch")
    losses = []
    for precision in ("fp32", "bf16"):
        settings = {"problem.name": "text_gpt", "problem.precision": precision}
        problem = problem_of(Swarm().with_settings(settings))
        learner = problem.learner([0], seed=0)
        losses.append([learner.train(10) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("compiler_processes")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_learner_on_cuda_learns_as_one_on_the_cpu(optimizer: str) -> None:
    settings = {"problem.name": "text_gpt", "problem.optimizer": optimizer}
    losses = []
    for device in ("cpu", "cuda"):
        chosen = Swarm().with_settings({**settings, "problem.device": device})
        problem = problem_of(chosen)
        learner = problem.learner(range(2), seed=0)
        np.add(learner.values, 0.01, out=learner.values)  # between two steps, as a swarm does
        learner.train(30)
        losses.append(problem.evaluate(learner.values))
    assert losses[0] < 4.5
    assert losses[1] == pytest.approx(losses[0], rel=0.01)

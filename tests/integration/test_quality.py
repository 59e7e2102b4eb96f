"""Four real peers reach the loss of data-parallel training with the same number of tokens.

Each peer is a training loop around ``peer.join`` with an agent and a daemon; the peers exchange 4
bits per parameter once in 24 steps. The reference averages the gradients of all four learners at
every step, with perfect communication; solo is one learner with as many steps as each of them. All
use the same run file, whose learning rate rises and falls within the run, the same first weights,
and the same data for each learner.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.paper.text_mlp import TextMlp
from peer.run_file.reading import parse
from peer.run_file.schedule import learning_rate
from peer.run_file.sections import RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import export
from tests.integration.text_learner import values_of
from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, load, sums_up, tell
from tests.swarms.learners import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SEEDS = tuple(int(seed) for seed in os.environ.get("TEST_SEEDS", "1 2 3").split())
LEARNERS = 4
STEPS = int(os.environ.get("TEST_STEPS", "1200"))
"""Steps of each learner. The claim is about three seeds and 1200 steps."""
PACE_S = 0.1

RUN_TEXT = """\
schema = 1
name = "quality"
random_seed = {random_seed}
seeds = ["{seed}"]

[model]
recipe = "custom"

[data]
recipe = "custom"

[inner]
optimizer = "custom"
learning_rate = 3e-3

[schedule]
shape = "cosine"
warmup_tokens = {warmup_tokens}

[outer]
fragments = 4
steps_per_cycle = 24
codec = "int4"
momentum = 0.7

[rounds]
quorum_deadline_s = 10.0
round_deadline_s = 20.0

[membership]
heartbeat_s = 2.0
expiry_s = 8.0

[end]
tokens = {tokens}
"""
"""A model of 200 000 parameters, with a learning rate and momentum that suit it."""


def run_text(problem: TextMlp, *, seed_address: str, random_seed: int) -> str:
    tokens = LEARNERS * STEPS * problem.step_tokens
    return RUN_TEXT.format(
        random_seed=random_seed,
        seed=seed_address,
        warmup_tokens=tokens // 20,
        tokens=tokens,
    )


def swarm_loss(
    processes: Processes, directory: Path, problem: TextMlp, seed: int
) -> tuple[float, RunFile]:
    """The held-out loss that a swarm reached, and the run."""
    directory.mkdir()
    address = address_of(Swarm(processes, directory).bootstrap())
    text = run_text(problem, seed_address=address, random_seed=seed)
    # All start at once without a state, and one of them founds the run after a while. A founder
    # that trained alone until the others have started would use up much of the small budget.
    learners = [
        Learner(
            processes,
            directory / name,
            module="tests.integration.text_learner",
            environment={"OMP_NUM_THREADS": "1"},
            run=text,
            number=number,
            cache=str(problem.cache),
            found_after_s=20.0,
            scheduled=True,
            drain_s=30.0,
            pace_s=PACE_S,
        )
        for number, name in enumerate(("anna", "boris", "clara", "dora"))
    ]
    ended = [learner.end(timeout_s=240 + 4 * STEPS * PACE_S) for learner in learners]
    assert all(last["finished"] and sums_up(last["fates"]) for last in ended)
    out = directory / "final.safetensors"
    export(CheckpointFolder(learners[0].directory / "outer"), out)
    run = parse(text)
    merged = sum(last["fates"]["merged"] for last in ended)
    merges = [learner.merges() for learner in learners]
    tell(
        f"seed {seed}: steps {[last['steps'] for last in ended]}, merged in "
        f"{[len(rounds) for rounds in merges]} rounds, of the first one's "
        f"{sum(each['contributors'] == LEARNERS for each in merges[0])} with all learners; "
        f"{merged / float(run.end.tokens):.2f} of the tokens merged; {load()}"
    )
    return problem.evaluate(values_of(load_file(out))), run


def loss_alone(problem: TextMlp, run: RunFile, *, peers: Sequence[int]) -> float:
    """Train one learner with the data of these peers and the learning rate of the swarm."""
    learner = problem.learner(peers, seed=run.random_seed)
    for step in range(STEPS):
        tokens = step * LEARNERS * problem.step_tokens
        learner.train(1, rate=learning_rate(run, tokens) / run.inner.learning_rate)
    return problem.evaluate(learner.values)


def test_four_learners_come_within_two_percent_of_data_parallel_training(
    processes: Processes, tmp_path: Path
) -> None:
    problem = TextMlp(cache=tmp_path / "data")
    swarm, reference, solo = [], [], []
    for seed in SEEDS:
        loss, run = swarm_loss(processes, tmp_path / f"seed-{seed}", problem, seed)
        swarm.append(loss)
        reference.append(loss_alone(problem, run, peers=range(LEARNERS)))
        solo.append(loss_alone(problem, run, peers=[0]))
        begun = problem.evaluate(problem.first_values(seed))
        tell(
            f"seed {seed}: swarm {loss:.4f}, data parallel {reference[-1]:.4f}, "
            f"solo {solo[-1]:.4f}, at the start {begun:.4f}"
        )
    means = [statistics.mean(losses) for losses in (swarm, reference, solo)]
    tell(
        f"mean of {len(SEEDS)} seeds: swarm {means[0]:.4f}, data parallel {means[1]:.4f} "
        f"({means[0] / means[1] - 1:+.2%}), solo {means[2]:.4f}"
    )
    assert means[0] <= 1.02 * means[1]
    assert means[0] < means[2]

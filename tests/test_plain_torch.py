"""The loops of ``examples/plain_torch`` with few steps and with an agent without network."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import peer
from peer.trainer.session import Run, join
from tests.peer.agent.lone_agents import AGENT, QUICK

FOLDER = Path(__file__).parents[1] / "examples" / "plain_torch"

Train = Callable[..., tuple[float, Run]]

# torch.compile imports deprecated parts of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("agent_threads"),
]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Runs an example with an agent without network; returns its loss and its run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    runs: list[Run] = []

    def joined(*args: Any, **own: Any) -> Run:
        runs.append(join(*args, **own))
        return runs[-1]

    monkeypatch.setattr(peer, "join", joined, raising=False)

    def call(name: str, *, steps: int = 60, **own: Any) -> tuple[float, Run]:
        loss = importlib.import_module(name).train(
            steps=steps,
            directory=tmp_path / "peer",
            agent_command=AGENT,
            line=QUICK,
            pace_s=0.005,
            **own,
        )
        return loss, runs[-1]

    yield call
    torch.set_num_threads(before)
    for name in ("spirals", *(path.stem for path in FOLDER.glob("*.py"))):
        sys.modules.pop(name, None)


def exchanged(run: Run) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in run._parts.agent._begin.tensors}


def test_several_optimizers_make_one_step_and_follow_one_schedule(train: Train) -> None:
    loss, run = train("several_optimizers")
    assert run.status.steps == 60
    assert run.status.tokens == 60 * 64
    momentum, adam = run._plan.optimizers
    matrices, vectors = (group["lr"] for group in momentum.param_groups)
    assert vectors == pytest.approx(matrices / 5)
    assert matrices / adam.param_groups[0]["lr"] == pytest.approx(0.1 / 3e-3)
    assert loss < 1.09  # the loss of guessing


def test_frozen_parameters_and_buffers_stay_and_tied_ones_are_exchanged_once(train: Train) -> None:
    _, run = train("partly_frozen")
    assert sorted(exchanged(run)) == [
        *("again.bias", "head.bias", "head.weight"),
        *("middle.bias", "middle.weight", "norm.bias", "norm.weight"),
    ]
    assert exchanged(run)["middle.weight"] == (64, 64)
    net: Any = run._plan.model
    assert net.again.weight is net.middle.weight
    assert int(net.norm.num_batches_tracked) == 60


def test_a_compiled_model_is_exchanged_by_the_names_of_the_bare_one(train: Train) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in this process
    _, run = train("compiled", backend="eager")
    assert sorted(exchanged(run)) == sorted(
        f"{n}.{part}" for n in "024" for part in ("weight", "bias")
    )
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == 1, "parameters that the run changed were compiled anew"


def test_steps_of_several_scaled_batches_count_their_tokens(train: Train) -> None:
    _, run = train("mixed_precision")
    assert 40 < run.status.steps <= 60  # the scaler skips steps while it searches for its scale
    assert run.status.tokens == 60 * 64


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_of_the_program_has_model_optimizer_and_position(
    train: Train, tmp_path: Path
) -> None:
    _, first = train("checkpoints", steps=5, folder=tmp_path / "kept")
    assert (tmp_path / "kept" / "model.safetensors").exists()
    for path in (tmp_path / "peer").glob("inner"):
        path.rename(tmp_path / "gone")  # the rest comes from the checkpoint of the program
    _, run = train("checkpoints", steps=3, folder=tmp_path / "kept")
    (adam,) = run._plan.optimizers
    assert {int(state["step"]) for state in adam.state.values()} == {8}
    assert run.peer_id == first.peer_id

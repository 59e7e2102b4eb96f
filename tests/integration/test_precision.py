"""Learners of low precision do not round theta, and learners of all precisions agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import OuterState, export, load_outer
from tests.processes import Processes
from tests.swarms import learner_process
from tests.swarms.commands import Command, sums_up, tell, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FRAGMENTS = 2


def run_text(**settings: Any) -> str:
    return learner_process.text(
        codec="f32", fragments=FRAGMENTS, cycle=8, name="precision", **settings
    )


class Learner(Command):
    """A process of ``custom_learner``."""

    def __init__(self, processes: Processes, directory: Path, **settings: Any) -> None:
        self.directory = directory
        given = {"directory": str(directory), "run": run_text(), **settings}
        super().__init__(processes, [json.dumps(given)], module="tests.integration.custom_learner")

    def seeds(self) -> list[str]:
        ready = self.wait_for_word("ready")
        return [str(ready["link"]).partition("seed=")[2].split("&")[0]]

    def own_rounds(self) -> int:
        lines = [x.partition(" ") for x in self.output.splitlines(keepends=True) if x[-1:] == "\n"]
        events = [json.loads(rest) for word, _, rest in lines if word == "event"]
        return sum(e["event"] == "round" and e["contributed"] for e in events)

    def leave(self) -> dict[str, Any]:
        self.process.terminate()
        return self.end()

    def end(self) -> dict[str, Any]:
        """Wait until it has ended; returns what it says of that."""
        assert self.wait(timeout_s=90) == 0, self.output[-3000:]
        return self.wait_for_word("end")

    def outer(self) -> OuterState:
        """The last checkpoint of its agent."""
        outer = load_outer(CheckpointFolder(self.directory / "outer"))
        assert outer is not None
        return outer

    def theta(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        path = self.directory / "theta.safetensors"
        export(CheckpointFolder(self.directory / "outer"), path)
        return load_file(path)

    def held(self) -> dict[str, torch.Tensor]:
        """The final parameters of its model."""
        held: dict[str, torch.Tensor] = torch.load(self.directory / "held.pt", weights_only=True)
        return held


def rounds_of(learners: list[Learner], count: int) -> None:
    until(lambda: all(learner.own_rounds() >= count for learner in learners), f"{count} rounds")


def test_learners_without_gradients_never_move_theta(processes: Processes, tmp_path: Path) -> None:
    """The founder is fp32, so almost no value of theta is a value of the other two formats."""
    anna = Learner(processes, tmp_path / "anna", frozen=True)
    seeds = anna.seeds()
    boris = Learner(processes, tmp_path / "boris", frozen=True, dtype="bfloat16", seeds=seeds)
    clara = Learner(processes, tmp_path / "clara", frozen=True, dtype="float16", seeds=seeds)
    learners = [anna, boris, clara]
    rounds_of(learners, 10)
    merged = [learner.leave()["fates"]["merged"] for learner in (clara, boris, anna)]
    assert all(tokens > 0 for tokens in merged)
    torch.manual_seed(1)
    founded = torch.nn.Linear(24, 16)
    for learner in learners:
        outer, theta = learner.outer(), learner.theta()
        assert min(state.version for state in outer.states) >= 5
        for name, parameter in founded.named_parameters():
            assert torch.equal(theta[name], parameter.detach()), f"{learner.directory.name}: {name}"
        assert all(not state.momentum.any() for state in outer.states)
    versions = [state.version for state in anna.outer().states]
    tell(f"theta is the founder's to the bit after versions {versions}, fp32 + bf16 + f16")


def test_learners_of_three_precisions_agree(processes: Processes, tmp_path: Path) -> None:
    run = run_text(tokens=6000)
    anna = Learner(processes, tmp_path / "anna", run=run, samples=1)
    others = {"run": run, "seeds": anna.seeds()}
    boris = Learner(processes, tmp_path / "boris", dtype="bfloat16", samples=2, **others)
    clara = Learner(processes, tmp_path / "clara", dtype="float16", samples=3, **others)
    learners = [anna, boris, clara]
    for learner in learners:
        assert sums_up(learner.end()["fates"])
        assert learner.own_rounds() >= 16
    bits: dict[bytes, bytes] = {}
    states = [(x, state) for x in learners for state in x.outer().states]
    for learner, state in states:
        digest = state.digest()
        assert bits.setdefault(state.lineage, digest) == digest, learner.directory.name
    truth = torch.randn(16, 24, generator=torch.Generator().manual_seed(7))
    for learner, epsilon in ((anna, 2.0**-24), (boris, 2.0**-8), (clara, 2.0**-11)):
        theta, held = learner.theta(), learner.held()
        wrong = float((theta["weight"] - truth).norm() / truth.norm())
        apart = float((held["weight"] - theta["weight"]).norm() / theta["weight"].norm())
        tell(f"{learner.directory.name}: theta is {wrong:.4f} off the truth, held {apart:.5f} off")
        # All learn the same map, and a learner's parameters differ from theta only by the rounding
        # of its format and by its last steps.
        assert wrong < 0.25
        assert apart < 0.05 + 2 * epsilon
    assert len(bits) == FRAGMENTS, "the run ended for all of them at the same state"

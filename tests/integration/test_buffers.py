"""Two peers with a BatchNorm end a run: what of their models is the same, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import Processes
from tests.swarms import learner_process
from tests.swarms.learners import Learner, seed_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def ended(processes: Processes, folder: Path, *, buffers: str) -> list[Path]:
    """The models that two peers of a finished run have saved."""
    run = learner_process.text(tokens=12_000, cycle=12, buffers=buffers, name=f"norm-{buffers}")
    learners: list[Learner] = []
    seeds: list[str] = []
    for number, name in enumerate(("anna", "boris")):
        where = folder / name
        learners.append(
            Learner(processes, where, run=run, norm=True, sample_seed=number, seeds=seeds)
        )
        seeds = [seed_of(learners[-1])]
    for learner in learners:
        learner.end(timeout_s=120)
    return [folder / name / "saved.safetensors" for name in ("anna", "boris")]


def test_peers_that_merge_their_buffers_save_the_same_bytes(
    processes: Processes, tmp_path: Path
) -> None:
    anna, boris = ended(processes, tmp_path, buffers="mean")
    assert anna.read_bytes() == boris.read_bytes()
    saved = load_file(anna)
    assert bool((saved["norm.running_var"] > 0).all())
    assert not torch.equal(saved["norm.running_var"], torch.ones(24)), "they were never merged"
    assert int(saved["norm.num_batches_tracked"]) > 100


def test_without_that_the_parameters_are_the_same_and_the_buffers_each_its_own(
    processes: Processes, tmp_path: Path
) -> None:
    anna, boris = (load_file(path) for path in ended(processes, tmp_path, buffers="own"))
    for name in ("weight", "bias", "norm.weight", "norm.bias"):
        assert torch.equal(anna[name], boris[name]), name
    assert not torch.equal(anna["norm.running_mean"], boris["norm.running_mean"])

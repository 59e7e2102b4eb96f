"""``shoal export --average``: the mean of the checkpoints in a peer's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors

from averaging.messages import Link
from peer.extras.export.averages import averaged
from peer.extras.export.card import RunFacts, card
from peer.model.recipes import build_model
from peer.run_file.sections import RunFile, TextData
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer, outer_content
from tests.peer.commands_said import record, said
from tests.peer.extras.export.exported_run import ANNA, RUN, save_run

TEXTS = msgspec.structs.replace(
    RUN, data=TextData(files=["*.txt"], sequence_length=32, held_out=0.3)
)


def outer_folder(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / OUTER)


def newest(folder: Path) -> OuterState:
    outer = load_outer(outer_folder(folder))
    assert outer is not None
    return outer


def save_later(
    outer: OuterState, folder: CheckpointFolder, added: float, *, version: int, lineage: bytes
) -> None:
    """Write a checkpoint that has grown out of another, and so far from its parameters."""
    noise = np.random.default_rng(0)
    states = []
    for state in outer.states:
        link = Link(version, lineage * 32, version)
        far = added * noise.standard_normal(state.theta.size, np.float32)
        theta, chain = state.theta + far, state.chain.extended(link)
        later = replace(state, version=version, lineage=link.lineage, chain=chain, theta=theta)
        states.append(later)
    folder.save(*outer_content(run=outer.run, layout=outer.layout, states=states))


def save_all(folder: Path, steps: Sequence[float], run: RunFile = TEXTS) -> None:
    save_run(folder, run, build_model(run))
    for version, added in enumerate(steps, start=1):
        save_later(
            newest(folder), outer_folder(folder), added, version=version, lineage=bytes([version])
        )
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("A text of a run, quite long. " * 5000)


def test_the_average_is_the_mean_of_the_checkpoints_under_a_name_of_its_own(tmp_path: Path) -> None:
    save_all(tmp_path, [0.1, 0.2])
    outer = newest(tmp_path)
    mean = averaged(outer, outer_folder(tmp_path))
    assert mean is not None and mean.averaged == 3
    again = averaged(outer, outer_folder(tmp_path))
    assert again is not None and mean.model == again.model != outer.model
    moved = np.random.default_rng(0).standard_normal(outer.states[0].theta.size, np.float32)
    first = outer.states[0].theta - np.float32(0.3) * moved
    expected = first + np.float32((0.1 + 0.3) / 3) * moved
    np.testing.assert_allclose(mean.states[0].theta, expected, atol=1e-5)
    assert mean.global_tokens == outer.global_tokens


def test_a_checkpoint_of_another_history_or_a_damaged_one_does_not_count(tmp_path: Path) -> None:
    save_all(tmp_path, [])
    first, folder = newest(tmp_path), outer_folder(tmp_path)
    save_later(first, folder, 0.1, version=2, lineage=b"a")
    assert averaged(newest(tmp_path), folder) is not None
    save_later(first, folder, 0.1, version=1, lineage=b"b")  # after a rollback to the first
    outer = newest(tmp_path)
    mean = averaged(outer, folder)
    assert mean is not None and mean.averaged == 2
    np.testing.assert_allclose(
        mean.states[0].theta, (first.states[0].theta + outer.states[0].theta) / 2, atol=1e-6
    )
    (first.path / "tensors.safetensors").write_bytes(b"")
    assert averaged(outer, CheckpointFolder(folder.folder, reads_only=True)) is None
    assert first.path.exists(), "the peer of the folder may be running"


@pytest.mark.parametrize(
    ("steps", "better"), [([0.3, -0.6], "average"), ([0.6, -0.6], "newest version")]
)
def test_the_better_one_by_held_out_loss_is_written_and_both_losses_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list[float], better: str
) -> None:
    """Two that lie on both sides of the first, or the first again after one that lies far off."""
    save_all(tmp_path / "peer", steps)
    out = tmp_path / "model.safetensors"
    arguments = ["export", str(tmp_path / "peer"), str(out), "--average"]
    found = record(arguments, capsys)
    losses = found["held_out"]
    assert (losses["average"] < losses["newest"]) == (better == "average")
    assert found["averaged"] == (3 if better == "average" else 1)
    assert (found["model"] == newest(tmp_path / "peer").model) == (better == "newest version")
    with safetensors.safe_open(out, "np") as tensors:
        assert tensors.metadata()["shoal_model"] == found["model"]
        assert tensors.metadata().get("shoal_averaged", "1") == str(found["averaged"])
    code, output, _ = said([*arguments, "--force"], capsys)
    assert code == 0
    assert f"newest version {losses['newest']:.4f}, the average of 3 checkpoints" in output
    assert f"the {better} is better, so it is written" in output
    measured = record(["eval", str(tmp_path / "peer")], capsys)
    assert measured["losses"][0]["nats_per_token"] == pytest.approx(losses["newest"])


def test_the_card_says_that_it_is_an_average_and_what_it_gains(tmp_path: Path) -> None:
    save_all(tmp_path, [0.3])
    outer = averaged(newest(tmp_path), outer_folder(tmp_path))
    assert outer is not None
    facts = RunFacts(average_losses=(1.25, 1.5))
    text = card(outer, facts, tokenizer="bytes", dtype="fp32", kind="Llama")
    assert "the average over the last versions, of 2 checkpoints of one peer; held-out loss" in text
    assert "1.2500 nats per token, of the newest version 1.5000 |" in text
    assert "the average over" not in card(
        newest(tmp_path), facts, tokenizer="bytes", dtype="fp32", kind="Llama"
    )


def test_without_held_out_data_the_average_is_written_unmeasured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(tmp_path / "peer", [0.3])
    (tmp_path / "peer" / "data" / "a.txt").unlink()
    out = str(tmp_path / "model.safetensors")
    code, output, errors = said(["export", str(tmp_path / "peer"), out, "--average"], capsys)
    assert code == 0, errors
    assert "this is the average of 2 checkpoints; whether it is better was not measured" in output


def test_with_one_checkpoint_the_newest_parameters_are_written_and_this_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(tmp_path / "peer", [])
    out = str(tmp_path / "model.safetensors")
    code, output, _ = said(["export", str(tmp_path / "peer"), out, "--average"], capsys)
    assert code == 0 and "there is no average: these are the newest parameters" in output


def test_peers_on_line_serve_no_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = f"shoal://{'ab' * 32}?seed=/ip4/127.0.0.1/tcp/9/p2p/{ANNA}"
    code, _, errors = said(["export", link, str(tmp_path / "out"), "--average"], capsys)
    assert code == 2 and "--average needs the folder of a peer of this machine" in errors

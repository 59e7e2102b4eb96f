"""Checks of a machine before it joins."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peer.errors import MachineTooSmall, Unusable
from peer.model.recipes import build_model
from peer.model.recipes.counting import Size
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.trainer import preflight
from peer.trainer.computing import fitting
from peer.trainer.computing.choices import Choices, DeviceFacts
from peer.trainer.computing.fitting import Fit, Goal, Remembered
from peer.trainer.loop import TrainerSettings
from peer.trainer.preflight import Preflight, Room, check_keeper, examine, expected_share
from tests.peer.trainer.recipe_run import TEXT

ON_CPU = TrainerSettings(device="cpu", threads=1)

PACE_S = 20.0
"""Slower than a step of the slowest machine, the first step with all that it imports included."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    return examine(
        parse(TEXT),
        ON_CPU,
        pace_s=PACE_S,
        directory=tmp_path_factory.mktemp("run") / "not" / "there",
    )


def test_the_summary_names_model_data_and_costs(found: Preflight) -> None:
    text = "\n".join(found.lines)
    assert "trainer-test" in text
    assert "CPU" in text
    assert "tokens/s" in text
    assert "nothing from the network is executed" in text
    assert max(map(len, found.lines)) < 160


def test_the_summary_says_where_to_read_about_a_run_and_whom_to_ask(found: Preflight) -> None:
    assert not any(line.startswith("About") for line in found.lines)
    told = "homepage = 'https://example.org'\ncontact = 'anna@example.org'\n"
    seen = replace(found, run=parse(told + TEXT))
    assert seen.lines[1] == "About    https://example.org   contact anna@example.org"


def test_a_gpu_is_named_with_the_choices_and_the_memory_that_they_take(found: Preflight) -> None:
    gpu = DeviceFacts(kind="cuda", name="NVIDIA H100", fast=("bf16",), memory_bytes=80e9)
    choices = Choices(precision="bf16", compile=True, micro_batch=32)
    first = replace(choices, compile=False, micro_batch=4)
    goal = Goal(first=first, choices=choices, room_bytes=60e9)
    new = replace(found, facts=gpu, goal=goal, parameters=124_000_000, step_bytes=15e9)
    assert "NVIDIA H100   bf16, 4 sequences at once to begin with   16.5 GB" in new.lines[2]
    assert "Machine  about " in new.lines[3]
    assert " an hour by a short trial (" in new.lines[4]

    seen = replace(new, goal=replace(goal, known=Fit(choices, 0.01, 15e9)))
    assert "NVIDIA H100   bf16, compiled, 32 sequences at once   16.5 GB of 80 GB" in seen.lines[2]
    assert "about" not in seen.lines[3]
    assert "Network  sends at most " in seen.lines[4]
    assert "trial" not in seen.lines[4]


@pytest.mark.parametrize("known", [False, True])
def test_the_upload_told_before_anything_is_compiled_is_that_of_compiled_code(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = Choices(micro_batch=2, compile=True)
    fit = Fit(choices, 0.19, 1e6)
    first = replace(choices, compile=False)
    goal = Goal(first=first, choices=choices, room_bytes=1e9, known=fit if known else None)
    monkeypatch.setattr(preflight, "begin", lambda *arguments, **rest: (goal, fit))
    seen = examine(parse(TEXT), ON_CPU, pace_s=0.0, directory=tmp_path / "x")
    assert seen.step_time_s == pytest.approx(2 * (0.19 if known else 0.1))


def test_a_device_without_room_for_one_sequence_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "prepare_torch", lambda settings: torch.device("cuda"))
    monkeypatch.setattr(preflight, "free_bytes", lambda d: 1e6 if d.type == "cuda" else 1e12)
    monkeypatch.setattr(preflight, "open_engine", None)
    with pytest.raises(MachineTooSmall, match=r"memory on the device, 1 MB are free; use a larger"):
        examine(parse("[model]\nlayers = 12"), ON_CPU, pace_s=0.0, directory=tmp_path)


def test_a_paced_step_takes_its_pace(found: Preflight) -> None:
    assert found.step_time_s == PACE_S


def test_upload_follows_from_the_model_the_codec_and_the_pace(found: Preflight) -> None:
    # int4 and its scales: between 0.5 and 1 byte a value, each sent at most twice a cycle.
    cycles = 3600 / (24 * PACE_S)
    assert 1.0 <= found.upload_per_hour / (found.parameters * cycles) <= 2.0


def test_a_machine_that_is_too_small_gets_the_shortage_and_a_remedy() -> None:
    fits = Room(memory_needed=2e6, memory_free=2e6, disk_needed=2e3, disk_free=2e3)
    fits.check("tight")
    with pytest.raises(MachineTooSmall, match=r"1 MB are free"):
        replace(fits, memory_free=1e6).check("tight")
    with pytest.raises(MachineTooSmall, match=r"1 kB are free.*--directory"):
        replace(fits, disk_free=1e3).check("tight")


@pytest.mark.parametrize(
    "huge",
    [
        "[model]\nlayers = 512\nwidth = 65536\nheads = 1024",
        # A batch can be divided, but not a sequence.
        "[model]\nlayers = 512\ncontext = 1048576\n[data]\nsequence_length = 1048576\n"
        "[limits]\nstep_tokens_max = 134217728",
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_built(huge: str, tmp_path: Path) -> None:
    with pytest.raises(MachineTooSmall, match="of memory"):
        examine(parse(huge), ON_CPU, pace_s=0.0, directory=tmp_path)


def counted_here(run: RunFile) -> Size:
    """The result of a child that counts (``tests/peer/model/test_counting.py``), without its
    imports."""
    model = build_model(run, weights=False)
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    return Size(sum(p.numel() for p in model.parameters()), buffer_bytes)


def test_buffers_of_a_model_count_beside_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    monkeypatch.setattr(preflight, "size_of", counted_here)
    mask = (
        "{ model_type = 'gpt_neo', vocab_size = 256, hidden_size = 8, num_heads = 2, "
        "num_layers = 1, attention_types = [[['global'], 1]], max_position_embeddings = 10000000 }"
    )
    run = parse(f"[model]\nrecipe = 'hf'\nconfig = {mask}")
    with pytest.raises(MachineTooSmall, match="100 TB of memory"):
        examine(run, ON_CPU, pace_s=0.0, directory=tmp_path)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("[model]\nrecipe = 'custom'", "model"),
        ("[data]\nrecipe = 'custom'", "data"),
        ("[inner]\noptimizer = 'custom'\nlearning_rate = 0.1", "optimizer"),
    ],
)
def test_the_parts_that_a_program_must_bring_are_named(
    section: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(Unusable, match=f"the {what} of run"):
        examine(parse(section), ON_CPU, pace_s=0.0, directory=tmp_path)


def test_a_keeper_is_checked_as_well(tmp_path: Path) -> None:
    check_keeper(parse(TEXT), tmp_path)
    with pytest.raises(MachineTooSmall, match="of memory"):
        check_keeper(parse("[model]\nlayers = 512\nwidth = 65536\nheads = 1024"), tmp_path)


def test_a_peer_twice_as_fast_as_two_others_is_half_of_the_run() -> None:
    assert expected_share(0.5, [1.0, 1.0]) == 0.5
    assert expected_share(0.5, []) == 1.0
    assert expected_share(1.0, [1.0, 0.0]) == 0.5  # one that has not stepped yet


def test_a_measurement_made_while_training_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = Remembered(tmp_path / "measured.json")

    def look() -> Preflight:
        return examine(
            parse(TEXT), ON_CPU, pace_s=0.0, directory=tmp_path / "x", remembered=remembered
        )

    first = look()
    assert first.goal.known is None and first.engine is not None
    assert remembered.get(first.key) is None, "before training there is nothing to remember"
    with first.engine.tuning:
        for _ in range(20):
            first.engine.gradients(torch.randint(0, 256, (2, 17)))
            first.engine.apply()
    assert first.engine.tuning.text is None
    monkeypatch.setattr(fitting, "probe", None)
    again = look()
    assert again.goal.known is not None and again.engine is not None
    assert again.engine.choices == first.engine.choices == again.goal.choices
    with again.engine.tuning:
        assert again.engine.tuning.text is None


def test_looking_writes_nothing(tmp_path: Path) -> None:
    examine(parse(TEXT), ON_CPU, pace_s=0.0, directory=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_returning_peer_needs_no_space_for_the_files_it_has(
    tmp_path: Path, found: Preflight, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(found.room.disk_needed)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "checkpoint").write_bytes(bytes(total // 2))
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=total // 2 + 1))
    check_keeper(parse(TEXT), tmp_path)
    with pytest.raises(MachineTooSmall, match="of disk"):
        check_keeper(parse(TEXT), tmp_path / "another")

"""The built-in loop in the ranks of an island: devices, parts of the batch, and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peer.island.ranks import Work, run_island
from peer.island.training import batch_parts, choose_devices
from peer.trainer.computing.choices import wished_devices
from tests.peer.island import works


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("auto", ("auto",)),
        ("cpu", ("cpu",)),
        ("3", ("cpu:0", "cpu:1", "cpu:2")),
        ("cpu:0,cpu:1", ("cpu:0", "cpu:1")),
    ],
)
def test_devices_on_a_machine_without_accelerators(
    monkeypatch: pytest.MonkeyPatch, text: str, chosen: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_devices(wished_devices(text)) == chosen


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("auto", ("cuda:0", "cuda:2")),
        ("cuda:1", ("cuda:1",)),
        ("2", ("cuda:0", "cuda:1")),
        ("cpu:0,cpu:1", ("cpu:0", "cpu:1")),
        ("cuda:0, cuda:2", ("cuda:0", "cuda:2")),
    ],
)
def test_devices_on_a_machine_with_two_equal_accelerators_and_another(
    monkeypatch: pytest.MonkeyPatch, text: str, chosen: tuple[str, ...]
) -> None:
    names = ("Fast 80 GB", "Slow 8 GB", "Fast 80 GB")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert choose_devices(wished_devices(text)) == chosen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "there are 3 here"),
        ("cuda:0,cuda:3", "--device: device 'cuda:3' cannot be used here: torch finds no"),
        ("cuda:3", "--device: device 'cuda:3' cannot be used here: torch finds no"),
    ],
)
def test_devices_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match=says):
        choose_devices(wished_devices(text))


def test_a_batch_is_divided_as_equally_as_possible() -> None:
    assert batch_parts(16, 2) == (8, 8)
    assert batch_parts(7, 3) == (3, 2, 2)
    assert batch_parts(3, 3) == (1, 1, 1)


@pytest.mark.slow  # each process imports torch
@pytest.mark.parametrize("work", [works.compare_gradients, works.compare_gradients_of_answers])
def test_the_gradient_of_all_ranks_is_that_of_the_whole_batch(tmp_path: Path, work: Work) -> None:
    assert run_island(("cpu:0", "cpu:1"), work, logs=tmp_path, tell=pytest.fail) == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_gradient_of_two_accelerators_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    work = works.compare_gradients
    assert run_island(("cuda:0", "cuda:1"), work, logs=tmp_path, tell=pytest.fail) == 0


@pytest.mark.slow
def test_overlapped_sums_are_those_of_one_operation_also_after_memory_ran_out(
    tmp_path: Path,
) -> None:
    work = works.compare_with_a_sum_at_the_end
    assert run_island(("cpu:0", "cpu:1"), work, logs=tmp_path, tell=pytest.fail) == 0

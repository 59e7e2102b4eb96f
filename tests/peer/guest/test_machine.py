"""The machine's report about its memory and its file systems."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from peer.guest import machine
from peer.guest.machine import VOLATILE, container_processors, file_system, memory_bytes


@pytest.mark.parametrize(("limit", "counts"), [("1000000\n", True), ("max\n", False)])
def test_the_limit_of_a_container_counts_as_its_memory(
    tmp_path: Path, limit: str, counts: bool
) -> None:
    path = tmp_path / "memory.max"
    path.write_text(limit)
    whole = psutil.virtual_memory().total
    assert memory_bytes((path, tmp_path / "missing")) == (1e6 if counts else whole)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no such folder here")
def test_files_in_memory_are_known_by_their_file_system() -> None:
    assert file_system(Path("/dev/shm/some/folder")) in VOLATILE


HERE = len(os.sched_getaffinity(0)) if sys.platform == "linux" else sys.maxsize


@pytest.fixture
def _bound_to_one() -> Iterator[None]:
    if sys.platform != "linux":
        pytest.skip("a process cannot be bound to processors here")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("limit", "processors"),
    [("400000 100000\n", 4), ("150000 100000\n", 2), ("5000 100000\n", 1), ("max 100000\n", None)],
)
def test_the_time_that_a_container_may_use_is_that_of_so_many_processors(
    tmp_path: Path, limit: str, processors: int | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(limit)
    assert container_processors(path) == (processors and min(processors, HERE))
    assert container_processors(tmp_path / "missing") is None


@pytest.mark.usefixtures("_bound_to_one")
def test_a_limit_above_the_processors_that_a_container_is_bound_to_adds_no_threads(
    tmp_path: Path,
) -> None:
    """Torch has a thread for each of those, and had more with the limit than without it."""
    path = tmp_path / "cpu.max"
    path.write_text("400000 100000\n")
    assert container_processors(path) == 1


def degrees(*current: float | None) -> list[Any]:
    return [SimpleNamespace(current=each) for each in current]


@pytest.mark.parametrize(
    ("told", "held"),
    [
        (None, None),
        (SimpleNamespace(percent=40, power_plugged=False), 0.4),
        (SimpleNamespace(percent=40, power_plugged=True), None),
        (SimpleNamespace(percent=40, power_plugged=None), None),  # it does not know
    ],
)
def test_a_battery_counts_while_it_is_used(
    told: object, held: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: told, raising=False)
    assert machine.battery() == held


def test_the_hottest_processor_counts_and_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"coretemp": degrees(61.0, 70.0, None), "nvme": degrees(88.0), "k10temp": degrees(55.0)}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: told, raising=False)
    assert machine.celsius() == 70.0


def test_a_machine_without_sensors_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sensors_battery", "sensors_temperatures"):
        monkeypatch.delattr(psutil, name, raising=False)
    assert machine.battery() is None and machine.celsius() is None

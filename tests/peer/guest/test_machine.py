"""The machine's report about its memory and its file systems."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from peer.guest import machine
from peer.guest.machine import VOLATILE, container_processors, file_system, memory
from tests.processes import Processes
from tests.swarms.commands import until


@pytest.mark.parametrize(("limit", "counts"), [("1000000\n", True), ("max\n", False)])
def test_the_limit_of_a_container_counts_as_its_memory(
    tmp_path: Path, limit: str, counts: bool
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    seen, whole = memory(tmp_path), psutil.virtual_memory().total
    assert seen.total == (1e6 if counts else whole)
    assert not counts or seen.available == 500_000


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


def recorded(**answers: str) -> Callable[[str], str]:
    """Answers of desktops by the program that is asked; nothing of the others."""
    return lambda command: answers.get(command.split()[0], "")


IN_FRONT = "_NET_WM_STATE(ATOM) = _NET_WM_STATE_{}, _NET_WM_STATE_FOCUSED\n"
TREE = """{{ "id": 4, "type": "workspace", "nodes": [
  {{ "id": 7, "type": "con", "nodes": [ ], "fullscreen_mode": {}, "inhibit_idle": {} }} ],
  "floating_nodes": [ ], "fullscreen_mode": 1 }}
"""
ASSERTIONS = """Assertion status system-wide:
   UserIsActive                   1
   PreventUserIdleDisplaySleep    {}
   PreventUserIdleSystemSleep     1
"""


@pytest.mark.parametrize(
    ("program", "free", "taken"),
    [
        ("xprop", IN_FRONT.format("MAXIMIZED_HORZ"), IN_FRONT.format("FULLSCREEN")),
        ("swaymsg", TREE.format(0, "false"), TREE.format(1, "false")),
        ("swaymsg", TREE.format(0, "false"), TREE.format(0, "true")),
        ("busctl", "b false\n", "b true\n"),
        ("pmset", ASSERTIONS.format(0), ASSERTIONS.format(1)),
    ],
)
def test_a_screen_is_taken_when_the_desktop_says_so(program: str, free: str, taken: str) -> None:
    assert not machine.screen_is_taken(recorded(**{program: free}))
    assert machine.screen_is_taken(recorded(**{program: taken}))


def test_where_no_desktop_is_the_screen_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SWAYSOCK", "DBUS_SESSION_BUS_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert not machine.screen_is_taken()


def test_a_desktop_that_does_not_answer_takes_no_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "xprop"
    hangs.write_text("#!/bin/sh\nsleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "SCREEN_TOLD_WITHIN_S", 0.05)
    assert not machine.screen_is_taken()


X_PROGRAMS = ("Xvfb", "openbox", "xterm", "xprop")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, X_PROGRAMS)), reason=f"needs {', '.join(X_PROGRAMS)}")
def test_a_program_that_fills_the_screen_of_an_x_server_is_seen(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = processes.start(["Xvfb", "-displayfd", "1", "-nolisten", "tcp"])
    processes.wait_for_line(server, "", timeout_s=30)
    monkeypatch.setenv("DISPLAY", f":{processes.output_of(server).split()[0]}")
    processes.start(["openbox"])
    assert not machine.screen_is_taken()
    window = processes.start(["xterm", "-fullscreen"])
    until(machine.screen_is_taken, "its window fills the screen", timeout_s=30)
    window.kill()
    until(lambda: not machine.screen_is_taken(), "the screen is free", timeout_s=30)

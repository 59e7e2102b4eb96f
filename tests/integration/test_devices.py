"""``shoal start --device``: one peer of several processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import Processes, descendants
from tests.swarms.commands import Command, run_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Island(Command):
    """``shoal start`` on two devices, which are the processor twice."""

    def __init__(self, processes: Processes, folder: Path, *options: str) -> None:
        text = run_text(layers=2, batch_size=5, fragments=2, cycle=10)
        (folder / "run.toml").write_text(text)
        arguments = [
            *("start", str(folder / "run.toml"), "--plain", "--page", "off", "--yes"),
            *("--device", "cpu:0,cpu:1", "--directory", str(folder / "peer"), *options),
        ]
        environment = {"OMP_NUM_THREADS": "1", "XDG_DATA_HOME": str(folder / "home")}
        super().__init__(processes, arguments, environment=environment)

    def until(self, condition: str, count: int = 1) -> None:
        while self.output.count(condition) < count:
            assert self.process.poll() is None, self.output
            time.sleep(0.1)

    def ranks(self) -> list[psutil.Process]:
        """The processes of both ranks, rank 0 first: it alone has children."""
        mine = psutil.Process(self.process.pid).children()
        found = [child for child in mine if "spawn_main" in " ".join(child.cmdline())]
        return sorted(found, key=lambda child: not child.children())


def test_all_steps_of_two_processes_are_those_of_one_peer(
    processes: Processes, tmp_path: Path
) -> None:
    island = Island(processes, tmp_path, "--steps", "30")
    assert island.wait(timeout_s=120) == 0, island.output
    assert "Device   2 x CPU" in island.output
    assert "left the run: 30 steps" in island.output
    assert "tokens: 4.8 k trained" in island.output, "30 steps of 5 sequences of 32 tokens"


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_rank_is_killed_all_start_again(
    processes: Processes, tmp_path: Path, rank: int
) -> None:
    island = Island(processes, tmp_path)
    island.until("in the run")
    island.until("step ")
    island.ranks()[rank].send_signal(signal.SIGKILL)
    island.until("was lost; starting again on cpu:0, cpu:1")
    island.until("in the run", 2)
    island.until("step ", 2)
    os.kill(island.process.pid, signal.SIGTERM)
    assert island.wait(timeout_s=120) == 130, island.output
    assert "left the run" in island.output
    assert not descendants(island.process.pid)


def test_a_rank_that_cannot_get_into_the_run_says_why(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "notes.txt").write_text("mine")
    island = Island(processes, tmp_path)
    assert island.wait(timeout_s=120) == 2
    assert "notes.txt" in island.output
    assert [entry.name for entry in (tmp_path / "peer").iterdir()] == ["notes.txt"]

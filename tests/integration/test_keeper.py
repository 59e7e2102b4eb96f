"""A run survives without learners as long as a keeper has its state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peer.guest.enforcement import read_limits
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import load_outer
from tests.processes import Processes
from tests.swarms.commands import Swarm, run_text, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_newcomer_gets_the_run_from_a_keeper_when_all_learners_are_gone(
    processes: Processes, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(cycle=8))
    home = tmp_path / "keeper"
    keeper = swarm.keep(home, anna.link(), options=("--relay-bulk", "2M"))
    assert read_limits(home).relay_bytes_s == 2e6
    link = keeper.wait_for(lambda r: r.get("event") == "link", "the keeper's link")["link"]
    folder = CheckpointFolder(home / "outer")

    def kept() -> int:
        outer = load_outer(folder)
        return 0 if outer is None else min(state.version for state in outer.states)

    until(lambda: kept() >= 1, "a version is kept", timeout_s=120)
    anna.kill()
    shutil.rmtree(anna.directory)
    at_least = kept()

    boris = swarm.join("boris", link)
    boris.ready()
    until(lambda: boris.progress().get("steps", 0) > 0, "boris trains")
    assert min(boris.progress()["versions"]) >= at_least
    assert "founding" not in [r["name"] for r in boris.records("phase")]
    keeper.stop()
    assert keeper.wait() == 130
    boris.stop()
    boris.end()

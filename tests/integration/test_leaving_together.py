"""Real peers whose owners end them at the same moment keep one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import load_outer
from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of, run_text, sums_up, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PEERS = 3


def test_peers_that_leave_at_the_same_moment_keep_one_model(
    processes: Processes, tmp_path: Path
) -> None:
    """Of five peers three kept other models than the last, without 177 tokens of its work."""
    swarm = Swarm(processes, tmp_path)
    seed = address_of(swarm.bootstrap())
    link = swarm.start("peer-0", run_text(seed), pace_s=0.2).link()
    for number in range(1, PEERS):
        swarm.join(f"peer-{number}", link, pace_s=0.2)
    for learner in swarm.learners:
        learner.wait_for(
            lambda each: each.get("event") == "round" and each["contributors"] == PEERS,
            "a round of all",
        )

    ended = swarm.end()

    assert all(sums_up(last["fates"]) for last in ended), ended
    tell(f"pending: {[last['fates']['pending'] for last in ended]}")
    kept = [load_outer(CheckpointFolder(each.directory / "outer")) for each in swarm.learners]
    lineages = {tuple(state.lineage for state in outer.states) for outer in kept if outer}
    assert None not in kept and len(lineages) == 1

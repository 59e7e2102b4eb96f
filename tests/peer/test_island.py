"""Several processes as one learner: DDP and FSDP2 over gloo, real processes, no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.peer.trainer.custom_run import toml
from tests.processes import RANKS_ALONE, Processes


@pytest.mark.slow  # three processes; what a rank does is tested in tests/peer/island
def test_every_rank_gets_its_part_of_every_unit_and_gives_it(
    processes: Processes, tmp_path: Path
) -> None:
    """Three ranks, so that some parts are smaller than others and some are empty."""
    settings = {"run": toml(), "directory": str(tmp_path), "size": 3}
    ranks = processes.python(
        "-m", "tests.peer.island_pieces", json.dumps(settings), environment=RANKS_ALONE
    )
    code = ranks.wait(timeout=250)
    output = processes.output_of(ranks)
    assert (code, output.count("right\n")) == (0, 3), output[-3000:]

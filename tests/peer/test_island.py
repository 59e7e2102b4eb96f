"""Several processes as one learner: DDP and FSDP2 over gloo, real processes, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.peer.island_rank import ALONE
from tests.peer.trainer.custom_run import toml
from tests.processes import Processes


def test_every_rank_gets_its_part_of_every_unit_and_gives_it(
    processes: Processes, tmp_path: Path
) -> None:
    """Three ranks, so that some parts are smaller than others and some are empty."""
    settings: dict[str, Any] = {"run": toml(), "directory": str(tmp_path), "size": 3}
    ranks = [
        processes.python(
            "-m",
            "tests.peer.island_pieces",
            json.dumps(settings | {"rank": rank}),
            environment=ALONE,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        assert rank.wait(timeout=250) == 0, processes.output_of(rank)[-3000:]
        assert "right" in processes.output_of(rank)

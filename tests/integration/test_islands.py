"""Islands under torchrun, with an agent without network: ranks stay equal or report why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes
from tests.swarms import learner_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RUN_TEXT = learner_process.text(name="lone", fragments=3, cycle=5)


class Island:
    """Two ranks of ``tests.peer.island_rank``."""

    def __init__(self, processes: Processes, directory: Path, environment: dict[str, str]) -> None:
        self._processes = processes
        self._directory = directory
        self._environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Otherwise restarted ranks find the addresses of the ranks that died.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environment,
        }
        self.output = ""

    def train(self, way: str, *, restarts: int = 0, **settings: Any) -> list[dict[str, Any]]:
        """The final reports of both ranks, rank 0 first; nothing if the island failed."""
        settings |= {"way": way, "run": RUN_TEXT, "directory": str(self._directory / "peer")}
        island = self._processes.python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", str(restarts), "-m", "tests.peer.island_rank"),
            json.dumps(settings),
            environment=self._environment,
        )
        code = island.wait(timeout=200)
        self.output = self._processes.output_of(island)
        lines = [line for line in self.output.splitlines() if line.startswith('{"rank"')]
        return [] if code else sorted(map(json.loads, lines), key=lambda said: said["rank"])


def test_all_ranks_rest_and_measure_together(processes: Processes, tmp_path: Path) -> None:
    island = Island(processes, tmp_path, {"LONE_AGENT_ROUNDS": "6", "LONE_AGENT_RESTS_S": "1.5"})
    said = island.train("fsdp2")
    assert len(said) == 2, island.output[-3000:]
    lead, other = said
    assert lead["measured"] == other["measured"] != []
    assert min(lead["longest_s"], other["longest_s"]) >= 1.0
    assert lead["values"] == other["values"]


def test_a_rank_that_cannot_measure_says_so(processes: Processes, tmp_path: Path) -> None:
    island = Island(processes, tmp_path, {})
    assert not island.train("fsdp2", measures_at=0)
    assert "call run.measure_with(...) in every rank" in island.output


def test_ranks_with_different_models_say_so(processes: Processes, tmp_path: Path) -> None:
    island = Island(processes, tmp_path, {})
    assert not island.train("fsdp2", different=True)
    assert "the ranks have models with other parameters" in island.output


def test_a_refusal_at_rank_0_ends_all_ranks_with_the_reason(
    processes: Processes, tmp_path: Path
) -> None:
    island = Island(processes, tmp_path, {"LONE_AGENT_ENDS_WITH": "4"})
    assert not island.train("ddp")
    assert "rank 0 said: RunUnreachable" in island.output
    assert "it does not like you" in island.output

"""The agent as a process: its memory, its link, and the page that it serves."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dht import addresses
from peer.joining.link import parse_link
from tests.processes import Processes, free_port
from tests.swarms.commands import until
from tests.swarms.learners import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def anna(processes: Processes, tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(processes, tmp_path / "anna", name="anna", sample_seed=1)
    learner.ready()
    yield learner
    learner.stop()
    learner.end()


def test_a_link_outlives_a_restart_and_a_taken_port_is_told(
    processes: Processes, tmp_path: Path
) -> None:
    def once() -> Learner:
        learner = Learner(processes, tmp_path / "anna", name="anna", sample_seed=1)
        learner.ready()
        learner.stop()
        learner.end()
        return learner

    link = once().ready()["link"]
    assert once().ready()["link"] == link
    port = addresses.port_of(parse_link(link).seeds[0])
    with socket.create_server(("127.0.0.1", port)):
        third = once()
    assert third.ready()["link"] != link
    assert [e["port"] for e in third.events("port_taken")] == [port]


def test_an_agent_and_its_daemon_take_no_torch_and_little_memory(anna: Learner) -> None:
    until(lambda: anna.last()["step"] >= 40, "some steps")
    agent = psutil.Process(anna.last()["agent"])
    maps = [m.path for m in agent.memory_maps()]
    assert agent.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert agent.environ()["OMP_NUM_THREADS"] == "1"
    family = [agent, *agent.children(recursive=True)]
    used = sum(process.memory_full_info().pss for process in family)
    # The model has 400 values, so this is the cost of imports and of an idle agent.
    assert used < 450e6, f"{used / 1e6:.0f} MB, maps {len(maps)}"


def test_the_local_page_shows_the_status(processes: Processes, tmp_path: Path) -> None:
    page = f"127.0.0.1:{free_port()}"
    learner = Learner(processes, tmp_path / "anna", name="anna", sample_seed=1, page=page)
    learner.ready()

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://{page}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    assert json.loads(read("/readyz"))["ready"]
    assert "shoal_peers 1.0" in read("/metrics")
    assert re.search(r'shoal_table_entries\{table="work seen"\} \d', read("/metrics"))
    learner.stop()
    learner.end()

"""A real agent whose network does not start: the trainer gets the reason, or a new agent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import Identity
from peer.bridge.agent_process import AgentProcess, LineSettings
from peer.bridge.messages import Begin, FromAgent, Happened, Over, Phase
from peer.bridge.settings import PeerSettings
from peer.bridge.shared_memory import SharedTensors
from peer.description import tensors_of
from peer.run_file.reading import parse
from peer.views.event_log import read_events
from tests.processes import descendants
from tests.swarms import learner_process
from tests.swarms.commands import until


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that is in use, so that a daemon cannot listen on it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def agent_at(
    taken: socket.socket,
    directory: Path,
    heard: list[FromAgent],
    died: Callable[[int, float], None] = lambda code, pause_s: None,
) -> AgentProcess:
    Identity.load_or_create(directory / "identity.key")
    run = parse(learner_process.text())
    layout = Layout.build([TensorSpec("w", (4,), "float32")], run.outer.fragments)
    begin = Begin(
        run=run.canonical(),
        directory=str(directory),
        settings=PeerSettings(
            name="anna",
            listen=(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",),
            page=None,
        ),
        tensors=tensors_of(layout),
        found_after_s=0.0,
        started_at=time.time(),
        earlier_tokens=0,
        ended_cleanly=True,
    )
    memory = SharedTensors.create(
        [fragment.size for fragment in layout.fragments],
        layout=layout.hash,
        incarnation=1,
        coarse=False,
    )
    return AgentProcess(
        begin,
        memory,
        log_path=directory / "agent.log",
        hear=heard.append,
        died=died,
        settings=LineSettings(restart_first_s=0.05, restart_max_s=0.2, end_patience_s=5.0),
    )


def test_a_port_in_use_is_reported_when_a_peer_starts(taken: socket.socket, tmp_path: Path) -> None:
    heard: list[FromAgent] = []
    line = agent_at(taken, tmp_path, heard)
    line.start()
    assert line.join(60)
    assert isinstance(heard[-1], Over)
    assert "libp2p daemon" in heard[-1].reason
    assert heard[-1].exit_code == 3


@pytest.mark.slow  # three agents; peer/bridge/test_agent_process.py shows that one is restarted
def test_a_trainer_that_works_gets_a_new_agent_however_often_its_network_fails(
    taken: socket.socket, tmp_path: Path
) -> None:
    """Found by a chaos run: the daemon of a new agent was killed as it started."""
    heard: list[FromAgent] = []
    codes: list[int] = []
    line = agent_at(taken, tmp_path, heard, lambda code, pause_s: codes.append(code))
    line.restarts = 1
    line.start()
    until(lambda: len(codes) > 1, "two agents that ended")
    taken.close()
    until(
        lambda: any(isinstance(said, Phase) and said.name == "founding" for said in heard),
        "an agent that gets on",
    )
    line.send(Happened("way_found", {"text": "fp32, 4 sequences at once"}))
    until(
        lambda: any(
            event["event"] == "way_found" and event["text"] == "fp32, 4 sequences at once"
            for event in read_events(tmp_path / "events.jsonl")
        ),
        "the trainer's event in the log",
    )
    line.stop()
    assert line.join(60)
    assert set(codes) == {3}
    assert not any(isinstance(said, Over) and said.exit_code for said in heard)
    assert not descendants(os.getpid())

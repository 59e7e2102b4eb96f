"""The trainer's end of the line: an agent that keeps dying, hangs, or does not listen."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec

from peer.bridge.agent_process import AgentProcess, LineSettings
from peer.bridge.messages import Beat, FromAgent
from peer.bridge.shared_memory import SharedTensors
from peer.description import Described
from peer.processes import child_environment
from tests.peer.bridge.example_messages import BEGIN
from tests.processes import descendants, killed_beside_its_child


def test_the_agent_gets_no_accelerator_and_one_thread() -> None:
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": "/x", "A": "b"})
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["A"] == "b"
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/x"


def test_an_agent_that_keeps_dying_is_restarted_ever_less_often(tmp_path: Path) -> None:
    memory = SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False)
    died: list[tuple[int, float]] = []
    heard: list[FromAgent] = []
    line = AgentProcess(
        BEGIN,
        memory,
        log_path=tmp_path / "agent.log",
        hear=heard.append,
        died=lambda code, pause_s: died.append((code, pause_s)),
        settings=LineSettings(beat_s=0.05, restart_first_s=0.01, restart_max_s=0.04),
        command=(sys.executable, "-S", "-c", "raise SystemExit(7)"),
    )
    line.start()
    deadline = time.monotonic() + 60
    while len(died) < 4 and time.monotonic() < deadline:
        line.ring()  # harmless, whether or not somebody lives
        line.send(Beat())
        time.sleep(0.01)
    line.stop()
    assert line.join(60)
    assert [code for code, _ in died[:4]] == [7, 7, 7, 7]
    assert [pause for _, pause in died[:4]] == [0.01, 0.02, 0.04, 0.04]
    assert not heard
    assert not descendants(os.getpid())


def test_a_trainer_with_thousands_of_open_files_keeps_its_agent(tmp_path: Path) -> None:
    """``select`` takes no descriptor above 1023: the thread died, and no agent followed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    died: list[int] = []
    try:
        line = AgentProcess(
            BEGIN,
            SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False),
            log_path=tmp_path / "agent.log",
            hear=lambda message: None,
            died=lambda code, pause_s: died.append(code),
            settings=LineSettings(beat_s=0.05, restart_first_s=0.01, restart_max_s=0.04),
            command=(sys.executable, "-S", "-c", "raise SystemExit(7)"),
        )
        line.start()
        deadline = time.monotonic() + 60
        while len(died) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        line.stop()
        assert line.join(60)
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert died[:2] == [7, 7]


FORKS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from peer.bridge.agent_process import AgentProcess
from peer.bridge.shared_memory import SharedTensors
from tests.peer.bridge.example_messages import BEGIN
agent = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))" + chr(10)
agent += "while s.recv(4096): pass" + chr(10) + f"open({sys.argv[1]!r}, 'w').close()"
line = AgentProcess(
    BEGIN,
    SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False),
    log_path=Path(os.devnull),
    hear=lambda message: None,
    command=(sys.executable, "-S", "-c", agent),
)
line.start()
while not line.alive:
    time.sleep(0.01)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_agent_hears_that_its_trainer_was_killed_though_a_forked_child_lives_on(
    tmp_path: Path,
) -> None:
    """Workers of torch's ``DataLoader`` are such children. They had copies of the line."""
    heard = tmp_path / "heard"
    with killed_beside_its_child(FORKS, heard):
        deadline = time.monotonic() + 20
        while not heard.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard.exists()


def test_of_an_agent_that_has_ended_no_open_file_is_left(tmp_path: Path) -> None:
    """Each run of a program left two."""

    def start_and_stop() -> AgentProcess:
        line = AgentProcess(
            BEGIN,
            memory,
            log_path=tmp_path / "agent.log",
            hear=lambda message: None,
            command=(sys.executable, "-S", "-c", "raise SystemExit(7)"),
        )
        line.start()
        line.stop()
        assert line.join(60)
        line.send(Beat())  # nobody hears it
        return line

    memory = SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False)
    ended = [start_and_stop()]
    before = len(list(Path("/dev/fd").iterdir()))
    ended += [start_and_stop() for _ in range(3)]
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_stopping_ends_an_agent_that_does_not_listen(tmp_path: Path) -> None:
    memory = SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False)
    line = AgentProcess(
        BEGIN,
        memory,
        log_path=tmp_path / "agent.log",
        hear=lambda message: None,
        command=(sys.executable, "-S", "-c", "import time; time.sleep(600)"),
        settings=LineSettings(beat_s=0.05, end_patience_s=0.2),
    )
    line.start()
    deadline = time.monotonic() + 60
    while not line.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert line.alive
    line.leave(0.1)
    assert line.join(60)
    assert not descendants(os.getpid())


def test_an_agent_that_does_not_read_a_large_layout_is_ended_and_replaced(tmp_path: Path) -> None:
    """Earlier, such an agent lived on, beside the next one."""
    memory = SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False)
    tensors = tuple(Described(f"layers.{i}.attention.weight", (2, 3)) for i in range(20000))
    died: list[int] = []
    line = AgentProcess(
        msgspec.structs.replace(BEGIN, tensors=tensors),
        memory,
        log_path=tmp_path / "agent.log",
        hear=lambda message: None,
        died=lambda code, pause_s: died.append(code),
        command=(sys.executable, "-S", "-c", "import time; time.sleep(600)"),
        settings=LineSettings(beat_s=0.05, silence_max_s=0.2, end_patience_s=0.2),
    )
    line.start()
    deadline = time.monotonic() + 60
    while not died and time.monotonic() < deadline:
        time.sleep(0.01)
    line.stop()
    assert line.join(60)
    assert died[0] == -signal.SIGKILL
    assert not descendants(os.getpid())

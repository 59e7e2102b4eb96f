"""The line between trainer and agent: framing, and an agent that keeps dying."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.bridge import agent_link
from peer.bridge.agent_link import (
    AgentProcess,
    Beat,
    Begin,
    Facts,
    FromAgent,
    FromTrainer,
    Happened,
    Leave,
    LineBroken,
    LineSettings,
    Measure,
    Measured,
    Over,
    Phase,
    Tensor,
    agent_environment,
    pack,
)
from peer.bridge.shared_memory import SharedTensors
from tests.processes import descendants

BEGIN = Begin(
    run=b"{}",
    seeds=("/ip4/127.0.0.1/tcp/1",),
    directory="/somewhere",
    identity="/somewhere/key",
    name="calm-otter",
    tensors=(Tensor("w", (2, 3), "float32"),),
    embeddings=(),
    heads=(),
    listen=(),
    announce=(),
    found_after_s=None,
    page=None,
    started_at=0.0,
    earlier_tokens=0,
    ended_cleanly=True,
)
FROM_TRAINER: list[FromTrainer] = [
    BEGIN,
    Beat(),
    Leave(3.5),
    Measured(version=3, loss=2.5, sequences=7),
]
FROM_AGENT: list[FromAgent] = [
    Beat(),
    Phase(name="fetching", text="downloading", done=0.5),
    Facts(
        peer_id="p",
        link="shoal://x",
        merged_tokens=4,
        global_tokens=5,
        versions=(1, 2),
        peers=2,
        held_out_loss=None,
        fates={"processed": 5.0},
        rounds=1,
        rounds_missed=0,
        bytes_sent=1,
        bytes_received=2,
        synchronous=False,
    ),
    Happened("round", {"members": ["a", "b"], "seconds": 0.5, "reason": None, "contributed": True}),
    Measure(4),
    Over("left", 0, finished=False),
]


@given(st.integers(1, 9))
def test_messages_survive_however_the_stream_is_cut(size: int) -> None:
    stream = b"".join(pack(message) for message in (*FROM_TRAINER, *FROM_AGENT))
    frames = agent_link._Frames()
    found: list[bytes] = []
    for start in range(0, len(stream), size):
        found += frames.feed(stream[start : start + size])
    trainers, agents = found[: len(FROM_TRAINER)], found[len(FROM_TRAINER) :]
    assert [agent_link._from_trainer.decode(frame) for frame in trainers] == FROM_TRAINER
    assert [agent_link._from_agent.decode(frame) for frame in agents] == FROM_AGENT


def test_a_torn_stream_is_noticed_before_anything_is_allocated() -> None:
    with pytest.raises(LineBroken, match="announced"):
        agent_link._Frames().feed(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.DecodeError):
        agent_link._from_agent.decode(pack(BEGIN)[4:])


def test_the_agent_gets_no_accelerator_and_one_thread() -> None:
    environment = agent_environment({"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": "/x", "A": "b"})
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


def test_an_agent_that_does_not_take_a_large_layout_is_ended_and_replaced(tmp_path: Path) -> None:
    """It used to live on, beside the next one."""
    memory = SharedTensors.create([4], layout=bytes(32), incarnation=1, coarse=False)
    tensors = tuple(Tensor(f"layers.{i}.attention.weight", (2, 3), "float32") for i in range(20000))
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

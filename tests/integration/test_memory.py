"""Issue C, 4: agent and daemon take at most 3.5 fp32 models and 450 MB, replay log included.

Proportional set size: what is shared with the trainer (the slots) or between the two agents (the
libraries) counts in parts.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from peer.lab.commands import family
from peer.model.recipes import build_model
from peer.run_file.reading import parse
from tests.integration.swarm_processes import Learner, Swarm, load, run_text, tell
from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MODELS = 3.5
BESIDES_BYTES = 450e6

LARGE = {"layers": 16, "width": 512, "sequence_length": 16, "batch_size": 1}
"""51 M parameters."""
SMALL = {"layers": 6, "width": 256, "sequence_length": 16, "batch_size": 1}
"""5 M: here it is the fixed part that counts."""
CYCLES = 8
"""More than the replay log holds."""


def agent_and_daemon(learner: Learner) -> list[psutil.Process]:
    found = []
    for process in family(learner.process)[1:]:
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "peer.agent" in command or "p2pd" in command:
            found.append(process)
    return found


def pss_bytes(processes: list[psutil.Process]) -> dict[str, int]:
    """By process; one that ended meanwhile has none."""
    sizes = {}
    for process in processes:
        try:
            name = "agent" if "python" in process.name() else process.name()
            sizes[name] = int(process.memory_full_info().pss)
        except psutil.Error:
            continue
    return sizes


@pytest.mark.parametrize(
    ("shape", "codec"),
    [
        pytest.param(LARGE, "int4", id="51M-int4"),
        pytest.param(LARGE, "f32", id="51M-f32"),
        pytest.param(SMALL, "int4", id="5M-int4"),
    ],
)
def test_agent_and_daemon_take_at_most_so_much(
    processes: Processes, tmp_path: Path, shape: dict[str, int], codec: str
) -> None:
    # A step of the large one takes a second or more: nobody comes at once when called.
    deadlines = {"quorum_deadline_s": 60.0, "round_deadline_s": 120.0}
    text = run_text(**shape, codec=codec, cycle=8, **deadlines)
    model = build_model(parse(text))
    model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    del model
    limit = MODELS * model_bytes + BESIDES_BYTES

    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", text)
    learners = [anna, swarm.join("boris", anna.link())]
    most: dict[str, tuple[int, dict[str, int]]] = {}
    merged, deadline = 0, time.monotonic() + 300
    while merged < CYCLES and time.monotonic() < deadline:
        for learner in learners:
            sizes = pss_bytes(agent_and_daemon(learner))
            total = sum(sizes.values())
            if total > most.get(learner.name, (0, {}))[0]:
                most[learner.name] = (total, sizes)
        versions = [min(x.progress().get("versions") or [0]) for x in learners]
        merged = min(versions)
        time.sleep(1.0)
    for name, (total, sizes) in most.items():
        parts = ", ".join(f"{part} {size / 1e6:.0f} MB" for part, size in sizes.items())
        tell(
            f"{codec}, {name}: at most {total / 1e6:.0f} MB ({parts}); the limit is "
            f"{limit / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB; "
            f"{merged} versions; {load()}"
        )
    for learner in learners:
        learner.kill()
    assert merged >= 2, "hardly anything was merged"
    for name, (total, sizes) in most.items():
        assert total <= limit, f"{name}: {sizes}"

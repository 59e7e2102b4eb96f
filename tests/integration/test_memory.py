"""Agent and daemon take at most the memory of 3.5 fp32 models and 450 MB, replay log included.

Where numba is installed, compiled codecs take up to 220 MB more.

Memory is the proportional set size: pages shared with the trainer (the slots) or between agents
(the libraries) count in parts.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from averaging.live.compiling import COMPILE_FROM_VALUES, can_compile
from peer.model.recipes import build_model
from peer.processes import family
from peer.run_file.reading import parse
from tests.processes import Processes
from tests.swarms.commands import Learner, Swarm, load, run_text, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MODELS = 3.5
BESIDES_BYTES = 450e6
COMPILED_BYTES = 220e6

LARGE = {"layers": 16, "width": 512, "sequence_length": 16, "batch_size": 1}
"""A model of 51 M parameters."""
SMALL = {"layers": 6, "width": 256, "sequence_length": 16, "batch_size": 1}
"""A model of 5 M parameters, where the fixed part of the memory dominates."""
CYCLES = 8
"""Number of versions that is larger than the replay log."""


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
    """Memory of each process; a process that has ended is left out."""
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
def test_agent_and_daemon_stay_below_their_memory_limit(
    processes: Processes, tmp_path: Path, shape: dict[str, int], codec: str
) -> None:
    # A step of the large model takes a second or more, so peers join rounds late.
    deadlines = {"quorum_deadline_s": 60.0, "round_deadline_s": 120.0}
    text = run_text(**shape, codec=codec, cycle=8, **deadlines)
    model = build_model(parse(text))
    model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    del model
    compiles = can_compile() and model_bytes >= 4 * COMPILE_FROM_VALUES
    limit = MODELS * model_bytes + BESIDES_BYTES + (COMPILED_BYTES if compiles else 0)

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
    assert merged >= 2, "too few rounds were merged"
    for name, (total, sizes) in most.items():
        assert total <= limit, f"{name}: {sizes}"

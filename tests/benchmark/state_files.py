"""Measures outer steps on states in files: ``python -m tests.benchmark.state_files [FOLDER]``.

The ways take turns. Before each step with files all pages are let go, as between two rounds of a
large model. A round does what 'prepared' does: pages are made ready before the step begins, which
is counted by itself. Give a folder in memory (``/dev/shm``) to see what is not the disk's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from averaging.live.buffers import Arena
from averaging.live.state_files import StateFiles, StateMemory
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.outer import Nesterov, step

TURNS = 8
WARM_UPS = 2
VALUES = 4_000_000


def measure(folder: Path, values: int, turns: int = TURNS) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each step by the clock, and of the processor, by way."""
    few = StateFiles(folder, least_bytes=1, unused_max=0)
    again = StateFiles(folder, least_bytes=1, resident_max_bytes=64 * values)
    prepared = StateFiles(folder, least_bytes=1, resident_max_bytes=64 * values)
    ways: dict[str, StateMemory] = {
        "memory": Arena(16 * values),
        "new file": few,
        "file used again": again,
        "prepared": prepared,
    }
    delta, scratch = np.ones(values, np.float32), Scratch()
    states = {name: [memory.floats(values) for _ in range(2)] for name, memory in ways.items()}
    for vector in (each for vectors in states.values() for each in vectors):
        vector.fill(1.0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*ways, "preparing")}
    for _ in range(WARM_UPS + turns):
        for name, memory in ways.items():
            vectors = states[name]
            if isinstance(memory, StateFiles):
                memory.let_go()
            if memory is prepared:
                found["preparing"].append(_time(partial(prepared._prepare, *vectors)))
            found[name].append(_time(partial(_step, vectors, memory, delta, scratch)))
            if memory is few:
                few._close(0)
    return {name: times[-turns:] for name, times in found.items()}


def _step(vectors: list[Float32s], memory: StateMemory, delta: Float32s, scratch: Scratch) -> None:
    theta, momentum = vectors
    vectors[0] = memory.floats(theta.size)
    step(theta, momentum, delta, Nesterov(0.8, 0.5), scratch=scratch, into=vectors[0])


def _time(work: Callable[[], None]) -> tuple[float, float]:
    begin, processor = time.perf_counter(), time.thread_time()
    work()
    return 1e3 * (time.perf_counter() - begin), 1e3 * (time.thread_time() - processor)


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    lines = [
        f"{'way':<18}{'ms, least':>10}{'median':>8}{'most':>8}{'processor':>11}{'relative':>10}"
    ]
    usual = statistics.median(each[1] for each in found["memory"])
    for name, times in found.items():
        clock = [each[0] for each in times]
        processor = statistics.median(each[1] for each in times)
        lines.append(
            f"{name:<18}{min(clock):>8.1f}{statistics.median(clock):>8.1f}{max(clock):>8.1f}"
            f"{processor:>11.1f}{processor / usual:>10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure(Path(*sys.argv[1:2]), VALUES)))

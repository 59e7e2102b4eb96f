"""Processor time of outer steps on files: ``python -m tests.benchmark.state_files [FOLDER]``.

Three ways take turns: in memory; on pages that are mapped from files, with a new file for theta and
momentum written where it is; and in memory from mapped sources, with both vectors written to new
files, as rounds do it. All pages are let go before each step, as between two rounds of a large
model. Files that nobody uses are closed after it, which does not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from averaging.live.state_files import StateFiles
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.outer import Nesterov, step

VALUES = 4_200_000
"""Of a fragment, of which 24 have 10^8."""
TURNS = 15


def measure(folder: Path, values: int = VALUES, turns: int = TURNS) -> dict[str, list[float]]:
    """Milliseconds of each step, by way."""
    files, scratch = StateFiles(folder, least_bytes=1, spare_bytes=0), Scratch()
    delta, optimizer = np.full(values, 0.1, np.float32), Nesterov(1.0, 0.5)
    spare = np.ones(values, np.float32), np.ones(values, np.float32)

    def memory(theta: Float32s, momentum: Float32s) -> tuple[Float32s, ...]:
        step(theta, momentum, delta, optimizer, scratch=scratch, into=spare[0])
        return theta, momentum

    def mapped(theta: Float32s, momentum: Float32s) -> tuple[Float32s, ...]:
        new = files.floats(values)
        step(theta, momentum, delta, optimizer, scratch=scratch, into=new)
        return new, momentum

    def written(theta: Float32s, momentum: Float32s) -> tuple[Float32s, ...]:
        np.copyto(spare[1], momentum)
        step(theta, spare[1], delta, optimizer, scratch=scratch, into=spare[0])
        return files.kept(spare)

    ways: dict[str, Callable[[Float32s, Float32s], tuple[Float32s, ...]]] = {
        "memory": memory,
        "mapped": mapped,
        "written": written,
    }
    ones = np.ones(values, np.float32)
    states = {
        "memory": (ones.copy(), ones.copy()),
        "mapped": (files.floats(values), files.floats(values)),
        "written": files.kept((ones, ones)),
    }
    for vector in states["mapped"]:
        vector.fill(1.0)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, work in ways.items():
            files.let_go()
            begin = time.process_time()
            states[way] = work(*states[way])
            found[way].append(1e3 * (time.process_time() - begin))
            files._close_returned()
    return found


if __name__ == "__main__":
    for way, times in measure(Path(*sys.argv[1:2])).items():
        least, middle = min(times), statistics.median(times)
        print(f"{way:<8} least {least:5.1f}  median {middle:5.1f} ms of the processor")

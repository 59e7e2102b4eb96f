"""Needs of a larger run in as many regions, from measured overheads and this machine's codecs.

The codecs and the copy of this machine's memory are timed; everything else is calculated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import UNIT_MAX_VALUES
from peer.quantities import bytes_text, count_text
from peer.run_file.sections import RunFile
from peer.trainer.needs import needs_of
from tests.benchmark.regions.figures import Row

STATE_BYTES = 8
"""Bytes of one value's state, which a newcomer downloads: theta and momentum in f32."""

REPETITIONS = 5
LINES_GBIT = (2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """Needs of one region."""

    parameters: int
    regions: int
    cycle_gb: float
    """Sent in a cycle, and received, with the measured overhead."""
    overhead: float
    shortest_cycle_s: dict[float, float]
    """Least duration of a cycle that a line carries, by Gbit/s."""
    download_s: dict[float, float]
    """Download of the state by a newcomer, by Gbit/s."""
    agent_gb: float
    codec_s: float
    """Time of one core for the codecs of a whole cycle."""


def extrapolate(run: RunFile, regions: int, rows: Sequence[Row]) -> Extrapolation:
    """The needs of ``run``; the overhead on the wire is the median of the rows.

    Rounds that some members missed send less than was predicted: there it counts as none.
    """
    needs = needs_of(run)
    overhead = max(0.0, statistics.median(each.off for each in rows))
    cycle = needs.cycle_bytes * (regions - 1) / regions * (1 + overhead)
    return Extrapolation(
        parameters=needs.parameters,
        regions=regions,
        cycle_gb=cycle / 1e9,
        overhead=overhead,
        shortest_cycle_s={line: 8 * cycle / (line * 1e9) for line in LINES_GBIT},
        download_s={line: 8 * STATE_BYTES * needs.parameters / (line * 1e9) for line in LINES_GBIT},
        agent_gb=needs.agent_bytes / 1e9,
        codec_s=codec_seconds_per_value(*run.outer.codecs) * needs.parameters,
    )


def codec_seconds_per_value(up: str, down: str) -> float:
    """Time of one core for what a member does with each value of a cycle.

    It encodes its work, decodes its share of all members' work, and decodes what all reducers made.
    Encoding the mean of its share is not counted: with several members it is a small part.
    """
    encoding_s, decoding_up_s = _seconds_per_value(up)
    _, decoding_down_s = _seconds_per_value(down)
    return encoding_s + decoding_up_s + decoding_down_s


def _seconds_per_value(name: str) -> tuple[float, float]:
    """Time of encoding a value, and of decoding it."""
    codec, scratch = codec_named(name), Scratch()
    sizes = (UNIT_MAX_VALUES,) * 4
    values = np.random.default_rng(0).standard_normal(sum(sizes), dtype=np.float32)
    encoded = bytearray(codec.encoded_size(sizes))
    encoding_s = _quickest(lambda: codec.encode(values, sizes, encoded, scratch))
    decoding_s = _quickest(lambda: codec.decode(encoded, sizes, values, scratch))
    return encoding_s / sum(sizes), decoding_s / sum(sizes)


def _quickest(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best


def text(found: Extrapolation) -> str:
    """The needs as lines of text."""
    return "\n".join(
        [
            f"{count_text(found.parameters)} parameters in {found.regions} regions:",
            f"  {found.cycle_gb:.2f} GB each way in a cycle, {found.overhead:+.0%} of overhead as "
            "measured above",
            *(
                f"  a line of {line:g} Gbit/s carries a cycle of {seconds:.0f} s or more; a "
                f"newcomer's download takes {found.download_s[line]:.0f} s"
                for line, seconds in found.shortest_cycle_s.items()
            ),
            f"  {bytes_text(1e9 * found.agent_gb)} of memory for the agent",
            f"  {found.codec_s:.0f} s of one core for the codecs of a cycle",
        ]
    )

"""Measures the codecs on one core: GB of fp32 values per second of this thread's CPU time.

CPU time leaves out other processes, but these still share the memory bandwidth.

``python -m tests.benchmark.codec_speed`` compares the compiled codecs with numpy's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil

from averaging.numbers.codec import Addends, Scratch
from averaging.numbers.codecs import codec_named, codec_names
from averaging.numbers.layout import UNIT_MAX_VALUES, Kind
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov, Step, step_encoded

MERGED = 4
"""Number of contributions in the measured merges."""

RULES = ("mean", "centered_clip")


@dataclass(frozen=True, slots=True)
class Speed:
    """GB of fp32 per second, the best of all repetitions."""

    codec: str
    what: str
    gb_per_s: float


def measure(*, values: int = 8 * UNIT_MAX_VALUES, repetitions: int = 5) -> list[Speed]:
    """Measure every codec on one fragment of whole units."""
    sizes = (UNIT_MAX_VALUES,) * max(1, values // UNIT_MAX_VALUES)
    return [speed for name in codec_names() for speed in _measure(name, sizes, repetitions)]


def _measure(name: str, sizes: tuple[int, ...], repetitions: int) -> Iterator[Speed]:
    rng = np.random.default_rng(0)
    count = sum(sizes)
    base = rng.standard_normal(count, dtype=np.float32)
    moved = base + np.float32(0.01) * rng.standard_normal(count, dtype=np.float32)
    delta = base - moved
    theta, momentum, sink = base.copy(), np.zeros_like(base), np.zeros_like(base)
    kinds: list[Kind] = ["matrix" for _ in sizes]
    scratch = Scratch()
    codec = codec_named(name)
    encoded = bytearray(codec.encoded_size(sizes))
    out = bytearray(len(encoded))
    codec.encode(delta, sizes, encoded, scratch)

    def merge(rule: str) -> None:
        given = Addends([encoded] * MERGED, [1 / MERGED] * MERGED)
        merge_encoded(rule_named(rule), codec, given, Units(sizes, kinds), out, scratch)

    def outer_step() -> None:
        made = Step(theta, theta, momentum)
        step_encoded(made, codec, encoded, sizes, Nesterov(0.7, 0.9), scratch)

    works: dict[str, Callable[[], None]] = {
        "encode": lambda: codec.encode(delta, sizes, out, scratch),
        "encode difference": lambda: codec.encode(moved, sizes, out, scratch, base=base),
        "check": lambda: codec.check(encoded, sizes, scratch),
        "decode": lambda: codec.decode(encoded, sizes, sink, scratch),
        "decode and add": lambda: codec.decode_add(encoded, sizes, 0.3, sink, scratch),
        "outer step": outer_step,
        **{f"{rule} of {MERGED}": partial(merge, rule) for rule in RULES},
    }
    for what, work in works.items():
        # The size of a merge is that of all its inputs.
        handled = base.nbytes * (MERGED if isinstance(work, partial) else 1)
        work_s = min(_seconds(work) for _ in range(repetitions))
        yield Speed(name, what, handled / work_s / 1e9)


def _seconds(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def main() -> None:
    process, began = psutil.Process(), time.process_time()
    before = process.memory_full_info().pss
    from peer.extras.compiled import codecs

    codecs.check()
    more = process.memory_full_info().pss - before
    print(f"loading takes {time.process_time() - began:.1f} CPU s and {more / 1e6:.0f} MB")
    rows: dict[tuple[str, str], list[float]] = {}
    for _ in range(2):
        for change in (codecs.give_back, codecs.take):
            change()
            for speed in measure(values=8 * UNIT_MAX_VALUES, repetitions=5):
                rows.setdefault((speed.codec, speed.what), []).append(speed.gb_per_s)
    print(f"{'codec':6} {'what':18} {'numpy':>6} {'compiled':>8}  GB/s of fp32")
    for (codec, what), speeds in rows.items():
        numpys, compiled = max(speeds[::2]), max(speeds[1::2])
        print(f"{codec:6} {what:18} {numpys:6.1f} {compiled:8.1f}  {compiled / numpys:4.1f} x")


if __name__ == "__main__":
    main()

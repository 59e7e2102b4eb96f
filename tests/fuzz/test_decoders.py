"""Every decoder reads or refuses whatever a stranger sends, within bounded memory and time."""

from __future__ import annotations

import asyncio
import os
import random
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from tests.fuzz.inputs import hostile
from tests.fuzz.targets import TARGETS, Target

ONCE_FAILING = Path(__file__).parent / "once_failing"
INPUTS = 150
"""Inputs for each target in every run of the tests."""

SOAK_INPUTS = int(os.environ.get("SHOAL_FUZZ_INPUTS", "10_000_000"))
SLOW_S = 1.0
GROWN_MAX_BYTES = 256 << 20


def feed(name: str, target: Target, data: bytes) -> bool:
    """Decode an input. Says whether it was read; a bug names the input."""
    began = time.process_time()
    try:
        read = target.decode(data)
    except target.error:
        return False
    except Exception as error:
        raise AssertionError(f"{name} failed on {data.hex()}") from error
    finally:
        took_s = time.process_time() - began
        assert took_s < SLOW_S, f"{name} took {took_s:.1f} s for {data.hex()}"
    if target.written is not None:
        assert bytes(target.written(read)) == data, f"{name}: {data.hex()} is read as {read!r}"
    return True


def fuzz(name: str, target: Target, inputs: int, seed: int) -> int:
    """Feed hostile inputs. Returns how many of them were read."""
    rng = random.Random(f"{name} {seed}")

    async def work() -> int:  # frames need a loop
        return sum(
            feed(name, target, hostile(rng.choice(target.examples), rng)) for _ in range(inputs)
        )

    return asyncio.run(work())


@pytest.mark.parametrize("name", TARGETS)
def test_examples_are_read_and_hostile_inputs_are_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples:
        asyncio.run(_feed_one(name, target, example))
    read = fuzz(name, target, INPUTS, seed=0)
    assert not target.error or read < INPUTS, "nothing is refused: the inputs are not hostile"


async def _feed_one(name: str, target: Target, data: bytes) -> None:
    assert feed(name, target, data), f"{name} refuses its example"


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.values])
def test_what_is_written_is_read_as_what_it_was(name: str) -> None:
    target = TARGETS[name]
    for value, example in zip(target.values, target.examples, strict=True):
        assert target.decode(example) == value


BOMBS = (
    *(b"\x91" * 14_000, b"\x81\xa1k" * 5_000),
    *(kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
)
"""Nesting beyond any limit, and announced lengths of 4 GB."""
BOMB_MAX_BYTES = 4 << 20
BOUNDED_ELSEWHERE = ("port_mapping",)
"""Decoders of a datagram."""


@pytest.mark.parametrize("name", TARGETS)
def test_deep_nesting_and_announced_lengths_cost_nothing(name: str) -> None:
    target = TARGETS[name]

    async def work() -> None:
        if target.error and name not in BOUNDED_ELSEWHERE:
            assert not feed(name, target, bytes(1 << 20)), "a megabyte of nothing is read"
        for example in target.examples[:2]:
            for begin in (0, 1, 2, 5, len(example) // 2):
                for bomb in BOMBS:
                    feed(name, target, example[:begin] + bomb)

    tracemalloc.start()
    try:
        asyncio.run(work())
        assert tracemalloc.get_traced_memory()[1] < BOMB_MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", sorted(ONCE_FAILING.iterdir()), ids=lambda path: path.stem)
def test_inputs_that_failed_once_are_refused(path: Path) -> None:
    name = path.stem.partition("-")[0]
    data = path.read_bytes()

    async def work() -> None:
        feed(name, TARGETS[name], data)

    asyncio.run(work())


@pytest.mark.soak
def test_ten_million_hostile_inputs_are_read_or_refused() -> None:
    process = psutil.Process()
    each = SOAK_INPUTS // len(TARGETS) + 1
    grown = []
    for name, target in TARGETS.items():
        before = process.memory_info().rss
        fuzz(name, target, each, seed=1)
        grown.append((process.memory_info().rss - before, name))
    assert sum(size for size, _ in grown) < GROWN_MAX_BYTES, sorted(grown)[-5:]

"""Every decoder reads or refuses whatever a stranger sends, within bounded memory and time."""

from __future__ import annotations

import asyncio
import os
import random
import time
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

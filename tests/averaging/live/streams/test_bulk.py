"""Turns of the transfers on a slow line."""

from __future__ import annotations

import asyncio

import pytest

from averaging.live.streams.bulk import FIRST, LATER_S, SMALL_BYTES, WAIT_MAX_S, Uplink

SPEED = 125_000.0
SECOND = int(SPEED)
"""Bytes that the line carries in a second."""


class Line:
    """Transfers over one line, and when each began to be sent."""

    def __init__(self, speed: float = SPEED) -> None:
        self.uplink = Uplink(lambda: speed)
        self.began: dict[str, float] = {}

    async def carry(
        self, name: str, *, since: float = 0.0, size: int = SECOND, takes_s: float | None = None
    ) -> None:
        async with self.uplink.turn(size, since=since):
            self.began[name] = asyncio.get_running_loop().time()
            await asyncio.sleep(size / SPEED if takes_s is None else takes_s)


async def test_on_a_slow_line_replays_go_first_and_then_the_oldest_round() -> None:
    line = Line()
    async with asyncio.TaskGroup() as tasks:
        for name, since in (("a", 5.0), ("b", 7.0), ("c", 6.0), ("d", 6.0), ("replay", FIRST)):
            tasks.create_task(line.carry(name, since=since))
    # The first one has begun when the others come.
    assert line.began == {"a": 0.0, "replay": 1.0, "c": 2.0, "d": 3.0, "b": 4.0}


@pytest.mark.parametrize(("speed", "size"), [(0.0, SECOND), (SPEED, SMALL_BYTES)])
async def test_a_line_that_is_not_slow_is_shared_and_small_transfers_wait_for_nobody(
    speed: float, size: int
) -> None:
    line = Line(speed)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(line.carry("large"))
        tasks.create_task(line.carry("other", size=size))
    assert line.began == {"large": 0.0, "other": 0.0}


async def test_a_transfer_that_waits_for_its_receiver_lets_the_next_one_in() -> None:
    line = Line()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(line.carry("stuck", takes_s=20.0))
        tasks.create_task(line.carry("next"))
        tasks.create_task(line.carry("last"))
    lapsed_s = 2.0 + LATER_S
    assert line.began == {"stuck": 0.0, "next": lapsed_s, "last": lapsed_s + 1.0}


async def test_no_transfer_waits_for_so_long_that_its_receiver_gives_up() -> None:
    line = Line()
    async with asyncio.TaskGroup() as tasks:
        for number in range(12):
            tasks.create_task(line.carry(f"older {number}", since=1.0))
        tasks.create_task(line.carry("newest", since=2.0))
    assert line.began["newest"] == WAIT_MAX_S


async def test_a_sender_that_gives_up_while_it_waits_or_sends_leaves_the_line_to_the_next() -> None:
    line = Line()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(line.carry("sending", size=10 * SECOND))
        waiting = tasks.create_task(line.carry("waiting"))
        tasks.create_task(line.carry("last"))
        await asyncio.sleep(0.25)
        waiting.cancel()
        await asyncio.sleep(0.25)
        sending.cancel()
    assert line.began == {"sending": 0.0, "last": 0.5}

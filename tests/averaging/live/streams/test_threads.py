"""Work beside the loop that says how far it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from averaging.live.streams.threads import SMALL_BYTES, Threads, threads_for
from dht.memory.virtual_loop import run as run_virtually


def count(say: Callable[[int], None]) -> int:
    for number in range(100):
        say(number)
    return threading.get_ident()


async def told_in(loop_thread: int, size: int = SMALL_BYTES + 1) -> tuple[list[int], int]:
    threads = Threads(2)
    told: list[int] = []

    def tell(number: int) -> None:
        assert threading.get_ident() == loop_thread
        told.append(number)

    worker = await threads.run_telling(size, count, tell=tell)
    threads.close()
    return told, worker


def test_reports_of_work_arrive_in_the_loop_and_in_order_before_it_returns() -> None:
    here = threading.get_ident()
    told, worker = asyncio.run(told_in(here))
    assert told == list(range(100))
    assert worker != here


def test_work_on_a_few_bytes_is_done_in_the_loop() -> None:
    here = threading.get_ident()
    told, worker = asyncio.run(told_in(here, SMALL_BYTES))
    assert told == list(range(100))
    assert worker == here


def test_on_the_virtual_loop_it_is_told_where_it_is_said() -> None:
    here = threading.get_ident()
    assert run_virtually(told_in(here), seed=1) == (list(range(100)), here)


def test_half_of_the_processors_crunch_numbers_and_two_at_most() -> None:
    found = {processors: threads_for(processors) for processors in (1, 2, 3, 4, 64)}
    assert found == {1: 1, 2: 1, 3: 1, 4: 2, 64: 2}

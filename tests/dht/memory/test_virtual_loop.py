"""asyncio on virtual time is strict: nothing hangs, nothing is left over, nothing is real."""

from __future__ import annotations

import asyncio
import time

import pytest

from dht.memory.virtual_loop import (
    Deadlock,
    LeftoverTasks,
    RealInputOutput,
    TimeIsOver,
    VirtualLoop,
    run,
    running_loop,
)


def test_an_hour_costs_a_millisecond() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.process_time()
    assert run(main()) == 3600
    assert time.process_time() - started < 1


def test_timers_and_events_of_the_heap_run_in_one_order() -> None:
    async def main() -> list[str]:
        ran: list[str] = []
        loop = running_loop()
        loop.heap.call_at(2.0, ran.append, "event at 2")
        loop.call_later(1.0, ran.append, "timer at 1")
        loop.call_later(3.0, ran.append, "timer at 3")
        loop.heap.call_at(2.5, lambda: loop.call_soon(ran.append, "soon after 2.5"))
        loop.heap.call_at(4.0, ran.append, "event at 4")
        await asyncio.sleep(3.5)
        return ran

    assert run(main()) == ["timer at 1", "event at 2", "soon after 2.5", "timer at 3"]


def test_a_timeout_expires_at_its_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 5.0


def test_a_deadlock_raises_and_says_who_waits_and_where() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"wait_for_godot.*test_virtual_loop\.py:\d+"):
        run(wait_for_godot())


def test_main_that_never_ends_raises_although_something_always_happens() -> None:
    async def main() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(10)

    with pytest.raises(TimeIsOver, match="it is 100 s"):
        run(main(), time_max_s=100)


def test_tasks_left_over_are_an_error_and_are_cancelled() -> None:
    ended: list[str] = []

    async def stay() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(stay(), name="the one who stays")
        await asyncio.sleep(1)
        assert not task.done()

    with pytest.raises(LeftoverTasks, match="the one who stays"):
        run(main())
    assert ended == ["cancelled"]


def test_an_exception_that_nobody_retrieves_is_raised_in_the_end() -> None:
    async def fail() -> None:
        raise KeyError("forgotten")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert caught.value.subgroup(KeyError)


def test_an_exception_of_main_comes_out_as_it_is() -> None:
    async def main() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        run(main())


def test_sockets_processes_and_signals_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RealInputOutput):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(RealInputOutput):
            await asyncio.create_subprocess_exec("true")
        with pytest.raises(RealInputOutput):
            loop.add_signal_handler(2, print)

    run(main())


def test_work_for_an_executor_runs_at_once_and_its_errors_come_back() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(lambda: 6 * 7) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 // 0)

    run(main())


def test_sets_of_tasks_have_the_same_order_every_time() -> None:
    def order() -> list[str]:
        async def main() -> list[str]:
            async def work(number: int) -> None:
                await asyncio.sleep(number % 3)

            tasks = {asyncio.create_task(work(number)) for number in range(50)}
            names = [task.get_name() for task in tasks]
            done, _ = await asyncio.wait(tasks)
            return names + [task.get_name() for task in done]

        return run(main())

    assert order() == order()


def test_only_a_virtual_loop_can_run_a_memory_network() -> None:
    async def main() -> None:
        running_loop()

    with pytest.raises(RuntimeError, match=r"use dht\.memory\.host\.run"):
        asyncio.run(main())
    assert issubclass(VirtualLoop, asyncio.BaseEventLoop)

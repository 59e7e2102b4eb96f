"""Real hosts on the loopback interface, for tests that need the daemon itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from multiaddr import Multiaddr

from dht.identity import Identity
from dht.libp2p.hivemind_host import HivemindHost, HostSettings

T = TypeVar("T")

WAIT_S = 30.0
"""Deadline of operations that take milliseconds on an idle machine."""

ANYWHERE = Multiaddr("/ip4/127.0.0.1/tcp/0")
LOOPBACK = HostSettings(listen=(ANYWHERE,), port_mapping=False, watch_period_s=0.2)


def identity(number: int) -> Identity:
    """The identity of a number, always the same, and so is its position in the directory."""
    return Identity.from_seed(number.to_bytes(32, "big"))


def run(scenario: Coroutine[Any, Any, T], *, timeout_s: float = 100.0) -> T:
    """Run a scenario to its end; fails if it leaves tasks behind."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            result = await scenario
        await _assert_no_tasks_are_left()
        return result

    return asyncio.run(bounded())


async def _assert_no_tasks_are_left() -> None:
    await asyncio.sleep(0)  # let cancelled tasks end
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"tasks were left behind: {left}"


@asynccontextmanager
async def hosts(*settings: HostSettings | int, first: int = 1) -> AsyncIterator[list[HivemindHost]]:
    """Open hosts with these settings (or a number of plain hosts), all connected to the first."""
    wanted: list[HostSettings] = []
    for item in settings:
        wanted += [LOOPBACK] * item if isinstance(item, int) else [item]
    async with AsyncExitStack() as stack:
        opened = await asyncio.gather(
            *(HivemindHost.open(identity(first + i), s) for i, s in enumerate(wanted))
        )
        for host in opened:
            stack.push_async_callback(host.close)
        seed = await opened[0].addresses()
        for host in opened[1:]:
            await host.connect(opened[0].peer_id, seed, timeout_s=WAIT_S)
        yield list(opened)


class Pair:
    """Two plain hosts for several tests: a daemon takes 0.4 s of a processor to start.

    The second one has connected to the first. Each test has protocols and keys of its own.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._open = AsyncExitStack()
        self._hosts: list[HivemindHost] = []

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._hosts = self._runner.run(self._open.enter_async_context(hosts(2)))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()

    async def _close(self) -> None:
        await self._open.aclose()
        await _assert_no_tasks_are_left()

    def run(
        self,
        scenario: Callable[[HivemindHost, HivemindHost], Coroutine[Any, Any, T]],
        *,
        timeout_s: float = 100.0,
    ) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await scenario(*self._hosts)

        for host in self._hosts:
            host.keeper.rejected.clear()
        return self._runner.run(bounded())


def dial_out_only(*, relays: tuple[Multiaddr, ...] = ()) -> HostSettings:
    """A host that can be dialled only through these relays."""
    return replace(LOOPBACK, listen=(), relays=relays, serve_directory=False)


async def until(condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> float:
    """Poll until a condition holds; returns the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < timeout_s, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.01)
    return loop.time() - began

"""Where the contract suite runs: in memory on virtual time, and on real daemons on loopback."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import uvloop
from multiaddr import Multiaddr

from dht.host import Host
from dht.identity import Identity
from dht.memory import MemoryNetwork, Weather, identity_of
from dht.memory import run as run_virtually

T = TypeVar("T")

NEAR = Weather(latency_s=(0.0005, 0.002))
"""Much like loopback, so that the suite's timeouts fit both worlds."""


class World(Protocol):
    """Makes hosts for one test, and closes them."""

    name: str

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a test. Raises an ``ExceptionGroup`` when a bug was reported to the loop."""
        ...

    async def host(self, name: str) -> Host:
        """A new host, known to nobody."""
        ...

    def identity(self, name: str) -> Identity:
        """The key of the host of this name."""
        ...


class MemoryWorld:
    name = "memory"

    def __init__(self) -> None:
        self.network: MemoryNetwork

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        hosts: list[Host] = []
        self._hosts = hosts

        async def whole() -> T:
            self.network = MemoryNetwork(NEAR)
            try:
                return await main()
            finally:
                for host in hosts:
                    await host.close()

        return run_virtually(whole(), seed=1)

    async def host(self, name: str) -> Host:
        host = self.network.host(name)
        self._hosts.append(host)
        return host

    def identity(self, name: str) -> Identity:
        return identity_of(name)


class HivemindWorld:
    name = "hivemind"

    def __init__(self) -> None:
        self._worlds = itertools.count()

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._hosts: list[Host] = []
        reported: list[Exception] = []

        def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            reported.append(
                error if isinstance(error, Exception) else RuntimeError(context["message"])
            )

        async def whole() -> T:
            asyncio.get_running_loop().set_exception_handler(note)
            try:
                return await main()
            finally:
                await asyncio.gather(*(host.close() for host in self._hosts))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(whole())
        if reported:
            raise ExceptionGroup("reported to the event loop", reported)
        return result

    async def host(self, name: str) -> Host:
        from dht.hivemind_daemon import DaemonSettings
        from dht.hivemind_host import HivemindHost, HostSettings

        daemon = DaemonSettings(
            listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),), reachability="public", port_mapping=False
        )
        host = await HivemindHost.open(self.identity(name), HostSettings(daemon=daemon))
        self._hosts.append(host)
        return host

    def identity(self, name: str) -> Identity:
        return identity_of(name)

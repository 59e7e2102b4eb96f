"""Environments of the contract suite: in memory on virtual time, and real daemons on loopback."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import uvloop

from dht.host import Host, Stream
from dht.identity import Identity, PeerId
from dht.libp2p.lane.connection import LaneSettings
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.network import Weather
from dht.memory.virtual_loop import run as run_virtually

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

NEAR = Weather(latency_s=(0.0005, 0.002))
"""Latency similar to loopback, so that the timeouts of the suite fit both worlds."""


def essential(test: F) -> F:
    """Mark a test that runs by default on real daemons as well, where others are ``slow``."""
    test.essential = True  # type: ignore[attr-defined]
    return test


class World(Protocol):
    """Makes hosts for one test, and closes them."""

    name: str

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        """Run a test. Raises an ``ExceptionGroup`` when a bug was reported to the loop."""
        ...

    async def host(self, name: str) -> Host:
        """A new host that no other host knows."""
        ...

    def identity(self, name: str) -> Identity:
        """The key of the host of this name."""
        ...


class MemoryWorld:
    name = "memory"

    def __init__(self) -> None:
        self.network: MemoryNetwork

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        hosts: list[Host] = []
        self._hosts = hosts

        async def whole() -> T:
            self.network = MemoryNetwork(NEAR)
            try:
                return await test
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
    lane: LaneSettings | None = None

    def __init__(self) -> None:
        self._worlds = itertools.count()

    def run(self, test: Coroutine[Any, Any, T]) -> T:
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
                return await test
            finally:
                await asyncio.gather(*(host.close() for host in self._hosts))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(whole())
        if reported:
            raise ExceptionGroup("reported to the event loop", reported)
        return result

    async def host(self, name: str) -> Host:
        from dht.libp2p.hivemind_host import HivemindHost, HostSettings

        settings = HostSettings(is_bootstrap=True, port_mapping=False, lane=self.lane)
        host = await HivemindHost.open(self.identity(name), settings)
        self._hosts.append(host)
        return host

    def identity(self, name: str) -> Identity:
        return identity_of(name)


class LaneWorld(HivemindWorld):
    """Every stream that can be opened at all goes over the lane."""

    name = "lane"
    lane = LaneSettings(wait_s=10.0, per_peer_max=16)

    async def host(self, name: str) -> Host:
        from dht.libp2p.hivemind_host import HivemindHost

        host = await super().host(name)
        assert isinstance(host, HivemindHost)
        by_daemon = host.open_stream

        async def open_stream(
            peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
        ) -> Stream:
            assert host.lane is not None
            before = host.lane.counters["streams_opened"]
            stream = await by_daemon(peer, protocol, timeout_s=timeout_s, bulk=True)
            assert host.lane.counters["streams_opened"] > before
            return stream

        host.open_stream = open_stream
        return host

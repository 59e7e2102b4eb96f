"""Transports on the in-memory network, and what they were told: for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from averaging.live.streams.bulk import Bulk, TransportSettings
from averaging.live.streams.links import Transport
from dht.host import Host, Messaging
from dht.identity import PeerId, RunId

RUN = RunId("test-run")


@dataclass(eq=False)
class Linked:
    """A transport and everything it reported."""

    host: Messaging
    transport: Transport
    heard: list[tuple[PeerId, bytes]] = field(default_factory=list)
    lost: list[tuple[PeerId, str]] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def said(self) -> list[bytes]:
        return [message for _, message in self.heard]


BulkHandler = Callable[[Bulk, bytes], Awaitable[None]]


async def _refuse_all(bulk: Bulk, header: bytes) -> None:
    await bulk.refuse("nobody asked for it")


@asynccontextmanager
async def linked(
    *hosts: Messaging, settings: TransportSettings | None = None, bulk: BulkHandler = _refuse_all
) -> AsyncIterator[list[Linked]]:
    """A transport on each host, closed at the end."""
    made: list[Linked] = []
    async with asyncio.TaskGroup() as tasks:
        for host in hosts:
            heard: list[tuple[PeerId, bytes]] = []
            lost: list[tuple[PeerId, str]] = []
            transport = Transport(
                host,
                run=RUN,
                message=lambda peer, data, heard=heard: heard.append((peer, data)),  # type: ignore[misc]
                lost=lambda peer, reason, lost=lost: lost.append((peer, reason)),  # type: ignore[misc]
                bulk=bulk,
                settings=settings,
            )
            await transport.start(tasks)
            made.append(Linked(host, transport, heard, lost))
        try:
            yield made
        finally:
            for one in made:
                await one.transport.close()


async def introduce(*hosts: Host) -> None:
    """Every host knows where every other one is."""
    for host in hosts:
        for other in hosts:
            if other is not host:
                await host.connect(other.peer_id, await other.addresses(), timeout_s=10.0)

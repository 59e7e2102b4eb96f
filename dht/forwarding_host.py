"""A host that passes everything on to another one, for hosts that change a part of it.

``DiallingHost`` is the smallest of them; ``guarded_host`` and ``throttled_host`` are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.host import CallHandler, Connection, Directory, Host, Stream, StreamHandler
from dht.identity import PeerId


class ForwardingHost:
    """``dht.host.Host`` by means of another host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

    @property
    def directory(self) -> Directory:
        return self._host.directory

    def wall_time(self) -> float:
        return self._host.wall_time()

    async def addresses(self) -> tuple[Multiaddr, ...]:
        return await self._host.addresses()

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        await self._host.connect(peer, addresses, timeout_s=timeout_s)

    async def improve(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        await self._host.improve(peer, addresses, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> None:
        await self._host.disconnect(peer)

    def stranger(self) -> AbstractAsyncContextManager[Host]:
        return self._host.stranger()

    async def connections(self) -> tuple[Connection, ...]:
        return await self._host.connections()

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        await self._host.serve_calls(protocol, handler, request_max_bytes=request_max_bytes)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        return await self._host.call(peer, protocol, request, timeout_s=timeout_s)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        await self._host.serve_streams(protocol, handler)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)

    async def close(self) -> None:
        await self._host.close()


class DiallingHost(ForwardingHost):
    """A host that dials a peer where its record says it is, if the network has forgotten it."""

    def __init__(self, host: Host, addresses: Callable[[PeerId], Sequence[Multiaddr]]) -> None:
        """``addresses``: those at which a peer says that it can be dialled."""
        super().__init__(host)
        self._addresses = addresses

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        try:
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        except PeerUnreachable:
            if not (addresses := self._addresses(peer)):
                raise
            await self._host.connect(peer, addresses, timeout_s=timeout_s)
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)

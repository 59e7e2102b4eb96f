"""A host that passes messages on to another one, for hosts that change a part of that.

``DiallingHost`` is the smallest of them; ``guarded_host`` and ``throttled_host`` are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.host import CallHandler, Host, Messaging, Stream, StreamHandler
from dht.identity import PeerId


class ForwardingHost:
    """``dht.host.Messaging`` by means of another host."""

    def __init__(self, host: Messaging) -> None:
        self._host = host

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

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


class DiallingHost(ForwardingHost):
    """A host that dials a peer where its record says it is, if the network has forgotten it."""

    def __init__(
        self, host: Messaging, addresses: Callable[[PeerId], Sequence[Multiaddr]], *, dials: Host
    ) -> None:
        """``addresses``: those at which a peer says that it can be dialled. ``dials``: the host
        below all others, which has the connections."""
        super().__init__(host)
        self._addresses = addresses
        self._dials = dials

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        try:
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)
        except PeerUnreachable:
            if not (addresses := self._addresses(peer)):
                raise
            await self._dials.connect(peer, addresses, timeout_s=timeout_s)
            return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)

"""The connections of a page's server: at most so many, in all and from one address.

Whoever reaches a page can open connections without asking anything. Each takes a descriptor of the
process, which then opens no checkpoint and no stream. So the connection that has been idle for
longest is closed for a new one. ``keepalive_timeout`` of the server closes those that send no whole
request in time, the first one included.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from peer.views.page_address import is_local

CONNECTIONS_MAX = 128
OF_ADDRESS_MAX = 16
"""This machine may have as many as there are in all: a proxy in front has one address."""
REQUEST_WITHIN_S = 3.0
"""A connection on which no request comes for so long is closed."""


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol of the server, and tells when something came."""

    def __init__(self, connections: Connections, protocol: asyncio.Protocol) -> None:
        self._connections = connections
        self._protocol = protocol
        self.transport: asyncio.Transport | None = None
        self.address = ""
        self.requests = 0
        """Requests being answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peername = transport.get_extra_info("peername")
        self.address = str(peername[0]) if peername else ""
        self._protocol.connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._connections.active(self)
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._connections.active(self)
        self._protocol.resume_writing()


class Connections:
    """The open connections of one server, those that have been idle for longest first."""

    def __init__(self) -> None:
        self._open: dict[_Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, server: web.Server) -> asyncio.Protocol:
        """Return the protocol of a connection that is about to be made."""
        return _Connection(self, server())

    def opened(self, connection: _Connection) -> None:
        alike = [other for other in self._open if other.address == connection.address]
        if len(alike) >= OF_ADDRESS_MAX and not is_local(connection.address):
            self._close_idle(alike)
        elif len(self._open) >= CONNECTIONS_MAX:
            self._close_idle(list(self._open))
        self._open[connection] = None

    def _close_idle(self, among: list[_Connection]) -> None:
        idle = next((one for one in among if not one.requests), among[0])
        self.closed(idle)
        assert idle.transport is not None, "it is open"
        idle.transport.abort()

    def active(self, connection: _Connection) -> None:
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def closed(self, connection: _Connection) -> None:
        self._open.pop(connection, None)

    def watching(self) -> Middleware:
        """Return the middleware that tells which connections are being answered."""

        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            matching = (one for one in self._open if one.transport is request.transport)
            connection = next(matching, None)
            if connection is None:
                return await handler(request)
            connection.requests += 1
            try:
                return await handler(request)
            finally:
                connection.requests -= 1

        return watch

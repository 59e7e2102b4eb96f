"""A host that serves only peers that the run admits, and opens streams to no others.

Whatever is served through it is closed to strangers: control links, bulk streams, states, replays,
status and lane tickets. It is the only place where a protocol of a run asks for admission.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.forwarding_host import ForwardingHost
from dht.host import CallHandler, Messaging, Stream, StreamHandler
from dht.identity import PeerId

REFUSED = b"\x02"
"""First byte of the only frame on a refused stream, followed by the reason. Control links, bulk
streams and fetches take it for a refusal."""

REASON_MAX_BYTES = 300
REFUSE_WITHIN_S = 2.0

Refusal = Callable[[PeerId], Awaitable[str | None]]
"""Gives the reason why a peer is refused; ``None`` if the run admits it."""


class GuardedHost(ForwardingHost):
    """A host with a guard before every handler and every stream that is opened."""

    def __init__(self, host: Messaging, refusal: Refusal) -> None:
        super().__init__(host)
        self._refusal = refusal
        self.refused = 0
        """Number of calls and streams of peers that are not admitted."""

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        async def answer(peer: PeerId, request: bytes) -> bytes:
            if (reason := await self._refusal(peer)) is not None:
                self.refused += 1
                raise ValueError(reason)
            return await handler(peer, request)

        await self._host.serve_calls(protocol, answer, request_max_bytes=request_max_bytes)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        async def serve(stream: Stream) -> None:
            if (reason := await self._refusal(stream.remote)) is not None:
                self.refused += 1
                await refuse(stream, reason, timeout_s=REFUSE_WITHIN_S)
                stream.abort()
            else:
                await handler(stream)

        await self._host.serve_streams(protocol, serve)

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if (reason := await self._refusal(peer)) is not None:
            raise PeerUnreachable(peer, reason)
        return await self._host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


async def refuse(stream: Stream, reason: str, *, timeout_s: float) -> None:
    """Give the reason, and let the other side read it. An error means that it has gone."""
    with contextlib.suppress(StreamBroken, HostClosed):
        text = reason.encode()[:REASON_MAX_BYTES]
        await stream.send(REFUSED, text, timeout_s=timeout_s)
        await stream.finish(timeout_s=timeout_s)

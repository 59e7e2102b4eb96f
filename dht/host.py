"""Interface of a peer's network host: calls, streams, connections and the directory.

``dht.memory.host`` implements it on a simulated network and a virtual clock,
``dht.libp2p.hivemind_host`` on a libp2p daemon; ``tests/contract`` runs one suite on both. Both
answer calls and streams with ``Served``, and own their ``Tasks``. Nothing here knows about runs,
fragments or training.

Time is the running event loop's own (``loop.time()``), so that an hour takes a millisecond on a
virtual loop. Every method that waits takes a time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from multiaddr import Multiaddr

from dht.errors import NOT_SERVED, DhtError
from dht.identity import PeerId
from dht.limits import Place, Places

_logger = logging.getLogger("dht.host")

UNARY_MAX_BYTES = 1 << 20
"""Limit of a request or reply of a unary call; the daemon's own limit is 4 MiB."""

CALL_ANSWER_S = 60.0
"""Time limit for a handler of a unary call."""

FRAME_MAX_BYTES = 1 << 20
"""Limit of a stream's frame, checked on the announced length before memory is allocated."""

CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Answers one unary request of an authenticated peer. Raise ``ValueError`` to refuse."""

StreamHandler = Callable[["Stream"], Awaitable[None]]
"""Serves one incoming stream, which is aborted when this returns or raises unless finished."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An open connection to another peer, as the transport sees it."""

    peer: PeerId
    address: Multiaddr
    relayed: bool
    """Relayed connections carry control messages only: a relay cuts them after 128 KiB."""


class Stream(Protocol):
    """An authenticated, ordered, two-way sequence of frames with one peer.

    Only END followed by the other side's ACK means complete. A stream that ends otherwise raises
    ``StreamBroken`` on both sides. One task may send while another receives; two tasks must not
    send, or receive, at the same time.
    """

    @property
    def remote(self) -> PeerId: ...

    @property
    def relayed(self) -> bool: ...

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """Bytes by which frames sent and received so far were smaller on the line, being packed."""
        ...

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Send one frame, the concatenation of ``parts``; waits while the other side is slow.

        Raises ``StreamBroken`` when no progress is possible within ``timeout_s``,
        ``ValueError`` when the frame is larger than ``FRAME_MAX_BYTES``.
        The parts may be reused by the caller as soon as this returns.
        """
        ...

    def send_now(self, *parts: bytes) -> bool:
        """``send`` for a small frame that need not wait. ``False``: it would have to, or the stream
        is over; nothing was sent."""
        ...

    async def receive(self, *, timeout_s: float) -> bytes | None:
        """The next frame, or ``None`` after the other side's END, which is acknowledged.

        Raises ``StreamBroken`` on anything else: silence for ``timeout_s``, a
        frame over the limit, end-of-file.
        """
        ...

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        """Like ``receive``, but writes the frame to the start of ``target`` and returns its size.

        A frame larger than ``target`` breaks the stream, because its announced size was wrong.
        """
        ...

    async def finish(self, *, timeout_s: float) -> None:
        """Send END and wait for the ACK. Frames may still be received afterwards."""
        ...

    def abort(self) -> None:
        """Drop the stream now. Safe to call at any time, more than once."""
        ...


class Directory(Protocol):
    """Signed records, stored redundantly by the peers: a few small ones under each key.

    Records are opaque here; ``dht.records`` checks signature, size, run and age when they are
    stored and again when they are read.
    """

    def set_seeds(self, seeds: Collection[PeerId]) -> None:
        """Store and look up records at these peers besides, while they are connected."""
        ...

    async def publish(self, key: str, record: bytes, *, timeout_s: float) -> int:
        """Store a record of this peer that was made for ``key``, for the time that it names.

        Returns the number of *other* peers that stored it.
        """
        ...

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        """All valid records under ``key`` that are found within ``timeout_s``, by peer.

        ``quick``: ask only one of the peers that had records before, another one each time. That
        is a fraction of the traffic, and misses records that only the other peers have.
        """
        ...


class Messaging(Protocol):
    """The part of a host that rounds and calls of a run need: messages to and from other peers."""

    @property
    def peer_id(self) -> PeerId: ...

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        """Answer unary calls of ``protocol`` until the host closes. Survives daemon restarts."""
        ...

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        """One request, one reply. Raises ``PeerUnreachable`` or ``CallRefused``."""
        ...

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Handle incoming streams of ``protocol`` until the host closes."""
        ...

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        """Open a stream. Raises ``PeerUnreachable``.

        ``bulk``: for megabytes, which may take another path than small messages.
        """
        ...


class Host(Messaging, Protocol):
    """One peer's connection to the network. The code that opens it closes it."""

    @property
    def directory(self) -> Directory: ...

    def wall_time(self) -> float:
        """This machine's Unix time. It may be wrong: never compare it with a peer's."""
        ...

    async def addresses(self) -> tuple[Multiaddr, ...]:
        """The addresses at which this host can probably be dialled, best first, with its id."""
        ...

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        """Connect at one of the addresses, or without any at an address that the network knows.

        Also introduces the two directories to each other. Raises ``PeerUnreachable``.
        """
        ...

    async def improve(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        """Connect directly with a peer that is connected by a relay.

        Raises ``PeerUnreachable`` if it cannot be dialled at these addresses; then its connection
        stays as it is.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections with a peer, which breaks all streams with it."""
        ...

    def stranger(self) -> AbstractAsyncContextManager[Host]:
        """A host on this machine that no peer has met: it has a new identity, and does not listen.

        What it dials proves whether strangers get through, and breaks no connection of this host.
        Raises ``HostClosed``.
        """
        ...

    async def connections(self) -> tuple[Connection, ...]: ...

    async def close(self) -> None:
        """Stop serving, break what is open, end every process that this host started."""
        ...


class Tasks:
    """Tasks that end with their owner. An exception in one is a bug, and reported."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            report(f"{task.get_name()} failed", error)

    def cancel(self) -> None:
        """Cancel all but the one that calls this."""
        for task in self._others():
            task.cancel()

    async def wait(self) -> None:
        """Wait for all but the one that calls this."""
        await asyncio.gather(*self._others(), return_exceptions=True)

    def _others(self) -> list[asyncio.Task[None]]:
        try:
            me = asyncio.current_task()
        except RuntimeError:  # neither task nor loop, as in an event of a virtual loop
            me = None
        return [task for task in self._running if task is not me]


class ServedStream(Stream, Protocol):
    """A stream that another peer has opened, as its host sees it."""

    def cut(self) -> None:
        """Drop the stream so that it breaks for the other side and does not end."""
        ...


STREAMS_MAX = 1024
STREAMS_PER_PEER_MAX = 64
"""Streams that other peers may have open with a host at once, in all and each."""


class Served:
    """Calls and streams that a host serves other peers, within limits of size, time and number."""

    def __init__(
        self, tasks: Tasks, *, prefers: Callable[[PeerId], object] = lambda peer: False
    ) -> None:
        """``prefers``: peers whose streams go before those of others when there are too many."""
        self.calls: dict[str, tuple[CallHandler, int]] = {}
        self.streams: dict[str, StreamHandler] = {}
        self.open = Places[Place[PeerId]](STREAMS_MAX, STREAMS_PER_PEER_MAX, prefers=prefers)
        """Streams that other peers have opened."""
        self._tasks = tasks

    def check_unserved(self, protocol: str) -> None:
        if protocol in self.calls or protocol in self.streams:
            raise ValueError(f"protocol {protocol} is served already")

    def serve_calls(self, protocol: str, handler: CallHandler, *, request_max_bytes: int) -> None:
        if not 0 <= request_max_bytes <= UNARY_MAX_BYTES:
            raise ValueError(f"request_max_bytes is {request_max_bytes}; at most {UNARY_MAX_BYTES}")
        self.calls[protocol] = handler, request_max_bytes

    async def answer(self, peer: PeerId, protocol: str, request: bytes) -> bytes:
        """Raises ``ValueError``, which has the reason of a refusal."""
        if protocol not in self.calls:
            raise ValueError(NOT_SERVED)
        handler, request_max_bytes = self.calls[protocol]
        if len(request) > request_max_bytes:
            raise ValueError(f"the request has {len(request)} bytes; at most {request_max_bytes}")
        try:
            async with asyncio.timeout(CALL_ANSWER_S):
                reply = await handler(peer, request)
        except ValueError:
            raise
        except (TimeoutError, DhtError) as error:
            raise ValueError(f"no answer can be given now: {error}") from error
        except Exception as error:
            report(f"the handler of {protocol} failed", error)
            raise ValueError("the handler failed") from error
        if len(reply) > UNARY_MAX_BYTES:
            problem = f"reply has {len(reply)} bytes; at most {UNARY_MAX_BYTES}"
            report(f"the handler of {protocol} failed", ValueError(problem))
            raise ValueError("the reply is larger than a message may be")
        return reply

    def accept(self, stream: ServedStream, protocol: str) -> str | None:
        """Start the handler of an incoming stream, or return the reason of a refusal."""
        handler = self.streams.get(protocol)
        if handler is None:
            return NOT_SERVED
        place = Place(stream.remote, stream.cut)
        if not self.open.take(place):
            return "too many streams"
        work = self._serve(stream, protocol, handler, place)
        self._tasks.spawn(work, f"the handler of {protocol}")
        return None

    async def _serve(
        self, stream: ServedStream, protocol: str, handler: StreamHandler, place: Place[PeerId]
    ) -> None:
        try:
            await handler(stream)
        except (DhtError, TimeoutError) as error:
            _logger.debug("stream_failed peer=%s protocol=%s: %s", stream.remote, protocol, error)
            stream.cut()
        except BaseException:
            stream.cut()
            raise
        finally:
            stream.abort()
            self.open.leave(place)


def report(message: str, error: BaseException) -> None:
    """Report a bug to the event loop's exception handler."""
    context = {"message": message, "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)

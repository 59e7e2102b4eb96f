"""Interface of a peer's network host: calls, streams, connections and the directory.

``dht.memory.host`` implements it on a simulated network and a virtual clock,
``dht.libp2p.hivemind_host`` on a libp2p daemon; ``tests/contract`` runs one suite on both. Nothing
here knows about runs, fragments or training.

Time is the running event loop's own (``loop.time()``), so that an hour takes a millisecond on a
virtual loop. Every method that waits takes a time limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from multiaddr import Multiaddr

from dht.identity import PeerId

UNARY_MAX_BYTES = 1 << 20
"""Limit of a request or reply of a unary call; the daemon's own limit is 4 MiB."""

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

    async def publish(self, key: str, record: bytes, *, ttl_s: float, timeout_s: float) -> int:
        """Store a record under ``key`` and the own peer id.

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


class Host(Protocol):
    """One peer's connection to the network. The code that opens it closes it."""

    @property
    def peer_id(self) -> PeerId: ...

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

    async def close(self) -> None:
        """Stop serving, break what is open, end every process that this host started."""
        ...

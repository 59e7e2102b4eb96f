"""What one peer can do on the network, whatever the network is made of.

``dht.memory.host`` implements it on a simulated network and a virtual clock,
``dht.libp2p.hivemind_host`` on a libp2p daemon; ``tests/contract`` runs one suite on
both. Nothing here knows about runs, fragments or training.

Time is the running event loop's own (``loop.time()``), so that a virtual loop
makes an hour cost a millisecond. Every method that waits takes its deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from multiaddr import Multiaddr

from dht.identity import PeerId

UNARY_MAX_BYTES = 1 << 20
"""No request and no reply of a unary call is larger; the daemon's own wall is at 4 MiB."""

FRAME_MAX_BYTES = 1 << 20
"""No frame of a stream is larger. Checked on the announced length, before allocation."""

CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Answers one unary request of an authenticated peer. Raise ``ValueError`` to refuse."""

StreamHandler = Callable[["Stream"], Awaitable[None]]
"""Serves one incoming stream. When it returns or raises, the stream is aborted unless finished."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A live connection to another peer, as the transport sees it."""

    peer: PeerId
    address: Multiaddr
    relayed: bool
    """Relayed connections carry control messages only (a circuit is cut after 128 KiB)."""

    inbound: bool | None = None
    """Whether the other peer opened it; ``None``: this host cannot tell."""


class Stream(Protocol):
    """An authenticated, ordered, two-way sequence of frames with one peer.

    Only END followed by the other side's ACK means complete. A stream that
    merely stops raises ``StreamBroken``, on both sides. One task may send while
    another receives; two tasks must not do the same thing at once.
    """

    @property
    def remote(self) -> PeerId: ...

    @property
    def relayed(self) -> bool: ...

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Send one frame, the concatenation of ``parts``; waits while the other side is slow.

        Raises ``StreamBroken`` when no progress is possible within ``timeout_s``,
        ``ValueError`` when the frame is larger than ``FRAME_MAX_BYTES``.
        The parts may be reused by the caller as soon as this returns.
        """
        ...

    async def receive(self, *, timeout_s: float) -> bytes | None:
        """The next frame, or ``None`` once the other side has said END (which is acknowledged).

        Raises ``StreamBroken`` on anything else: silence for ``timeout_s``, a
        frame over the limit, end-of-file.
        """
        ...

    async def receive_into(self, target: memoryview, *, timeout_s: float) -> int | None:
        """Like ``receive``, but writes the frame to the start of ``target`` and returns its size.

        A frame larger than ``target`` breaks the stream: the other side lies.
        """
        ...

    async def finish(self, *, timeout_s: float) -> None:
        """Say END and wait for the ACK. Frames may still be received afterwards."""
        ...

    def abort(self) -> None:
        """Drop the stream now. Safe to call at any time, more than once."""
        ...


class Directory(Protocol):
    """Signed facts, stored redundantly by the peers: a few small records under each key.

    Records are opaque here; ``dht.records`` checks signature, size, run and age
    when they are stored and again when they are read.
    """

    async def publish(self, key: str, record: bytes, *, ttl_s: float, timeout_s: float) -> int:
        """Store my record under ``key`` and my peer id. Returns on how many *other* peers."""
        ...

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        """All valid records under ``key`` that could be found within ``timeout_s``, by peer.

        ``quick``: those of one peer that had some a while ago, another one each time. That is
        a fraction of the traffic, and may miss a record that lies with the others only.
        """
        ...


class Host(Protocol):
    """One peer's presence on the network. Who opens it closes it."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def directory(self) -> Directory: ...

    def wall_time(self) -> float:
        """This machine's idea of Unix time. It may be wrong: never compare it with a peer's."""
        ...

    async def addresses(self) -> tuple[Multiaddr, ...]:
        """Where this host believes it can be dialled, best first, each ending in /p2p/PEER."""
        ...

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        """Connect, trying the addresses given (or those the network knows, when empty).

        Also introduces the two directories to each other. Raises ``PeerUnreachable``.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None: ...

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

        ``bulk``: for megabytes, which may take another way than what is small.
        """
        ...

    async def close(self) -> None:
        """Stop serving, break what is open, end every process that this host started."""
        ...

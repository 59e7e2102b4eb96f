"""One TCP connection of a lane, which carries one stream after another, and the limits of a lane.

A connection belongs to the lane, which decides what is done with one that is free.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from dht.identity import PeerId
from dht.libp2p.framing.frame_stream import FrameStream
from dht.libp2p.framing.sealing import NUMBER_BYTES, Ticket
from dht.libp2p.lane.wire import (
    PREAMBLE_MAX_BYTES,
    Answer,
    Begin,
    decode,
    encode,
)
from dht.limits import Place
from dht.public_ip import is_public

CONNECT_S = 3.0
"""Time for a TCP connection, before the peer counts as one behind a router and is met. It suffices
for a SYN that is sent twice."""

RETRY_MAX_S = 1800.0
MEET_AGAIN_FIRST_S = 2.0
MEET_AGAIN_MAX_S = 60.0
"""``retry_first_s`` and ``RETRY_MAX_S`` for a peer that can only be met, with which nothing goes
through the daemon."""

CONNECTIONS_MAX = 256
"""Limit of connections that other peers have dialled."""

TICKET_LIFE_S = 30.0
RELAY_S = 8.0
"""Time to get a connection through a relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Port and limits of a lane."""

    port: int = 0
    """TCP port to listen on, beside the daemon's own; 0: any free port."""

    told_port: int | None = None
    """Port that other peers are told to dial instead: that of a router or proxy in front."""

    wait_s: float = 1.0
    """Time that a stream waits for a new connection before it takes the daemon. It suffices for
    three round trips on a far link. Traffic through the daemon is not paced: on a home line it
    fills the queue, before which the paced connections withdraw to their floor."""

    dial_timeout_s: float = 10.0
    answer_timeout_s: float = 2.0
    """Time after which a kept connection is dropped if the other side does not answer on it."""

    idle_max_s: float = 120.0
    """Time after which the dialling side closes an unused connection. The other side closes it
    after twice as long, in case the dialling side is gone."""

    retry_first_s: float = 30.0
    """A peer that could not be dialled is dialled again after this, then after twice as long each
    time, up to ``RETRY_MAX_S``."""

    per_peer_max: int = 8
    """Limit of connections with one peer, in each direction."""

    strangers_max: int = 32
    """Limit of those whose peer has not yet proved that it has a ticket's keys."""
    greet_timeout_s: float = 5.0
    meeting_s: float = 4.0
    """Time for two peers behind routers to meet, once they know each other's outer addresses. It
    is spent in vain before a relay is tried."""

    meetings_max: int = 16
    """Limit of meetings at once to which other peers have called."""

    polite: bool = True
    """Leave room on the own line for others (``dht.libp2p.lane.pacing``)."""


def parse_lane(text: str) -> LaneSettings | None:
    """Settings from a command line's ``auto``, ``off``, PORT, or PORT:TOLD_PORT.

    ``None`` stands for ``off``. Raises ``ValueError``.
    """
    if text == "off":
        return None
    if text == "auto":
        return LaneSettings()
    ports = text.split(":")
    if len(ports) > 2 or not all(
        port.isascii() and port.isdigit() and 0 < int(port) <= 65535 for port in ports
    ):
        raise ValueError(
            f"lane is {text!r}; it is a TCP port, PORT:OUTER_PORT behind a router, 'auto' or 'off'"
        )
    return LaneSettings(port=int(ports[0]), told_port=int(ports[-1]))


class Path(IntEnum):
    """The ways to another peer, best first."""

    DIRECT = 0
    """One of the two could be dialled."""

    PUNCHED = 1
    """Both are behind routers, and dialled each other."""

    RELAYED = 2
    """Through a third peer, which carries ciphertext."""


class Outside(Protocol):
    """The daemon's part in connections of a lane. Each method raises ``DhtError``."""

    async def where(self, peer: PeerId) -> Sequence[str]:
        """The IP addresses at which the daemon is connected to a peer directly, best first."""
        ...

    async def call(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        """Send a message of ``dht.libp2p.lane.wire`` to a peer; returns the answer."""
        ...

    async def observers(self) -> Sequence[tuple[PeerId, str]]:
        """Directly connected peers on the internet, and their IP addresses: one or several."""
        ...


class Holder(Protocol):
    """The lane, as its connections see it."""

    def heard(self, connection: Connection, message: bytes) -> None:
        """Take a preamble of the dialling side."""
        ...

    def keep(self, connection: Connection) -> None:
        """Take back a connection that this side dialled: its stream is over."""
        ...

    def rest(self, connection: Connection) -> None:
        """Take back a connection that the other side dialled: its stream is over."""
        ...

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        ...


class Connection:
    """One connection with one peer, which carries one stream after another."""

    def __init__(self, holder: Holder, path: Path, *, dialled: bool) -> None:
        self._holder = holder
        self.path = path
        self.dialled = dialled
        self.peer: PeerId | None = None
        """The peer at the other end; ``None`` until it has proved its identity."""

        self.claimed: PeerId | None = None
        """The peer to which the ticket was issued that the dialling side has named."""

        self.seen: tuple[str, int] = ("", 0)
        """Remote address, if the dialling side may want to hear it."""

        self.greeted = asyncio.Event()
        """Set when the peer has proved its identity, or the connection is gone."""
        self.stream = FrameStream(
            self.on_preamble, carrier=self, preamble_max_bytes=PREAMBLE_MAX_BYTES
        )
        """The stream under way, or the next one."""

        self.said: asyncio.Future[bytes] | None = None
        """Receives the next preamble, if one is expected."""

        self.place: Place[PeerId] | None = None
        """Its place among those that other peers have dialled, once their peers are known."""

        self.resting: asyncio.TimerHandle | None = None
        """Closes the connection if no stream uses it."""

    def on_preamble(self, stream: FrameStream, message: bytes) -> None:
        if self.said is not None and not self.said.done():
            self.said.set_result(message)
        elif self.dialled:
            stream.cut()  # an answer that was not asked for
        else:
            self._holder.heard(self, message)

    @property
    def sent_bytes(self) -> int:
        seals = self.stream.seals
        return seals.mine.sealed_bytes if seals is not None else 0

    @property
    def is_far(self) -> bool:
        """Say whether it leads through the internet."""
        return is_public(self.stream.remote_ip)

    def cut(self) -> None:
        self.stream.cut()

    def wake(self) -> None:
        if self.place is not None:
            self.place.end = None
        if self.resting is not None:
            self.resting.cancel()
            self.resting = None

    async def next_preamble(self) -> bytes:
        self.said = asyncio.get_running_loop().create_future()
        try:
            return await self.said
        finally:
            self.said = None

    def free(self, stream: FrameStream) -> None:
        self.stream = FrameStream(
            self.on_preamble, carrier=self, preamble_max_bytes=PREAMBLE_MAX_BYTES
        )
        if self.dialled:
            stream.pass_on(self.stream)
            self._holder.keep(self)
        else:
            self._holder.rest(self)
            stream.pass_on(self.stream)

    def lost(self, reason: str) -> None:
        if self.said is not None and not self.said.done():
            self.said.set_exception(ConnectionError(reason))
        self.greeted.set()
        self._holder.lost(self)

    async def show(self, dialled: socket.socket, ticket: Ticket) -> Answer:
        """Show a ticket on a new connection. Raises ``OSError`` or ``ValueError``."""
        stream, loop = self.stream, asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: stream, sock=dialled)
        except BaseException:
            dialled.close()
            raise
        try:
            stream.write_raw(bytes((NUMBER_BYTES,)) + ticket.number)
            stream.seals = ticket.seals(dialled=True)
            stream.write_preamble(encode(Begin()))
            answer = decode(Answer, await self.next_preamble())
            if answer.refused:
                raise ValueError(answer.refused)
        except BaseException:
            stream.cut()
            raise
        return answer


@dataclass(slots=True, eq=False)
class Partner:
    """Dial results and connections with one peer that this peer dials."""

    idle: list[Connection] = field(default_factory=list)
    dialled: set[Connection] = field(default_factory=set)
    dials: int = 0
    """Number of dials under way."""

    failures: int = 0
    reason: str = ""
    """Reason of the last failure."""

    not_before: float = 0.0
    """Time before which the peer is not dialled again."""

    must_meet: bool = False
    """The daemon has no direct connection with it."""

    lets_none_in: bool = False
    """True for a partner with a direct connection of the daemon that could not be dialled: it
    dialled out."""

    apart: int = 0
    """Number of meetings in a row that failed."""

    meet_after: float = 0.0
    """Time before which no meeting with it is tried, as there is a relay."""

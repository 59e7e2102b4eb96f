"""The direct lane: bulk streams over TCP connections of our own, beside the libp2p daemon.

The daemon moves each byte through two processes more, and that costs more processor time than a
round's arithmetic. So a peer that can be dialled listens at one TCP port more. Who wants to send it
bulk asks it over the daemon, which knows both by their keys and lets nobody listen, for that port
and for a ticket: two secret keys that are good for one connection. It dials the port at an address
at which the daemon is connected to that peer, never at one that somebody says, and names the
ticket; from then on every frame is sealed with those keys. So each knows the other as surely as
over the daemon, and there is no handshake that could go wrong.

A connection carries one stream at a time, and is kept for the next one. Where none can be had at
once the stream goes through the daemon, as all of them did, and the peer is tried again later.

This module knows neither libp2p nor what the streams are for; see ``dht.libp2p.hivemind_host``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from dht.errors import DhtError
from dht.identity import PeerId
from dht.libp2p.frame_stream import FrameStream
from dht.libp2p.lane_wire import (
    PREAMBLE_MAX_BYTES,
    REASON_MAX,
    Answer,
    Begin,
    Offer,
    decode,
    encode,
)
from dht.libp2p.sealing import KEY_BYTES, NUMBER_BYTES, Ticket, Tickets

_logger = logging.getLogger("dht.libp2p.lane")

PEERS_MAX = 256
"""So many peers are remembered as diallable or not; the longest unused one is forgotten."""

BACKLOG = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Where a lane listens, and what it bears."""

    port: int = 0
    """TCP port beside the daemon's own; 0: any."""

    told_port: int | None = None
    """What others are told to dial instead: that of a router or a proxy in front."""

    wait_s: float = 0.05
    """A stream waits so long for a connection that is not there yet. On a near link that is time
    enough; on a far one the daemon is no bottleneck, and the connection is there for the next."""

    dial_timeout_s: float = 10.0
    answer_timeout_s: float = 2.0
    """A connection that was kept and on which the other side does not answer so soon is dropped."""

    idle_max_s: float = 120.0
    """A connection that nobody used for so long is closed by who dialled it; by the other side
    after twice as long, if who dialled it is gone."""

    retry_first_s: float = 30.0
    retry_max_s: float = 1800.0
    """Who could not be dialled is tried again after this, twice as long each time."""

    per_peer_max: int = 8
    """Connections with one peer, in each direction."""
    connections_max: int = 256
    """Connections that others have dialled."""
    strangers_max: int = 32
    """Of those, who have not shown yet that they have a ticket's keys."""
    greet_timeout_s: float = 5.0
    ticket_life_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("port", "told_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} is {port}; a port is between 0 and 65535")
        if not 0 < self.per_peer_max <= self.connections_max:
            raise ValueError(
                f"per_peer_max is {self.per_peer_max} and connections_max is "
                f"{self.connections_max}; 0 < per peer <= all"
            )


def parse_lane(text: str) -> LaneSettings | None:
    """As on the command line: ``auto``, ``off``, PORT, or PORT:TOLD_PORT. Raises ``ValueError``."""
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


class _Connection:
    """``dht.libp2p.frame_stream.Carrier``: one connection with one peer."""

    def __init__(self, lane: Lane, *, dialled: bool) -> None:
        self._lane = lane
        self._dialled = dialled
        self.peer: PeerId | None = None
        """Set once it has shown that it is so."""
        self.ticket: Ticket | None = None
        """That whoever dialled has named."""
        self.greeted = asyncio.Event()
        """It has shown who it is, or is gone."""
        self.stream = FrameStream(
            self.on_preamble, carrier=self, preamble_max_bytes=PREAMBLE_MAX_BYTES
        )
        """The one under way, or the next."""
        self.said: asyncio.Future[bytes] | None = None
        """The next preamble, for whoever waits for it."""
        self.resting: asyncio.TimerHandle | None = None
        """What ends it if nobody uses it."""

    def __repr__(self) -> str:
        way = "to" if self._dialled else "from"
        return f"_Connection({way} {self.peer}, {self.stream!r})"

    @property
    def dialled(self) -> bool:
        return self._dialled

    def on_preamble(self, stream: FrameStream, message: bytes) -> None:
        if self.said is not None and not self.said.done():
            self.said.set_result(message)
        elif self._dialled:
            stream.cut()  # nobody asked
        else:
            self._lane._heard(self, message)

    @property
    def sent_bytes(self) -> int:
        seals = self.stream.seals
        return seals.mine.sealed_bytes if seals is not None else 0

    def cut(self) -> None:
        self.stream.cut()

    def wake(self) -> None:
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
        if self._dialled:
            stream.pass_on(self.stream)
            self._lane._keep(self)
        else:
            self._lane._rest(self)
            stream.pass_on(self.stream)

    def lost(self, reason: str) -> None:
        if self.said is not None and not self.said.done():
            self.said.set_exception(ConnectionError(reason))
        self.greeted.set()
        self._lane._lost(self)


@dataclass(slots=True, eq=False)
class _Peer:
    """Another peer, as somebody to dial."""

    idle: list[_Connection] = field(default_factory=list)
    dialled: set[_Connection] = field(default_factory=set)
    dials: int = 0
    """Under way."""
    failures: int = 0
    reason: str = ""
    """Of the last failure."""
    not_before: float = 0.0


Ask = Callable[[PeerId], Awaitable[bytes]]
"""Get a peer's ``Offer`` over the daemon. Raises ``DhtError``."""

Where = Callable[[PeerId], Awaitable[Sequence[str]]]
"""The IP addresses at which the daemon is connected to a peer, not counting relays'."""

Serve = Callable[[FrameStream, str], str | None]
"""Serve an incoming stream of this protocol, or say why not."""


class Lane:
    """One host's direct connections with others. Opened and closed by the host."""

    def __init__(self, settings: LaneSettings, *, ask: Ask, where: Where, serve: Serve) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._ask = ask
        self._where = where
        self._serve = serve
        self._tickets = Tickets(
            life_s=settings.ticket_life_s,
            per_peer_max=settings.per_peer_max,
            tickets_max=4 * settings.connections_max,
        )
        self._listeners: list[socket.socket] = []
        self._peers: OrderedDict[PeerId, _Peer] = OrderedDict()
        self._served: dict[_Connection, PeerId | None] = {}
        """Connections that others have dialled; ``None``: by whom is not known yet."""
        self._sent_before = 0
        """On connections that are gone."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        dialled = sum(len(peer.dialled) for peer in self._peers.values())
        return f"Lane(port={self.port}, dialled={dialled}, served={len(self._served)})"

    @property
    def port(self) -> int | None:
        """Where it listens; ``None`` where it does not."""
        if not self._listeners:
            return None
        port: int = self._listeners[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        return len(self._served) + sum(len(peer.dialled) for peer in self._peers.values())

    @property
    def sent_bytes(self) -> int:
        """In frames, since it was opened."""
        dialled = (connection for peer in self._peers.values() for connection in peer.dialled)
        return self._sent_before + sum(c.sent_bytes for c in (*self._served, *dialled))

    def start(self, hosts: Sequence[str]) -> None:
        """Listen at these IP addresses, where that is possible; at none: only dial."""
        for host in dict.fromkeys(hosts):
            port = self.port or self.settings.port
            try:
                listener = socket.create_server(
                    (host, port),
                    family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                    backlog=BACKLOG,
                )
            except OSError as error:
                # All works without, more slowly: no reason not to take part.
                _logger.warning("lane_not_listening at=%s:%d reason=%r", host, port, str(error))
                continue
            listener.setblocking(False)
            self._listeners.append(listener)
            _logger.info("lane_listening at=%s:%d", host, self.port)
            self._spawn(self._accept(listener), "lane accept")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"{task.get_name()} failed", "exception": error}
            )

    async def close(self) -> None:
        """Break every stream and end every connection."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in [*self._served, *(c for p in self._peers.values() for c in p.dialled)]:
            connection.stream.cut()
        self._peers.clear()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    # Being dialled.

    def offer(self, peer: PeerId) -> bytes:
        """What to answer a peer that asks over the daemon. Raises ``ValueError``: not here."""
        if self.port is None or self._closed:
            raise ValueError("it listens at no port for a direct lane")
        number = secrets.token_bytes(NUMBER_BYTES)
        ticket = Ticket(peer, secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES))
        self._tickets.issue(number, ticket, now=self._now)
        port = self.settings.told_port or self.port
        offer = Offer(port, number, ticket.dialler_key, ticket.listener_key)
        return encode(offer)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                dialled, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or hung up on the threshold
                _logger.warning("lane_accept_failed reason=%r", str(error))
                await asyncio.sleep(1.0)
                continue
            strangers = sum(peer is None for peer in self._served.values())
            if (
                strangers >= self.settings.strangers_max
                or len(self._served) >= self.settings.connections_max
            ):
                self.counters["refused"] += 1
                dialled.close()
                continue
            connection = _Connection(self, dialled=False)
            self._served[connection] = None
            self._spawn(self._greet(connection, dialled), "lane greet")

    async def _greet(self, connection: _Connection, dialled: socket.socket) -> None:
        """Who takes long to show that it has a ticket's keys, or has none, is nobody."""
        loop = asyncio.get_running_loop()
        stream = connection.stream
        try:
            async with asyncio.timeout(self.settings.greet_timeout_s):
                await loop.connect_accepted_socket(lambda: stream, dialled)
                await connection.greeted.wait()
        except (OSError, TimeoutError):
            stream.cut()
        except asyncio.CancelledError:
            stream.cut()
            raise
        if connection.peer is None:
            self.counters["turned_away"] += 1
            self._served.pop(connection, None)

    def _hear_stranger(self, connection: _Connection, message: bytes) -> str | None:
        """Whoever dialled names its ticket, and then says something that the keys open.

        Returns why it is turned away, if so.
        """
        stream = connection.stream
        if connection.ticket is None:
            ticket = self._tickets.redeem(message, now=self._now)
            if ticket is None:
                return "no such ticket"
            connection.ticket = ticket
            stream.seal(ticket.seals(dialled=False))
            stream.expect_preamble(connection.on_preamble)
            return None
        peer = connection.ticket.peer
        if sum(other == peer for other in self._served.values()) >= self.settings.per_peer_max:
            return f"more than {self.settings.per_peer_max} connections with {peer}"
        connection.peer = self._served[connection] = peer
        connection.greeted.set()
        self.counters["accepted"] += 1
        self._rest(connection)
        stream.expect_preamble(connection.on_preamble)
        stream.write_preamble(encode(Answer()))
        return None

    def _heard(self, connection: _Connection, message: bytes) -> None:
        """Whoever dialled begins a stream, or is still a stranger."""
        stream, peer = connection.stream, connection.peer
        if peer is None:
            refusal = self._hear_stranger(connection, message)
            if refusal is not None:
                _logger.debug("lane_turned_away reason=%r", refusal)
                stream.cut()
            return
        connection.wake()
        try:
            begin = decode(Begin, message)
        except ValueError as error:
            _logger.debug("lane_cut peer=%s reason=%r", peer, str(error))
            self.counters["cut"] += 1
            stream.cut()
            return
        stream.introduce(peer, relayed=False)
        refusal = self._serve(stream, begin.protocol)
        if refusal is None:
            self.counters["streams_served"] += 1
        else:
            self._rest(connection)
            stream.expect_preamble(connection.on_preamble)
        stream.write_preamble(encode(Answer((refusal or "")[:REASON_MAX])))

    # Dialling.

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> FrameStream | None:
        """A stream, or ``None`` where this one has to go another way. Never fails."""
        deadline = self._now + timeout_s
        known = self._known(peer)
        stream = await self._open_kept(known, protocol, deadline)
        if stream is not None or self.is_doubted(peer) or self._closed:
            return stream
        if len(known.dialled) + known.dials < self.settings.per_peer_max:
            known.dials += 1
            dialling = self._spawn(self._dial(peer, known), f"lane to {peer}")
            wait_s = min(self.settings.wait_s, deadline - self._now)
            await asyncio.wait((dialling,), timeout=wait_s)
            return await self._open_kept(known, protocol, deadline)
        return None

    async def reach(self, peer: PeerId) -> str | None:
        """Have a connection ready, however often that failed before; or say why there is none."""
        known = self._known(peer)
        if not known.idle:
            known.dials += 1
            await self._dial(peer, known)
        return None if known.idle else known.reason

    def idle(self, peer: PeerId) -> int:
        """How many connections wait for a stream to this peer."""
        known = self._peers.get(peer)
        return len(known.idle) if known is not None else 0

    def is_doubted(self, peer: PeerId) -> bool:
        """Whether this peer could not be dialled, and is left alone for now."""
        known = self._peers.get(peer)
        return known is not None and self._now < known.not_before

    def forget(self, peer: PeerId) -> None:
        """End what was dialled to this peer."""
        known = self._peers.pop(peer, None)
        for connection in list(known.dialled) if known is not None else ():
            connection.stream.cut()

    def _known(self, peer: PeerId) -> _Peer:
        known = self._peers.setdefault(peer, _Peer())
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_MAX:
            self.forget(next(iter(self._peers)))
        return known

    async def _open_kept(self, known: _Peer, protocol: str, deadline: float) -> FrameStream | None:
        """Begin a stream on a connection that nobody uses, if there is one."""
        while known.idle:
            connection = known.idle.pop()
            connection.wake()
            stream = connection.stream
            timeout_s = min(self.settings.answer_timeout_s, deadline - self._now)
            try:
                async with asyncio.timeout(timeout_s):
                    stream.write_preamble(encode(Begin(protocol)))
                    answer = decode(Answer, await connection.next_preamble())
            except ConnectionError:
                continue  # it had just been closed
            except (TimeoutError, ValueError):
                stream.cut()
                # The others lead to the same place.
                for other in known.idle:
                    other.stream.cut()
                known.idle.clear()
                self._failed(connection.peer, known, "it answers no longer")
                return None
            except asyncio.CancelledError:
                stream.cut()
                raise
            if answer.refused:
                stream.expect_preamble(connection.on_preamble)
                self._keep(connection)
                return None
            assert connection.peer is not None
            stream.introduce(connection.peer, relayed=False)
            self.counters["streams_opened"] += 1
            return stream
        return None

    async def _dial(self, peer: PeerId, known: _Peer) -> None:
        """Make a connection, for whoever needs one first."""
        try:
            async with asyncio.timeout(self.settings.dial_timeout_s):
                offer = decode(Offer, await self._ask(peer))
                hosts = await self._where(peer)
                if not hosts:
                    raise OSError("no direct connection to it is known")
                await self._connect(peer, known, hosts[0], offer)
        except (OSError, TimeoutError, ValueError, DhtError) as error:
            silent = f"silent for {self.settings.dial_timeout_s:g} s"
            self._failed(peer, known, str(error) or silent)
        finally:
            known.dials -= 1

    async def _connect(self, peer: PeerId, known: _Peer, host: str, offer: Offer) -> None:
        loop = asyncio.get_running_loop()
        connection = _Connection(self, dialled=True)
        connection.peer = peer
        stream = connection.stream
        ticket = Ticket(peer, offer.dialler_key, offer.listener_key)
        try:
            await loop.create_connection(lambda: stream, host, offer.port)
            stream.write_raw(bytes((NUMBER_BYTES,)) + offer.number)
            stream.seal(ticket.seals(dialled=True))
            stream.write_preamble(encode(Begin()))
            answer = decode(Answer, await connection.next_preamble())
            if answer.refused:
                raise ValueError(answer.refused)
        except BaseException:
            stream.cut()
            raise
        stream.expect_preamble(connection.on_preamble)
        known.dialled.add(connection)
        known.failures, known.not_before = 0, 0.0
        self.counters["dialled"] += 1
        self._keep(connection)

    def _failed(self, peer: PeerId | None, known: _Peer, reason: str) -> None:
        """Leave the peer alone for a while."""
        _logger.debug("lane_not_open peer=%s reason=%r", peer, reason)
        known.reason = reason
        self.counters["dials_failed"] += 1
        pause_s = min(self.settings.retry_first_s * 2**known.failures, self.settings.retry_max_s)
        known.failures = min(known.failures + 1, 16)
        known.not_before = self._now + pause_s

    def _keep(self, connection: _Connection) -> None:
        """For the next stream."""
        known = self._peers.get(connection.peer) if connection.peer is not None else None
        seals = connection.stream.seals
        worn = seals is None or seals.worn
        if known is None or connection not in known.dialled or self._closed or worn:
            connection.stream.cut()
            return
        known.idle.append(connection)
        self._rest(connection)

    def _rest(self, connection: _Connection) -> None:
        """Nobody uses it now, and nobody may for too long."""
        most_s = self.settings.idle_max_s * (1 if connection.dialled else 2)
        loop = asyncio.get_running_loop()
        connection.resting = loop.call_later(most_s, connection.cut)

    def _lost(self, connection: _Connection) -> None:
        """The connection is gone."""
        connection.wake()
        self._sent_before += connection.sent_bytes
        self._served.pop(connection, None)
        known = self._peers.get(connection.peer) if connection.peer is not None else None
        if known is not None:
            known.dialled.discard(connection)
            with contextlib.suppress(ValueError):
                known.idle.remove(connection)

"""The direct lane: bulk streams over TCP connections of our own, beside the libp2p daemon.

The daemon moves each byte through two more processes, which costs more processor time than a
round's arithmetic. Therefore a peer that can be dialled listens on one more TCP port. A peer that
wants to send bulk data asks for that port and for a ticket over libp2p, which authenticates both
peers and encrypts the answer. A ticket is a pair of secret keys for one connection. The sender
dials the port at an address at which the daemon is connected to that peer, never at an address that
another peer names, and sends the ticket's number; from then on every frame is sealed with those
keys. So both ends are authenticated as surely as over libp2p, without another handshake.

Where neither end can be dialled, or the other end dialled out and lets nobody in, both dial each
other at once, or a third peer that passes the sealed frames on (``dht.libp2p.lane.meetings``). A
path that fails gives way to the next one; the better ones are tried again later, after longer and
longer pauses.

A connection carries one stream at a time, and is kept for the next one. If no connection can be had
at once, the stream goes through the daemon, and the peer is dialled again later.

Reasons against the daemon and against TLS, as seconds in which two processes on two cores send 60
MB to each other at once, and CPU seconds: daemon streams 0.30 (0.51), TLS on uvloop 0.14 (0.25),
sealed frames on plain TCP 0.07 (0.12), plain TCP 0.04 (0.08). Python's TLS cuts everything into 16
KB records with a copy each; a frame of half a megabyte is sealed in one call. TLS has nothing to
add, because libp2p has authenticated both ends already.

This module knows neither libp2p nor the purpose of the streams; see ``dht.libp2p.hivemind_host``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from ipaddress import ip_address
from itertools import chain
from typing import Any

from dht.addresses import place_of
from dht.errors import DhtError, HostClosed
from dht.host import Tasks
from dht.identity import PeerId
from dht.libp2p.framing.frame_stream import FrameStream
from dht.libp2p.framing.sealing import NUMBER_BYTES, Ticket, Tickets
from dht.libp2p.lane.connection import (
    CONNECT_S,
    CONNECTIONS_MAX,
    MEET_AGAIN_FIRST_S,
    MEET_AGAIN_MAX_S,
    RETRY_MAX_S,
    TICKET_LIFE_S,
    Connection,
    LaneSettings,
    Outside,
    Partner,
    Path,
)
from dht.libp2p.lane.pacing import Pacer
from dht.libp2p.lane.port_mapping import keep_mapped
from dht.libp2p.lane.relaying import Relay, connected
from dht.libp2p.lane.wire import (
    LANE_PROTOCOL,
    REASON_MAX,
    Answer,
    Begin,
    Circuit,
    LaneOffer,
    Leg,
    decode,
    encode,
)
from dht.limits import Place, Places

_logger = logging.getLogger("dht.libp2p.lane.lane")

PEERS_MAX = 256
"""Number of peers whose dial results are remembered; the longest unused one is forgotten."""

BACKLOG = 16
PACK_BELOW_BYTES_S = 30e6
"""Frames are packed until a line delivers more than this: it takes a fifth of a processor there."""

Meet = Callable[[PeerId, Partner], Awaitable[None]]
"""Opens a connection with a peer that cannot be dialled. Raises as ``Outside`` and ``OSError``."""


async def nowhere(peer: PeerId, known: Partner) -> None:
    """The way to meet of a lane that has none."""
    raise OSError("no direct connection to it is known")


Serve = Callable[[FrameStream, str], str | None]
"""Serves an incoming stream of this protocol, or returns the reason of a refusal."""


class Lane:
    """One host's direct connections with others. Opened and closed by the host."""

    def __init__(
        self,
        settings: LaneSettings,
        *,
        outside: Outside,
        serve: Serve,
        prefers: Callable[[PeerId], object] = lambda peer: False,
    ) -> None:
        """``prefers``: peers that go before others when there are too many connections."""
        self.settings = settings
        self.relay = Relay(prefers)
        """Passes bytes on for other peers, if the owner of this machine consents."""

        self.meet: Meet = nowhere
        """Opens connections that cannot be dialled (``dht.libp2p.lane.meetings``)."""

        self.counters: Counter[str] = Counter()
        self._outside = outside
        self._serve = serve
        self._tickets = Tickets(life_s=TICKET_LIFE_S, tickets_max=4 * CONNECTIONS_MAX)
        self._listeners: list[socket.socket] = []
        self._mapped_port: int | None = None
        """Port of the router's public address that leads to this lane."""

        self._peers: OrderedDict[PeerId, Partner] = OrderedDict()
        self._served: dict[Connection, None] = {}
        """Connections that other peers have dialled."""

        self._strangers: dict[Connection, tuple[socket.socket, Place[str]]] = {}
        """Those whose peer is not known yet."""

        # Who has a ticket shows it at once. So a flood from few addresses drops only its own
        # connections, and one from many has to be as quick as an honest peer's round trip.
        self._arriving = Places[Place[str]](settings.strangers_max, math.inf, newest_first=True)
        """The addresses of strangers."""

        self._places = Places[Place[PeerId]](
            CONNECTIONS_MAX, settings.per_peer_max, prefers=prefers
        )
        """The peers of the others; only unused connections make room."""

        self._pacer = Pacer(self._sockets)
        self._sent_before = 0
        """Number of bytes sent on connections that are gone."""
        self._tasks = Tasks()
        self._closed = False

    @property
    def port(self) -> int | None:
        """The port it listens on; ``None`` if it only dials."""
        if not self._listeners:
            return None
        port: int = self._listeners[0].getsockname()[1]
        return port

    @property
    def told_port(self) -> int | None:
        """The port that other peers are told to dial."""
        return self.settings.told_port or self._mapped_port or self.port

    async def _port_for(self, peer: PeerId) -> int:
        """The port that a connected peer is told. Raises ``ValueError`` if there is none.

        A neighbour does not come through the router, nor does a peer that is connected over IPv6.
        """
        port = self.told_port
        if self._mapped_port is not None and self.settings.told_port is None:
            at = [ip_address(host) for host in await self._outside.where(peer)]
            near = bool(at) and (at[0].version == 6 or at[0].is_private)
            port = self.port if near else port
        if port is None or self._closed:
            raise ValueError("it does not listen for a direct lane")
        return port

    def map_port(self, router: str) -> None:
        """Have this router lead a port of its public address to the lane's, until it is closed."""
        if self.port is not None and self.settings.told_port is None:
            work = keep_mapped(router, self.port, self._port_mapped)
            self.spawn(work, "lane port mapping")

    def _port_mapped(self, port: int | None) -> None:
        self._mapped_port = port

    def _all(self) -> Iterator[Connection]:
        """All connections, those that other peers have dialled first."""
        return chain(self._served, *(partner.dialled for partner in self._peers.values()))

    def paths(self) -> dict[PeerId, Path]:
        """The best path by which each connected peer is connected."""
        found: dict[PeerId, Path] = {}
        for connection in self._all():
            if connection.peer is not None:
                best = found.get(connection.peer, Path.RELAYED)
                found[connection.peer] = min(best, connection.path)
        return found

    def paths_by_name(self) -> dict[str, int]:
        """Number of connected peers by the name of the best path, in lower case."""
        counts = Counter(self.paths().values())
        return {path.name.lower(): counts[path] for path in Path}

    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent in frames since the lane was opened."""
        return self._sent_before + sum(each.sent_bytes for each in self._all())

    def _sockets(self) -> Iterator[tuple[Connection, socket.socket]]:
        for connection in self._all():
            if (found := connection.stream.socket) is not None:
                yield connection, found

    def start(self, hosts: Sequence[str]) -> None:
        """Listen on these IP addresses, as far as possible. Without any, the lane only dials."""
        if self.settings.polite:
            self.spawn(self._pacer.run(), "lane pacer")
        for host in dict.fromkeys(hosts):
            port = self.port or self.settings.port
            try:
                listener = socket.create_server(
                    (host, port),
                    family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                    backlog=BACKLOG,
                )
            except OSError as error:
                # Everything works without a lane, only more slowly.
                _logger.warning("lane_not_listening at=%s:%d reason=%r", host, port, str(error))
                continue
            listener.setblocking(False)
            self._listeners.append(listener)
            _logger.info("lane_listening at=%s:%d", host, self.port)
            self.spawn(self._accept(listener), "lane accept")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.spawn(work, name)

    async def close(self) -> None:
        """Break every stream and end every connection."""
        self._closed = True
        self._tasks.cancel()
        await self._tasks.wait()
        await self.relay.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for dialled, _ in self._strangers.values():
            dialled.close()  # of a task that never began
        for connection in list(self._all()):
            connection.stream.cut()
        self._peers.clear()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    # --- being dialled ---------------------------------------------------------------------

    async def offer(self, peer: PeerId) -> bytes:
        """The ``LaneOffer`` for a peer that asks over the daemon. Raises ``ValueError``."""
        port = await self._port_for(peer)
        return encode(LaneOffer(self.issue(peer), port))

    def issue(self, peer: PeerId) -> Ticket:
        """A new ticket for a peer."""
        return self._tickets.issue(peer, now=self._now)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                dialled, seen = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or closed before it was accepted
                _logger.warning("lane_accept_failed reason=%r", str(error))
                await asyncio.sleep(1.0)
                continue
            connection = self.admit(dialled, Path.DIRECT)
            connection.seen = seen[0], seen[1]
            self.spawn(self.greet(connection, dialled), "lane greet")

    def admit(self, dialled: socket.socket, path: Path) -> Connection:
        """Make room for a connection of a peer that is not known yet."""
        connection = Connection(self, path, dialled=False)

        def drop() -> None:
            self.counters["refused"] += 1
            del self._served[connection], self._strangers[connection]
            with contextlib.suppress(OSError):
                dialled.shutdown(socket.SHUT_RDWR)  # it is read as an end

        arriving = Place(_place_at(dialled), drop)
        self._arriving.take(arriving)
        self._served[connection] = None
        self._strangers[connection] = dialled, arriving
        return connection

    def _is_known(self, connection: Connection) -> None:
        """A connection is no stranger's any more: its peer is known, or it is gone."""
        if (known := self._strangers.pop(connection, None)) is not None:
            self._arriving.leave(known[1])

    async def greet(self, connection: Connection, dialled: socket.socket) -> None:
        """Close a connection whose peer does not prove in time that it has a ticket's keys."""
        try:
            if await self._redeem(connection, dialled):
                await self._hear_proof(connection, dialled)
        finally:
            self._is_known(connection)
            if connection.peer is None:
                self._served.pop(connection, None)

    async def _hear_proof(self, connection: Connection, dialled: socket.socket) -> None:
        """Read from a connection that has named a ticket, until its peer has proved its keys."""
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

    async def _redeem(self, connection: Connection, dialled: socket.socket) -> bool:
        """Take the number with which a connection begins: that of a ticket.

        ``False``: it is closed, or the relay has it, as the number was that of a leg.
        """
        try:
            async with asyncio.timeout(self.settings.greet_timeout_s):
                number = await _number_from(dialled)
        except (OSError, TimeoutError):
            issued = None
        except asyncio.CancelledError:
            dialled.close()
            raise
        else:
            if self.relay.arrive(number, dialled):
                return False
            issued = self._tickets.redeem(number, now=self._now)
        if issued is None:
            self.counters["turned_away"] += 1
            dialled.close()
            return False
        connection.claimed, ticket = issued
        connection.stream.seals = ticket.seals(dialled=False)
        return True

    def _hear_stranger(self, connection: Connection, peer: PeerId) -> str | None:
        """Take the sealed preamble of a dialling peer, which proves that it has the keys.

        Returns the reason of a refusal, if any.
        """
        stream, place = connection.stream, Place(peer)
        if self._places.held(peer) >= self._places.of_each:
            return f"more than {self._places.of_each} connections with {peer}"
        if not self._places.take(place):
            self.counters["refused"] += 1
            return f"more than {self._places.in_all} connections"
        connection.peer, connection.place = peer, place
        self._is_known(connection)
        connection.greeted.set()
        self.counters["accepted"] += 1
        self.rest(connection)
        stream.expect_preamble()
        ip, port = connection.seen
        stream.write_preamble(encode(Answer(seen_ip=ip, seen_port=port)))
        return None

    def heard(self, connection: Connection, message: bytes) -> None:
        """Take a preamble of the dialling side, which begins a stream once it is identified."""
        stream, peer = connection.stream, connection.peer
        connection.wake()
        try:
            begin = decode(Begin, message)
        except ValueError as error:
            _logger.debug("lane_cut peer=%s reason=%r", peer, str(error))
            self.counters["cut"] += 1
            stream.cut()
            return
        if peer is None:
            assert connection.claimed is not None
            refusal = self._hear_stranger(connection, connection.claimed)
            if refusal is not None:
                _logger.debug("lane_turned_away reason=%r", refusal)
                stream.cut()
            return
        stream.introduce(peer, relayed=False)
        stream.packs = self._packs(connection)
        refusal = self._serve(stream, begin.protocol)
        if refusal is None:
            self.counters["streams_served"] += 1
        else:
            self.rest(connection)
            stream.expect_preamble()
        stream.write_preamble(encode(Answer((refusal or "")[:REASON_MAX])))

    def _packs(self, connection: Connection) -> bool:
        """Say whether large frames are packed on the next stream of a connection."""
        return connection.is_far and self._pacer.pace.best < PACK_BELOW_BYTES_S

    # --- dialling --------------------------------------------------------------------------

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> FrameStream | None:
        """A stream, or ``None`` if the caller has to use the daemon. Never fails.

        It may take ``answer_timeout_s`` longer: a connection that comes at the last moment is used.
        """
        deadline = self._now + timeout_s
        known, was_doubted = self._known(peer), self.is_doubted(peer)
        stream = await self._open_kept(known, protocol)
        # A kept connection that is silent may only be stale, as routers forget and addresses
        # change. The peer is dialled once more before it is left alone.
        if stream is not None or was_doubted or self._closed:
            return stream
        if len(known.dialled) + known.dials < self.settings.per_peer_max:
            known.dials += 1
            dialling = self.spawn(self._dial(peer, known), f"lane to {peer}")
            wait_s = min(self.settings.wait_s, deadline - self._now)
            await asyncio.wait((dialling,), timeout=wait_s)
            if known.must_meet:  # a relay, which is the other path, carries no bulk
                await asyncio.wait((dialling,), timeout=max(0.0, deadline - self._now))
            return await self._open_kept(known, protocol)
        return None

    async def reach(self, peer: PeerId) -> str | None:
        """Make sure of an unused connection, regardless of earlier failures.

        Returns the reason of a failure, if any.
        """
        known = self._known(peer)
        if not known.idle:
            known.dials += 1
            await self._dial(peer, known)
        return None if known.idle else known.reason

    def has_connection(self, peer: PeerId) -> bool:
        """Say whether there is a connection that was dialled to this peer, used or unused."""
        known = self._peers.get(peer)
        return known is not None and bool(known.dialled)

    def is_doubted(self, peer: PeerId) -> bool:
        """Say whether a dial of this peer failed lately, so that it is not dialled for now."""
        known = self._peers.get(peer)
        return known is not None and self._now < known.not_before

    def forget(self, peer: PeerId) -> None:
        """Close all connections that were dialled to this peer."""
        known = self._peers.pop(peer, None)
        for connection in list(known.dialled) if known is not None else ():
            connection.stream.cut()

    def _known(self, peer: PeerId) -> Partner:
        known = self._peers.setdefault(peer, Partner())
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_MAX:
            self.forget(next(iter(self._peers)))
        return known

    async def _open_kept(self, known: Partner, protocol: str) -> FrameStream | None:
        """Begin a stream on an unused connection, if there is one."""
        while known.idle:
            connection = known.idle.pop()
            connection.wake()
            stream = connection.stream
            try:
                async with asyncio.timeout(self.settings.answer_timeout_s):
                    stream.write_preamble(encode(Begin(protocol)))
                    answer = decode(Answer, await connection.next_preamble())
            except ConnectionError:
                continue  # it had just been closed
            except (TimeoutError, ValueError):
                stream.cut()
                # The other connections lead to the same peer and are no better.
                for other in known.idle:
                    other.stream.cut()
                known.idle.clear()
                self._failed(connection.peer, known, "it does not answer any more")
                await asyncio.sleep(0)  # until then they count as connections with the peer
                return None
            except asyncio.CancelledError:
                stream.cut()
                raise
            if answer.refused:
                stream.expect_preamble()
                self.keep(connection)
                return None
            assert connection.peer is not None
            stream.introduce(connection.peer, relayed=False)
            stream.packs = self._packs(connection)
            self.counters["streams_opened"] += 1
            return stream
        return None

    async def _dial(self, peer: PeerId, known: Partner) -> None:
        """Open a connection; the next stream that needs one takes it."""
        try:
            async with asyncio.timeout(self.settings.dial_timeout_s):
                hosts = await self._outside.where(peer)
                known.must_meet = not hosts
                if hosts and await self._dial_direct(peer, known, hosts[0]):
                    return
            await self.meet(peer, known)
        except HostClosed as error:
            known.reason = str(error)  # our own daemon is being restarted: no fault of the peer's
        except (OSError, TimeoutError, ValueError, DhtError) as error:
            silent = f"silent for {self.settings.dial_timeout_s:g} s"
            known.lets_none_in = False
            self._failed(peer, known, str(error) or silent)
        finally:
            known.dials -= 1

    async def _dial_direct(self, peer: PeerId, known: Partner, host: str) -> bool:
        """Dial the lane of a peer. ``False``: its router lets nobody in, so it has to be met."""
        if known.lets_none_in:
            return False
        offer = decode(LaneOffer, await self._outside.call(peer, LANE_PROTOCOL, b""))
        try:
            async with asyncio.timeout(CONNECT_S):
                dialled = await connected(host, offer.port)
        except (OSError, TimeoutError):
            known.lets_none_in = True
            return False
        await self.introduce(peer, known, dialled, offer.ticket, Path.DIRECT)
        return True

    async def introduce(
        self, peer: PeerId, known: Partner, dialled: socket.socket, ticket: Ticket, path: Path
    ) -> None:
        """Prove this side's identity on a new connection, and keep it if the other side does."""
        connection = Connection(self, path, dialled=True)
        await connection.show(dialled, ticket)
        connection.peer = peer
        connection.stream.expect_preamble()
        known.dialled.add(connection)
        known.failures, known.not_before = 0, 0.0
        self.counters["dialled"] += 1
        self.keep(connection)

    # --- peers behind routers --------------------------------------------------------------

    async def grant(self, peer: PeerId, request: bytes) -> bytes:
        """Answer ``Circuit`` as a relay: a leg for the asking peer. Raises ``ValueError``."""
        circuit = decode(Circuit, request)
        port = await self._port_for(peer)
        leg = await self.relay.admit(peer, PeerId(circuit.other), circuit.number)
        return encode(Leg(port, leg))

    def is_shut(self, peer: PeerId) -> bool:
        """Say whether this peer could not be dialled lately."""
        known = self._peers.get(peer)
        return known is not None and (known.lets_none_in or self.is_doubted(peer))

    def _failed(self, peer: PeerId | None, known: Partner, reason: str) -> None:
        """Note a failure: the peer is not dialled for a while."""
        _logger.debug("lane_not_open peer=%s reason=%r", peer, reason)
        known.reason = reason
        self.counters["dials_failed"] += 1
        first_s, most_s = self.settings.retry_first_s, RETRY_MAX_S
        if known.must_meet:  # there is no other path for its bulk data
            first_s, most_s = MEET_AGAIN_FIRST_S, MEET_AGAIN_MAX_S
        pause_s = min(first_s * 2**known.failures, most_s)
        known.failures = min(known.failures + 1, 16)
        known.not_before = self._now + pause_s

    def keep(self, connection: Connection) -> None:
        """Keep a connection for the next stream, or close it if it cannot be used again."""
        known = self._peers.get(connection.peer) if connection.peer is not None else None
        seals = connection.stream.seals
        worn = seals is None or seals.worn
        if known is None or connection not in known.dialled or self._closed or worn:
            connection.stream.cut()
            return
        known.idle.append(connection)
        self.rest(connection)

    def rest(self, connection: Connection) -> None:
        """Start the timer that closes a connection that stays unused."""
        most_s = self.settings.idle_max_s * (1 if connection.dialled else 2)
        connection.resting = asyncio.get_running_loop().call_later(most_s, connection.cut)
        if connection.place is not None:
            connection.place.end = connection.cut
            self._places.used(connection.place)

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        connection.wake()
        self._sent_before += connection.sent_bytes
        self._served.pop(connection, None)
        if connection.place is not None:
            self._places.leave(connection.place)
        known = self._peers.get(connection.peer) if connection.peer is not None else None
        if known is not None:
            known.dialled.discard(connection)
            with contextlib.suppress(ValueError):
                known.idle.remove(connection)


def _place_at(dialled: socket.socket) -> str:
    """The address at the other end, or its IPv6 network; empty if it is gone."""
    try:
        return place_of(dialled.getpeername()[0])
    except OSError:
        return ""


async def _number_from(dialled: socket.socket) -> bytes:
    """The number with which a new connection begins. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    dialled.setblocking(False)
    got = b""
    while len(got) <= NUMBER_BYTES:
        part = await loop.sock_recv(dialled, 1 + NUMBER_BYTES - len(got))
        if not part or (got + part)[0] != NUMBER_BYTES:
            raise ConnectionError("it did not begin with a number")
        got += part
    return got[1:]

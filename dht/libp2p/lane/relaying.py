"""Relaying of bulk connections for two peers that cannot connect to each other.

Where two routers let no direct connection through, both ends dial a third peer, the relay, which
passes the bytes on. Each end asks the relay for its leg over libp2p, which authenticates it, so
nobody joins a circuit in another's name; the relay judges the pair before it admits either end.
The keys of the frames are exchanged by the two ends over libp2p, so the relay carries ciphertext
and can neither read nor change it unnoticed (``dht.libp2p.framing.sealing``).

A relay acts with the consent of its owner only, within a rate for all circuits together.
``FairQueue`` shares the rate equally among pairs of peers, whatever number of circuits each has.
Memory is bounded: two chunks for each circuit, and the kernel's buffers at ``WINDOW_BYTES``. A
circuit is closed when either end closes its leg, or after ``IDLE_MAX_S`` without a byte. When all
places are taken, the peer that has asked for the most circuits makes room, and one that is
preferred after all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dht.host import report
from dht.identity import PeerId
from dht.libp2p.framing.sealing import NUMBER_BYTES
from dht.limits import FairQueue, Place, Places
from dht.wrapped_host import Gate

JOINED = b"\x01"
"""Sent to both ends once both legs are there."""

CIRCUITS_MAX = 64
PER_PEER_MAX = 16
JOIN_S = 10.0
"""Time for both ends to come."""

IDLE_MAX_S = 300.0
CHUNK_BYTES = 64 * 1024
WINDOW_BYTES = 1 << 20
"""Limit of the bytes that a leg's kernel buffer takes in: 80 Mbit/s at 100 ms."""

UNSENT_BYTES = 2 * CHUNK_BYTES
TCP_WINDOW_CLAMP = 10
"""Socket option of Linux that the ``socket`` module lacks."""

NO_BULK = "this peer does not relay bulk data"
"""Refusal of a peer whose owner does not let it relay."""

MEMBERS_ONLY = "it relays for members of one run alone"
"""Beginning of the refusal of a relay that does not know both ends as such."""

Pair = tuple[PeerId, PeerId]

Judge = Callable[[PeerId, PeerId], Awaitable[str | None]]
"""Gives the reason why nothing is relayed between two peers; ``None`` if it is."""

Meter = Callable[[int], Awaitable[None]]
"""Counts bytes that pass, and waits where the owner limits the traffic of this machine."""


async def nobody(peer: PeerId, other: PeerId) -> str | None:
    """The judge of a relay that was given none."""
    return f"{MEMBERS_ONLY}, and knows no run"


async def _unmetered(count: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Circuit:
    """The connection of two peers through this one."""

    pair: Pair
    place: Place[PeerId]
    """That of the peer which asked for it first."""

    legs: dict[PeerId, bytes] = field(default_factory=dict)
    """The number that each end was given."""

    sockets: list[socket.socket] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    active_at: float = 0.0
    """Time of the last byte, or of the first request."""


class Relay:
    """The circuits through this machine. It refuses all while ``rate`` is ``None``."""

    def __init__(self, prefers: Callable[[PeerId], object] = lambda peer: False) -> None:
        """``prefers``: peers whose circuits go before those of others when there are too many."""
        self.judge: Judge = nobody
        self.meter: Meter = _unmetered
        self.counters: Counter[str] = Counter()
        """``bytes`` passed on, ``circuits`` joined, ``refused`` requests."""

        self.rate: float | None = None
        """Bytes per second that it passes on; ``None``: it does not relay."""

        self._gate = Gate()
        self._circuits: dict[tuple[Pair, bytes], _Circuit] = {}
        self._legs: dict[bytes, _Circuit] = {}
        """Circuits by the number of a leg that has not come yet."""

        self._places = Places[Place[PeerId]](CIRCUITS_MAX, PER_PEER_MAX, prefers=prefers)
        self._queue = FairQueue[Pair, asyncio.Future[None]]()
        self._serving: asyncio.Task[None] | None = None
        self._carrying: dict[_Circuit, asyncio.Task[None]] = {}

    def set_rate(self, rate: float | None) -> None:
        """Change the rate at once. Without one, every circuit is closed."""
        if rate == self.rate:
            return
        self.rate = rate
        if rate is None:
            for task in self._carrying.values():
                task.cancel()
        else:
            self._gate.set_rate(rate)

    @property
    def circuits(self) -> int:
        """Number of circuits, with those whose ends have yet to come."""
        return len(self._circuits)

    async def admit(self, peer: PeerId, other: PeerId, number: bytes) -> bytes:
        """Number of the leg of ``peer`` to a circuit. Raises ``ValueError`` to refuse."""
        try:
            if self.rate is None:
                raise ValueError(NO_BULK)
            if peer == other:
                raise ValueError("a circuit has two different ends")
            if (reason := await self.judge(peer, other)) is not None:
                raise ValueError(reason)
            pair = min(peer, other), max(peer, other)
            circuit = self._circuits.get((pair, number))
            if circuit is not None and peer in circuit.legs:
                raise ValueError("this end of the circuit was asked for already")
            # What others ask for takes none of a peer's places.
            if self._places.held(peer) >= self._places.of_each:
                raise ValueError(f"this peer relays {self._places.of_each} of yours already")
            circuit = circuit or self._begin(peer, pair, number)
        except ValueError:
            self.counters["refused"] += 1
            raise
        circuit.legs[peer] = leg = secrets.token_bytes(NUMBER_BYTES)
        self._legs[leg] = circuit
        return leg

    def _begin(self, peer: PeerId, pair: Pair, number: bytes) -> _Circuit:
        """Begin a circuit for which ``peer`` is the first to ask. Raises ``ValueError``."""
        place = Place(peer)
        if not self._places.take(place):
            raise ValueError(f"this peer relays {self._places.in_all} connections already")
        circuit = _Circuit(pair, place, active_at=asyncio.get_running_loop().time())
        self._circuits[pair, number] = circuit
        carrying = asyncio.create_task(self._carry(circuit), name=f"circuit {pair}")
        self._carrying[circuit] = carrying
        carrying.add_done_callback(lambda task: self._ended(circuit, number, task))
        place.end = carrying.cancel
        return circuit

    def _used(self, circuit: _Circuit) -> None:
        """Note that a byte passed just now."""
        circuit.active_at = asyncio.get_running_loop().time()
        self._places.used(circuit.place)

    def _ended(self, circuit: _Circuit, number: bytes, task: asyncio.Task[None]) -> None:
        del self._carrying[circuit]
        del self._circuits[circuit.pair, number]
        for leg in circuit.legs.values():
            self._legs.pop(leg, None)
        self._places.leave(circuit.place)
        for each in circuit.sockets:
            each.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            report("relaying failed", error)

    def arrive(self, number: bytes, leg: socket.socket) -> bool:
        """Take the connection of an end that shows this number; ``False`` if nobody has it."""
        circuit = self._legs.pop(number, None)
        if circuit is None:
            return False
        leg.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, AttributeError):  # of Linux: memory is bounded by it
            leg.setsockopt(socket.IPPROTO_TCP, TCP_WINDOW_CLAMP, WINDOW_BYTES)
            leg.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        circuit.sockets.append(leg)
        if len(circuit.sockets) == 2:
            circuit.complete.set()
        return True

    async def _carry(self, circuit: _Circuit) -> None:
        """Wait for both ends, then pass bytes on until one of them is gone or both are silent."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(JOIN_S):
                await circuit.complete.wait()
                for each in circuit.sockets:
                    await loop.sock_sendall(each, JOINED)
        except (TimeoutError, OSError):
            return
        self.counters["circuits"] += 1
        self._used(circuit)
        one, other = circuit.sockets
        pumps = {
            asyncio.create_task(self._pump(circuit, one, other)),
            asyncio.create_task(self._pump(circuit, other, one)),
        }
        try:
            done: set[asyncio.Task[None]] = set()
            while not done:
                idle_left_s = circuit.active_at + IDLE_MAX_S - loop.time()
                if idle_left_s <= 0:
                    break
                done, _ = await asyncio.wait(
                    pumps, timeout=idle_left_s, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)  # before their sockets are closed

    async def _pump(self, circuit: _Circuit, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        chunk = memoryview(bytearray(CHUNK_BYTES))
        with contextlib.suppress(OSError):  # an end is gone
            while count := await loop.sock_recv_into(source, chunk):
                self._used(circuit)
                await self._pass_through(circuit.pair, count)
                await loop.sock_sendall(target, chunk[:count])
                self._used(circuit)
                self.counters["bytes"] += count

    async def _pass_through(self, pair: Pair, count: int) -> None:
        """Wait until these bytes may pass, by the owner's limits and this pair's share."""
        await self.meter(count)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(pair, turn, count)
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="relay turns")
        await turn

    async def _serve(self) -> None:
        """Let requests pass at the rate, until none waits."""
        try:
            while self._queue:
                _, turn, size = self._queue.pop()
                if not turn.done():  # else its circuit is closed
                    await self._gate.pass_through(size)
                if not turn.done():
                    turn.set_result(None)
        finally:
            self._serving = None

    async def close(self) -> None:
        """Close every circuit."""
        self.rate = None
        tasks = [*self._carrying.values(), *((self._serving,) if self._serving is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def connected(host: str, port: int) -> socket.socket:
    """A TCP connection to an IP address. Raises ``OSError``."""
    dialling = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    dialling.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(dialling, (host, port))
    except BaseException:
        dialling.close()
        raise
    return dialling


async def reach_through(ip: str, port: int, leg: bytes) -> socket.socket:
    """A connection to the other end of a circuit through a relay. Raises ``OSError``."""
    loop, made = asyncio.get_running_loop(), await connected(ip, port)
    try:
        await loop.sock_sendall(made, bytes((NUMBER_BYTES,)) + leg)
        if await loop.sock_recv(made, 1) != JOINED:
            raise OSError("the relay closed the connection before the other end came")
    except BaseException:
        made.close()
        raise
    return made

"""The in-memory network: hosts on a virtual clock and a simulated network.

``run`` runs a coroutine on virtual time; in it, ``MemoryNetwork`` makes hosts that communicate with
each other. They keep the same contract as the real ones (``tests/contract``) in any weather, and
the same seed gives the same events:

    async def main() -> None:
        network = MemoryNetwork(Weather(connection_loss=0.02))
        anna, boris = network.host("anna"), network.host("boris")
        await anna.connect(boris.peer_id, await boris.addresses(), timeout_s=5.0)
        network.partition([[anna.peer_id]])

    run(main(), seed=7)

Not simulated: relays (``relayed`` is always false), and the routing of the directory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.errors import CallRefused, HostClosed, PeerUnreachable
from dht.host import UNARY_MAX_BYTES, CallHandler, Connection, Served, StreamHandler, Tasks
from dht.identity import Identity, PeerId, Signer
from dht.memory.directory import MemoryDirectory
from dht.memory.network import CALM, REPEATED_WITHIN_S, OrderedChannel, SimulatedNetwork, Weather
from dht.memory.stream import MemoryStream
from dht.memory.virtual_loop import running_loop
from dht.record_keeper import RecordKeeper

EPOCH = 1_750_000_000.0
"""Unix time of a correct clock at the beginning of virtual time."""

DIAL_TIMEOUT_S = 5.0
HANDSHAKE_BYTES = 500
CALL_OVERHEAD_BYTES = 100
STRANGERS_PORT = 50_000
FORGET_AFTER_S = 30.0
"""Time after which the directories' routing tables drop nodes beyond a partition."""


def identity_of(name: str) -> Identity:
    """The identity of a name, always the same: for tests and simulations."""
    return Identity.from_seed(blake2b(name.encode(), digest_size=32).digest())


class MemoryNetwork:
    """Makes hosts and controls the network between them. Belongs to one ``VirtualLoop``."""

    def __init__(
        self, weather: Weather = CALM, *, seed: int | None = None, bulk_factor: float = 1.0
    ) -> None:
        """``bulk_factor``: weight of bulk streams (``dht.memory.stream``)."""
        loop = running_loop()
        self.bulk_factor = bulk_factor
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that were sent on streams, by protocol."""
        self.heap = loop.heap
        self.simulated = SimulatedNetwork(self.heap, weather, loop.seed if seed is None else seed)
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._listening: dict[Multiaddr, PeerId] = {}
        self._address_of: dict[PeerId, Multiaddr] = {}
        self._addresses_given = 0
        self._wires: dict[_Wire, None] = {}
        self._partitioned_at: float | None = None
        self._strangers = 0

    def host(
        self,
        identity: Signer | str,
        *,
        keeper: RecordKeeper | None = None,
        wall_offset_s: float = 0.0,
    ) -> MemoryHost:
        """Make a host on a machine of its own. A name stands for ``identity_of(name)``.

        An identity can be used again once its former host is closed or crashed; the new host has
        the same address and an empty memory.
        """
        if isinstance(identity, str):
            identity = identity_of(identity)
        peer = identity.peer_id
        if peer in self._hosts:
            raise ValueError(f"{peer} has a host that is still open")
        self.simulated.restart(peer)
        if peer not in self._address_of:
            self.move(peer)
        host = MemoryHost(
            self, identity, keeper or RecordKeeper(salt=identity.peer_id.encode()), wall_offset_s
        )
        self._hosts[peer] = host
        return host

    def move(self, peer: PeerId) -> None:
        """Give a peer an address, in place of the one that it may have. Connections stay."""
        number = self._addresses_given
        self._addresses_given += 1
        ip = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.place(peer, Multiaddr(f"/ip4/{ip}/tcp/7700"))

    @asynccontextmanager
    async def stranger(self, owner: PeerId) -> AsyncIterator[MemoryHost]:
        """A host of a new identity on the machine of another one; see ``dht.host.Host``."""
        self._strangers += 1
        identity = identity_of(f"stranger {self._strangers}")
        peer = identity.peer_id
        ip, _, _ = str(self._address_of[owner]).rpartition("/")
        self.place(peer, Multiaddr(f"{ip}/{STRANGERS_PORT + self._strangers % 1000}"))
        self.simulated.put_beside(peer, owner)
        try:
            async with self.host(identity) as host:
                yield host
        finally:
            del self._listening[self._address_of.pop(peer)]

    def address_of(self, peer: PeerId) -> Multiaddr:
        """The address of a peer that has or had a host."""
        return self._address_of[peer]

    def full_address_of(self, peer: PeerId) -> Multiaddr:
        """The address of a peer that has or had a host, with its name."""
        return address_rules.with_peer(self._address_of[peer], peer)

    def place(self, peer: PeerId, address: Multiaddr) -> None:
        """Set the address of a peer, whether or not its host is open yet."""
        old = self._address_of.get(peer)
        if old is not None:
            del self._listening[old]
        self._listening[address] = peer
        self._address_of[peer] = address

    def partition(self, groups: Sequence[Iterable[PeerId]]) -> None:
        """Cut every path between the groups; see ``SimulatedNetwork.partition``.

        After ``FORGET_AFTER_S`` the directories forget the other side, too.
        """
        self.simulated.partition(groups)
        self._partitioned_at = self.heap.now
        self.heap.call_in(FORGET_AFTER_S, self._forget_the_other_side, self.heap.now)
        self._watch_silence()

    def heal(self) -> None:
        """End the partition. Forgotten peers have to be introduced again."""
        self.simulated.heal()
        self._partitioned_at = None
        self._watch_silence()

    def crash(self, peer: PeerId) -> None:
        """Switch a machine off without a goodbye. ``host`` starts it again."""
        self.simulated.crash(peer)
        host = self._hosts.get(peer)
        if host is not None:
            host._end("it crashed")

    # --- broken connections ----------------------------------------------------------------

    def _forget_the_other_side(self, partitioned_at: float) -> None:
        if self._partitioned_at != partitioned_at:
            return
        for host in self._hosts.values():
            host.directory.neighbourhood.split(self.simulated)

    def _watch_silence(self) -> None:
        """Find the connections that a partition cuts, and break them if it still does after a
        while."""
        now = self.heap.now
        for wire in self._wires:
            one, other = wire.hosts
            if self.simulated.connected(one.peer_id, other.peer_id):
                wire.hangs_since = None
            elif wire.hangs_since is None:
                wire.hangs_since = now
                self.heap.call_in(
                    self.simulated.weather.silence_s, self._break_if_silent, wire, now
                )

    def _break_if_silent(self, wire: _Wire, since: float) -> None:
        if wire.hangs_since == since:
            for host in wire.hosts:
                wire.break_at(host, "silence on the connection")

    def _connect(self, dialler: MemoryHost, listener: MemoryHost) -> None:
        """Register a connection at both hosts, after the handshake."""
        old = dialler._wires.get(listener.peer_id)
        if old is not None and listener._wires.get(dialler.peer_id) is old:
            return  # they dialled each other at the same time
        wire = _Wire(self, dialler, listener)
        self._wires[wire] = None
        for host, other in ((dialler, listener), (listener, dialler)):
            host._wires[other.peer_id] = wire
            host._address_book[other.peer_id] = (self._address_of[other.peer_id],)
        dialler.directory.introduce(listener.directory)


class _Wire:
    """A connection between two hosts. Each notices by itself that it is broken."""

    def __init__(self, network: MemoryNetwork, dialler: MemoryHost, listener: MemoryHost) -> None:
        self._network = network
        self.hosts = (dialler, listener)
        self.hangs_since: float | None = None
        self._open = [True, True]
        silence = "silence on the connection"
        self._silent = tuple(partial(self.break_at, host, silence) for host in self.hosts)
        self._cut = False  # it broke, and neither side has noticed yet
        self._calls: tuple[dict[int, asyncio.Future[_Reply]], ...] = ({}, {})
        self._streams: tuple[dict[MemoryStream, None], ...] = ({}, {})
        self._calls_made = 0

    def other(self, host: MemoryHost) -> MemoryHost:
        return self.hosts[1 - self._side(host)]

    def _side(self, host: MemoryHost) -> int:
        return 0 if host is self.hosts[0] else 1

    def send(
        self,
        sender: MemoryHost,
        size_bytes: int,
        deliver: Callable[[], object],
        channel: OrderedChannel | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Send a message. If it shows that the connection is broken, break it at the sender."""
        side = 0 if sender is self.hosts[0] else 1
        if self._cut or not self._open[side]:
            return
        simulated, receiver = self._network.simulated, self.hosts[1 - side]
        if simulated.chance(simulated.weather.connection_loss):
            round_trip_s = 2 * simulated.latency_s(sender.peer_id, receiver.peer_id)
            reason = "the connection was lost"
            self._network.heap.call_in(round_trip_s, self.break_at, sender, reason)
            self._cut = True
            if simulated.rng.random() < 0.5:
                return
        simulated.send(
            sender.peer_id,
            receiver.peer_id,
            size_bytes,
            partial(self._arrive, 1 - side, deliver),
            self._silent[side],
            channel=channel,
            delay_s=delay_s,
        )

    def _arrive(self, side: int, deliver: Callable[[], object]) -> None:
        if self._open[side]:
            deliver()
        elif not self._cut:
            self._tell_broken(self.hosts[side], self.hosts[1 - side])

    def break_at(self, host: MemoryHost, reason: str) -> None:
        """Break the connection at one side; the other side notices in its own time."""
        side = self._side(host)
        if not self._open[side]:
            return
        self._open[side] = False
        other = self.hosts[1 - side]
        if host._wires.get(other.peer_id) is self:
            del host._wires[other.peer_id]
        calls, streams = self._calls[side], self._streams[side]
        for reply in list(calls.values()):
            if not reply.done():
                reply.set_result(_Reply(broken=reason))
        calls.clear()
        for stream in list(streams):
            stream.lose(reason)
        streams.clear()
        if self._open[1 - side]:
            self._tell_broken(host, other)
        else:
            self._network._wires.pop(self, None)

    def _tell_broken(self, host: MemoryHost, other: MemoryHost) -> None:
        """A reset, if it gets through; else the other side waits in vain for a while."""
        tell = partial(self.break_at, other, "the other side closed the connection")
        network = self._network
        reset_bytes = 40
        if network.simulated.is_up(host.peer_id):
            network.simulated.send(host.peer_id, other.peer_id, reset_bytes, tell)
        delay_s = network.simulated.weather.silence_s
        network.heap.call_in(delay_s, self.break_at, other, "silence on the connection")

    # Calls.

    def call(
        self, caller: MemoryHost, protocol: str, request: bytes
    ) -> tuple[int, asyncio.Future[_Reply]]:
        simulated = self._network.simulated
        callee = self.other(caller)
        self._calls_made += 1
        number = self._calls_made
        pending = self._calls[self._side(caller)]
        future = pending[number] = asyncio.get_running_loop().create_future()

        def answer(reply: _Reply) -> None:
            if simulated.chance(simulated.weather.calls_lost):
                return
            size_bytes = CALL_OVERHEAD_BYTES + len(reply.content)
            self.send(callee, size_bytes, lambda: _set(future, reply))

        def arrive() -> None:
            callee._spawn(
                callee._answer(caller.peer_id, protocol, request, answer), f"answer {protocol}"
            )

        if not simulated.chance(simulated.weather.calls_lost):
            size_bytes = CALL_OVERHEAD_BYTES + len(request)
            self.send(caller, size_bytes, arrive)
            if simulated.chance(simulated.weather.duplicate):
                delay_s = simulated.rng.random() * REPEATED_WITHIN_S
                self.send(caller, size_bytes, arrive, delay_s=delay_s)
        return number, future

    def forget_call(self, caller: MemoryHost, number: int) -> None:
        self._calls[self._side(caller)].pop(number, None)

    # Streams.

    def stream_pair(
        self, opener: MemoryHost, protocol: str, *, bulk: bool
    ) -> tuple[MemoryStream, MemoryStream]:
        """The opener's end and the other one."""
        weight = self._network.bulk_factor if bulk else 1.0

        def end(host: MemoryHost) -> MemoryStream:
            in_order = partial(self._send_in, OrderedChannel(), host, protocol)
            beside = partial(self.send, host)
            stream = MemoryStream(self.other(host).peer_id, in_order, beside, weight=weight)
            streams = self._streams[self._side(host)]
            streams[stream] = None
            stream.on_over.append(partial(streams.pop, stream, None))
            return stream

        mine, theirs = end(opener), end(self.other(opener))
        mine.other, theirs.other = theirs, mine
        return mine, theirs

    def _send_in(
        self,
        channel: OrderedChannel,
        sender: MemoryHost,
        protocol: str,
        size_bytes: int,
        deliver: Callable[[], object],
    ) -> None:
        self._network.sent_bytes[protocol] += size_bytes
        self.send(sender, size_bytes, deliver, channel)


@dataclass(frozen=True, slots=True)
class _Reply:
    content: bytes = b""
    refused: str | None = None
    broken: str | None = None


class MemoryHost:
    """``dht.host.Host`` on the simulated network. Made by ``MemoryNetwork.host``."""

    def __init__(
        self, network: MemoryNetwork, identity: Signer, keeper: RecordKeeper, wall_offset_s: float
    ) -> None:
        self._network = network
        self.peer_id = identity.peer_id
        self.directory = MemoryDirectory(
            identity.peer_id, keeper, network.simulated, network.address_of
        )
        self.keeper = keeper
        """Decides which records this node believes, and counts them."""

        self.wall_offset_s = wall_offset_s
        """Error of this machine's clock."""

        self._ended: str | None = None
        self._tasks = Tasks()
        self._served = Served(self._tasks)
        self._wires: dict[PeerId, _Wire] = {}
        self._address_book: dict[PeerId, tuple[Multiaddr, ...]] = {}

    async def __aenter__(self) -> MemoryHost:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def wall_time(self) -> float:
        return EPOCH + self._network.heap.now + self.wall_offset_s

    async def addresses(self) -> tuple[Multiaddr, ...]:
        self._check_open()
        return (self._network.full_address_of(self.peer_id),)

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        wire = await self._reach(peer, addresses, timeout_s)
        self.directory.introduce(wire.other(self).directory)

    async def improve(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        """Do nothing that ``connect`` does not: all connections are direct here."""
        await self.connect(peer, addresses, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> None:
        self._check_open()
        wire = self._wires.get(peer)
        if wire is not None:
            wire.break_at(self, "it was closed here")

    def stranger(self) -> AbstractAsyncContextManager[MemoryHost]:
        self._check_open()
        return self._network.stranger(self.peer_id)

    async def connections(self) -> tuple[Connection, ...]:
        self._check_open()
        addresses = self._network._address_of  # connections follow a peer that moves
        return tuple(
            Connection(peer, addresses[peer], relayed=False)
            for peer in sorted(self._wires)
            if peer in addresses  # a stranger that is gone
        )

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        self._check_unserved(protocol)
        self._served.serve_calls(protocol, handler, request_max_bytes=request_max_bytes)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        if len(request) > UNARY_MAX_BYTES:
            raise ValueError(f"request has {len(request)} bytes; at most {UNARY_MAX_BYTES}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wire = await self._reach(peer, (), timeout_s)
        number, future = wire.call(self, protocol, bytes(request))
        silence = _Reply(broken=f"no answer within {timeout_s:g} s")
        timer = loop.call_at(deadline, _set, future, silence)
        try:
            reply = await future
        finally:
            timer.cancel()
            wire.forget_call(self, number)
        if reply.broken is not None:
            self._check_open()
            raise PeerUnreachable(peer, reply.broken)
        if reply.refused is not None:
            raise CallRefused(peer, protocol, reply.refused)
        return reply.content

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        self._check_unserved(protocol)
        self._served.streams[protocol] = handler

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> MemoryStream:
        """Open a stream. There is one path between two hosts here, whether ``bulk`` or not; values
        weigh more on a bulk stream where a small model stands for a large one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wire = await self._reach(peer, (), timeout_s)
        mine, theirs = wire.stream_pair(self, protocol, bulk=bulk)
        opened: asyncio.Future[str | None] = loop.create_future()
        listener = wire.other(self)

        def arrive() -> None:
            refusal = listener._served.accept(theirs, protocol)
            theirs._in_order(CALL_OVERHEAD_BYTES, lambda: _set(opened, refusal))

        mine.on_over.append(lambda: _set(opened, "the connection broke"))
        mine._in_order(CALL_OVERHEAD_BYTES, arrive)
        timer = loop.call_at(deadline, _set, opened, f"no stream within {timeout_s:g} s")
        try:
            refusal = await opened
        except asyncio.CancelledError:
            mine.abort()
            raise
        finally:
            timer.cancel()
        if refusal is not None:
            mine.abort()
            self._check_open()
            raise PeerUnreachable(peer, refusal)
        return mine

    async def close(self) -> None:
        """Stop serving and break what is open. Safe to call more than once."""
        if self._ended is None:
            self._end("it was closed")
        await self._tasks.wait()

    # --- serving and dialling --------------------------------------------------------------

    def _end(self, reason: str) -> None:
        self._ended = reason
        del self._network._hosts[self.peer_id]
        self.directory.leave(reason)
        for wire in list(self._wires.values()):
            wire.break_at(self, reason)
        self._tasks.cancel()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise HostClosed(self._ended)

    def _check_unserved(self, protocol: str) -> None:
        self._check_open()
        self._served.check_unserved(protocol)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._ended is not None:
            work.close()
            return
        self._tasks.spawn(work, name)

    async def _answer(
        self, caller: PeerId, protocol: str, request: bytes, answer: Callable[[_Reply], None]
    ) -> None:
        try:
            reply = _Reply(bytes(await self._served.answer(caller, protocol, request)))
        except ValueError as error:
            reply = _Reply(refused=str(error))
        answer(reply)

    async def _reach(self, peer: PeerId, addresses: Sequence[Multiaddr], timeout_s: float) -> _Wire:
        """The connection with a peer, opened if there is none."""
        self._check_open()
        wire = self._wires.get(peer)
        if wire is not None:
            return wire
        if peer == self.peer_id:
            raise PeerUnreachable(peer, "that is this peer itself")
        candidates = addresses or self._known_addresses(peer)
        if not candidates:
            raise PeerUnreachable(peer, "no address is known")
        bare = map(address_rules.without_peer, address_rules.deduplicate(candidates))
        dials = {address: self._dial(peer, address) for address in bare}
        try:
            async with asyncio.timeout(min(timeout_s, DIAL_TIMEOUT_S)):
                for outcome in dials.values():
                    await outcome
                    if peer in self._wires:
                        break
        except TimeoutError:
            pass  # the error below lists the addresses that did not answer
        finally:
            for outcome in dials.values():
                outcome.cancel()
        self._check_open()
        wire = self._wires.get(peer)
        if wire is None:
            reasons = (
                f"{address} {'does not answer' if outcome.cancelled() else outcome.result()}"
                for address, outcome in dials.items()
            )
            raise PeerUnreachable(peer, "; ".join(reasons))
        return wire

    def _dial(self, peer: PeerId, address: Multiaddr) -> asyncio.Future[str]:
        """Attempt to connect to a peer at one address, unless the result is cancelled before."""
        network, me = self._network, self.peer_id
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        machine = network._listening.get(address)
        if machine is None:
            outcome.set_result("belongs to no peer")
            return outcome

        def complete(listener: MemoryHost) -> None:
            if not outcome.done() and self._ended is None and listener._ended is None:
                network._connect(self, listener)
                outcome.set_result("answered")

        def arrive(machine: PeerId = machine) -> None:
            listener = network._hosts.get(machine)
            if listener is None:
                reply = partial(_set, outcome, "refuses connections")
            elif machine != peer:
                reply = partial(_set, outcome, f"belongs to another peer, {machine}")
            else:
                reply = partial(complete, listener)
            network.simulated.send(machine, me, HANDSHAKE_BYTES, reply)

        if not network.simulated.is_dial_out_only(machine):
            network.simulated.send(me, machine, HANDSHAKE_BYTES, arrive)
        return outcome

    def _known_addresses(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Addresses at which the peer was reached, or its present one if the directory knows it."""
        if peer in self.directory.neighbourhood.nodes:
            return (self._network._address_of[peer],)
        return self._address_book.get(peer, ())


def _set(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)

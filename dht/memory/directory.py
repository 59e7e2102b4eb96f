"""The directory of hosts in memory: a simulated distributed hash table.

Records are stored on the ``REPLICAS`` hosts nearest to their key among those that have been
introduced to each other, directly or through others. Requests and replies travel on the simulated
network, every node judges records with its own ``RecordKeeper``, and a host that crashes loses its
records. Routing is not simulated: a node knows the nearest hosts of its own swarm at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, TypeVar

from multiaddr import Multiaddr

from dht.addresses import network_of
from dht.errors import HostClosed
from dht.identity import PeerId
from dht.membership.replicas import SEEDS_MAX, Holders, apart
from dht.memory.network import SimulatedNetwork
from dht.record_keeper import RecordKeeper
from dht.records import Rejected, check

REPLICAS = 5
REQUEST_TIMEOUT_S = 3.0
"""Time limit for the answer of a node."""

REQUEST_BYTES = 100
ORDERS_MAX = 256

T = TypeVar("T")


class Neighbourhood:
    """Nodes that know each other, directly or through others."""

    def __init__(self, node: MemoryDirectory) -> None:
        self.nodes: dict[PeerId, MemoryDirectory] = {node.peer_id: node}
        self._nearest_first: dict[int, list[MemoryDirectory]] = {}
        """Cache of all nodes in order of distance, by place, until a node comes or goes."""

    def nearest_first(self, place: int) -> list[MemoryDirectory]:
        """All nodes by their distance from a place. The caller must not change the list."""
        order = self._nearest_first.get(place)
        if order is None:
            if len(self._nearest_first) >= ORDERS_MAX:
                self._nearest_first.clear()
            # Distances differ: places are 64 random bits.
            order = sorted(self.nodes.values(), key=lambda node: node.place ^ place)
            self._nearest_first[place] = order
        return order

    def drop(self, node: MemoryDirectory) -> None:
        """Remove a node that is gone, unless another one of the same peer has replaced it."""
        if self.nodes.get(node.peer_id) is node:
            del self.nodes[node.peer_id]
            self._nearest_first.clear()

    def merge(self, other: Neighbourhood) -> None:
        if other is self:
            return
        larger, smaller = self, other
        if len(smaller.nodes) > len(larger.nodes):
            larger, smaller = smaller, larger
        for node in smaller.nodes.values():
            node.neighbourhood = larger
        larger.nodes.update(smaller.nodes)
        larger._nearest_first.clear()

    def split(self, network: SimulatedNetwork) -> None:
        """Split along the network's partition: every part continues by itself."""
        parts: list[Neighbourhood] = []
        for peer, node in list(self.nodes.items()):
            for part in parts:
                if network.connected(peer, next(iter(part.nodes))):
                    part.nodes[peer] = node
                    part._nearest_first.clear()
                    node.neighbourhood = part
                    break
            else:
                node.neighbourhood = Neighbourhood(node)
                parts.append(node.neighbourhood)


class MemoryDirectory:
    """``dht.host.Directory`` on the simulated network, and this host's share of the records."""

    def __init__(
        self,
        peer_id: PeerId,
        keeper: RecordKeeper,
        network: SimulatedNetwork,
        address_of: Callable[[PeerId], Multiaddr],
    ) -> None:
        self.peer_id = peer_id
        self.place = _place(peer_id)
        self.keeper = keeper
        """Decides which records this node believes, and counts them."""
        self.neighbourhood = Neighbourhood(self)
        self.closed: str | None = None
        self._network = network
        self._address_of = address_of
        self._seeds: frozenset[PeerId] = frozenset()
        self._holders: Holders[PeerId] = Holders()

    def set_seeds(self, seeds: Collection[PeerId]) -> None:
        self._seeds = frozenset(seeds) - {self.peer_id}

    async def publish(self, key: str, record: bytes, *, timeout_s: float) -> int:
        """Store my record under ``key`` and my peer id. Returns on how many *other* peers."""
        self._check_open()
        if isinstance(check(record, key=key, peer=self.peer_id), Rejected):
            return 0
        self._store(record)
        answers = self._ask(
            self._nearest(key),
            REQUEST_BYTES + len(record),
            lambda node: node._store(record),
            lambda stored: REQUEST_BYTES,
        )
        return sum(await answers.wait(timeout_s))

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        """All valid records under ``key`` that could be found within ``timeout_s``, by peer.

        ``quick``: see ``dht.host.Directory``.
        """
        self._check_open()
        deadline = self._now + timeout_s
        others: list[tuple[PeerId, list[bytes]]] = []
        holder = self._holders.next(key, now=self._now) if quick else None
        if holder is not None:
            node = self.neighbourhood.nodes.get(holder)
            if node is not None and self._network.connected(self.peer_id, holder):
                others = await self._read_from([node], key, timeout_s)
            if not any(records for _, records in others):
                self._holders.lost(key, holder)
                holder = None
        if holder is None:
            others = await self._read_from(self._nearest(key), key, deadline - self._now)
            had_some = [peer for peer, records in others if records and peer not in self._seeds]
            self._holders.found(key, had_some, now=self._now)
        found = [*self._read(key), *(data for _, records in others for data in records)]
        return self.keeper.newest(found, key=key, now=self._now)

    async def _read_from(
        self, nodes: list[MemoryDirectory], key: str, timeout_s: float
    ) -> list[tuple[PeerId, list[bytes]]]:
        answers = self._ask(
            nodes,
            REQUEST_BYTES,
            lambda node: (node.peer_id, node._read(key)),
            lambda answer: REQUEST_BYTES + sum(map(len, answer[1])),
        )
        return await answers.wait(timeout_s)

    def introduce(self, other: MemoryDirectory) -> None:
        self.neighbourhood.merge(other.neighbourhood)

    def leave(self, reason: str) -> None:
        """Stop serving, and forget everything."""
        self.closed = reason
        self.neighbourhood.drop(self)

    # --- as a node among others ------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._network.heap.now

    def _check_open(self) -> None:
        if self.closed is not None:
            raise HostClosed(self.closed)

    def _store(self, record: bytes) -> bool:
        verdict = self.keeper.admit(record, now=self._now, store=True)
        return not isinstance(verdict, Rejected)

    def _read(self, key: str) -> list[bytes]:
        return list(self.keeper.stored(key, now=self._now).values())

    def _nearest(self, key: str) -> list[MemoryDirectory]:
        """The other nodes that should store this key, as far as this one can reach them."""
        order = self.neighbourhood.nearest_first(_place(key))
        able = (node for node in order if self._reaches(node.peer_id))
        nearest = apart(able, [self._network_of], count=REPLICAS)
        seeds = [node for node in map(self.neighbourhood.nodes.get, self._seeds) if node]
        seeds = [node for node in seeds if node not in nearest and self._reaches(node.peer_id)]
        seeds.sort(key=lambda node: node.place ^ _place(key))
        return [node for node in (*nearest, *seeds[:SEEDS_MAX]) if node is not self]

    def _reaches(self, peer: PeerId) -> bool:
        network = self._network
        return not network.is_dial_out_only(peer) and network.connected(self.peer_id, peer)

    def _network_of(self, node: MemoryDirectory) -> str | None:
        return network_of(self._address_of(node.peer_id))

    def _ask(
        self,
        nodes: list[MemoryDirectory],
        request_bytes: int,
        serve: Callable[[MemoryDirectory], T],
        reply_bytes: Callable[[T], int],
    ) -> _Answers[T]:
        network, me = self._network, self.peer_id
        answers: _Answers[T] = _Answers(network, len(nodes))
        for node in nodes:

            def arrive(node: MemoryDirectory = node) -> None:
                if node.closed is not None:
                    network.send(node.peer_id, me, REQUEST_BYTES, refuse)
                    return
                reply = serve(node)
                if not network.chance(network.weather.calls_lost):
                    deliver = lambda: answers.add(reply)  # noqa: E731
                    network.send(node.peer_id, me, reply_bytes(reply), deliver)

            def refuse(node: MemoryDirectory = node) -> None:
                self._forget(node)
                answers.fail()

            def silent(node: MemoryDirectory = node) -> None:
                if not network.is_up(node.peer_id):
                    self._forget(node)

            if not network.chance(network.weather.calls_lost):
                network.send(me, node.peer_id, request_bytes, arrive, silent)
        return answers

    def _forget(self, node: MemoryDirectory) -> None:
        if node is not self:
            self.neighbourhood.drop(node)


class _Answers(Generic[T]):
    """Collects the answers of several nodes."""

    def __init__(self, network: SimulatedNetwork, expected: int) -> None:
        self._heap = network.heap
        self._missing = expected
        self._got: list[T] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, answer: T) -> None:
        if not self._done.done():
            self._got.append(answer)
            self.fail()

    def fail(self) -> None:
        """Wait for one answer less."""
        self._missing -= 1
        if self._missing <= 0 and not self._done.done():
            self._done.set_result(None)

    async def wait(self, timeout_s: float) -> list[T]:
        if self._missing > 0:
            timer = self._heap.call_in(min(timeout_s, REQUEST_TIMEOUT_S), self._give_up)
            try:
                await self._done
            finally:
                timer.cancel()
        return self._got

    def _give_up(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


@lru_cache(maxsize=65_536)
def _place(name: str) -> int:
    """Place of a key or a node on the ring."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")

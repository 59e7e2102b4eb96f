"""The directory of hosts in memory: a simulated distributed hash table.

Records are stored on the ``REPLICAS`` hosts nearest to their key among those that have been
introduced to each other, directly or through others. Requests and replies travel on the simulated
network, every node judges records with its own ``RecordKeeper``, and a host that crashes loses its
records. Routing is not simulated: a node knows the nearest hosts of its own swarm at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from hashlib import blake2b

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

        def store(node: MemoryDirectory) -> list[bytes]:
            return [b""] if node._store(record) else []

        size = REQUEST_BYTES + len(record)
        answers = await self._ask(self._nearest(key), size, store, timeout_s)
        return sum(map(bool, answers.values()))

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        """All valid records under ``key`` that could be found within ``timeout_s``, by peer.

        ``quick``: see ``dht.host.Directory``.
        """
        self._check_open()
        deadline = self._now + timeout_s
        others: dict[PeerId, list[bytes]] = {}

        def read(node: MemoryDirectory) -> list[bytes]:
            return node._read(key)

        holder = self._holders.next(key, now=self._now) if quick else None
        if holder is not None:
            node = self.neighbourhood.nodes.get(holder)
            if node is not None and self._network.connected(self.peer_id, holder):
                others = await self._ask([node], REQUEST_BYTES, read, timeout_s)
            if not any(others.values()):
                self._holders.lost(key, holder)
                holder = None
        if holder is None:
            left_s = deadline - self._now
            others = await self._ask(self._nearest(key), REQUEST_BYTES, read, left_s)
            had_some = [peer for peer in others if others[peer] and peer not in self._seeds]
            self._holders.found(key, had_some, now=self._now)
        found = [*self._read(key), *(data for records in others.values() for data in records)]
        return self.keeper.newest(found, key=key, now=self._now)

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

    async def _ask(
        self,
        nodes: list[MemoryDirectory],
        request_bytes: int,
        serve: Callable[[MemoryDirectory], list[bytes]],
        timeout_s: float,
    ) -> dict[PeerId, list[bytes]]:
        """The answers of several nodes that come in time."""
        network, me = self._network, self.peer_id
        answers: dict[PeerId, list[bytes] | None] = {}
        all_came: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if not all_came.done():
                all_came.set_result(None)

        def came(node: MemoryDirectory, answer: list[bytes] | None) -> None:
            answers[node.peer_id] = answer
            if len(answers) == len(nodes):
                go_on()

        def arrive(node: MemoryDirectory) -> None:
            if node.closed is not None:
                network.send(node.peer_id, me, REQUEST_BYTES, partial(refuse, node))
                return
            answer = serve(node)
            if not network.chance(network.weather.calls_lost):
                size = REQUEST_BYTES + sum(map(len, answer))
                network.send(node.peer_id, me, size, partial(came, node, answer))

        def refuse(node: MemoryDirectory) -> None:
            self._forget(node)
            came(node, None)

        def silent(node: MemoryDirectory) -> None:
            if not network.is_up(node.peer_id):
                self._forget(node)

        for node in nodes:
            if not network.chance(network.weather.calls_lost):
                to, lost = partial(arrive, node), partial(silent, node)
                network.send(me, node.peer_id, request_bytes, to, lost)
        if nodes:
            timer = network.heap.call_in(min(timeout_s, REQUEST_TIMEOUT_S), go_on)
            try:
                await all_came
            finally:
                timer.cancel()
        return {peer: answer for peer, answer in answers.items() if answer is not None}

    def _forget(self, node: MemoryDirectory) -> None:
        if node is not self:
            self.neighbourhood.drop(node)


@lru_cache(maxsize=65_536)
def _place(name: str) -> int:
    """Place of a key or a node on the ring."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")

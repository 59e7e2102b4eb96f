"""The directory of hosts in memory: a simulated distributed hash table.

Records are stored on the ``REPLICAS`` hosts nearest to their key among those that have been
introduced to each other, directly or through others. Requests and replies travel on the simulated
network, every node judges records with its own ``RecordKeeper``, and a host that crashes loses its
records. Routing is not simulated: a node knows the nearest hosts of its own swarm at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, TypeVar

from multiaddr import Multiaddr

from dht.addresses import network_of
from dht.errors import HostClosed
from dht.identity import PeerId
from dht.membership.replicas import SEEDS_MAX, Holders, apart
from dht.memory.network import SimulatedNetwork
from dht.record_keeper import Admitted, RecordKeeper
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
        self._stored: dict[str, dict[PeerId, tuple[bytes, float]]] = {}
        keeper.on_evicted = self._evicted

    def __repr__(self) -> str:
        records = sum(len(records) for records in self._stored.values())
        return f"MemoryDirectory({self.peer_id}, {len(self.neighbourhood.nodes)} nodes, {records=})"

    def set_seeds(self, seeds: Collection[PeerId]) -> None:
        self._seeds = frozenset(seeds) - {self.peer_id}

    async def publish(self, key: str, record: bytes, *, ttl_s: float, timeout_s: float) -> int:
        """Store my record under ``key`` and my peer id. Returns on how many *other* peers."""
        self._check_open()
        me = self.peer_id
        self._store(key, me, record, ttl_s)

        def store(node: MemoryDirectory) -> bool:
            return node._store(key, me, record, ttl_s)

        answers = self._ask(
            self._nearest(key), REQUEST_BYTES + len(record), store, lambda stored: REQUEST_BYTES
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
        others: list[tuple[PeerId, dict[PeerId, bytes]]] = []
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
        candidates: dict[PeerId, dict[bytes, None]] = {}
        for records in (self._read(key), *(records for _, records in others)):
            for peer, data in records.items():
                candidates.setdefault(peer, {})[data] = None
        found = {peer: self._best(key, peer, candidates[peer]) for peer in sorted(candidates)}
        return {peer: data for peer, data in found.items() if data is not None}

    async def _read_from(
        self, nodes: list[MemoryDirectory], key: str, timeout_s: float
    ) -> list[tuple[PeerId, dict[PeerId, bytes]]]:
        answers = self._ask(
            nodes,
            REQUEST_BYTES,
            lambda node: (node.peer_id, node._read(key)),
            lambda answer: REQUEST_BYTES + sum(map(len, answer[1].values())),
        )
        return await answers.wait(timeout_s)

    def introduce(self, other: MemoryDirectory) -> None:
        self.neighbourhood.merge(other.neighbourhood)

    def leave(self, reason: str) -> None:
        """Stop serving, and forget everything."""
        self.closed = reason
        self.neighbourhood.drop(self)
        self._stored.clear()

    # --- as a node among others ------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._network.heap.now

    def _check_open(self) -> None:
        if self.closed is not None:
            raise HostClosed(self.closed)

    def _store(self, key: str, peer: PeerId, record: bytes, ttl_s: float) -> bool:
        verdict = self.keeper.admit(record, now=self._now, key=key, peer=peer)
        if isinstance(verdict, Rejected):
            return False
        expires_at = min(verdict.expires_at, self._now + ttl_s)
        self._stored.setdefault(key, {})[peer] = (bytes(record), expires_at)
        return True

    def _evicted(self, key: str, peer: PeerId) -> None:
        self._stored.get(key, {}).pop(peer, None)

    def _read(self, key: str) -> dict[PeerId, bytes]:
        records = self._stored.get(key)
        if records is None:
            return {}
        for peer in [peer for peer, (_, expires_at) in records.items() if expires_at <= self._now]:
            del records[peer]
        if not records:
            del self._stored[key]
        return {peer: data for peer, (data, _) in records.items()}

    def _best(self, key: str, peer: PeerId, found: Iterable[bytes]) -> bytes | None:
        """The newest record that this node believes. Replicas may still have older ones."""

        def sequence(data: bytes) -> int:
            sealed = check(data)
            return -1 if isinstance(sealed, Rejected) else sealed.sequence

        newest_first = list(found)
        if len(newest_first) > 1:  # replicas usually agree
            newest_first.sort(key=sequence, reverse=True)
        for data in newest_first:
            verdict = self.keeper.admit(data, now=self._now, key=key, peer=peer)
            if isinstance(verdict, Admitted):
                return data
        return None

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

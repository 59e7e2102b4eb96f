"""The directory of records on hivemind's Kademlia node.

hivemind provides the routing: the peers near a key, and the calls between them.
``dht.record_keeper`` decides by the own clock which records are stored, for how long, and
which record replaces another. The expiration times in hivemind's messages come from other clocks,
and are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.identity import PeerId
from dht.libp2p.directory_search import BEAM, ROOTS, Search
from dht.libp2p.directory_wire import MalformedMessage, read_subkey
from dht.libp2p.hivemind_daemon import Daemon, peer_bytes
from dht.libp2p.hivemind_patches import (
    DHTID,
    BoundedRoutingTable,
    DHTLocalStorage,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    P2PDaemonError,
    PeerID,
    RecordValidatorBase,
)
from dht.membership.replicas import SEEDS_MAX, Holders
from dht.record_keeper import Admitted, RecordKeeper
from dht.records import Rejected, check

_logger = logging.getLogger("dht.directory")

REPLICAS = 5
"""A record is stored on this many peers, the publisher among them if it is near."""

BUCKET_SIZE = 20
RPC_TIMEOUT_S = 3.0
PINGS_AT_ONCE = 8
_GONE = "not connected any more"
NO_NODE_RETRY_S = 60.0


class Judge(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Lets the keeper judge each record in a request to store or in an answer."""

    def __init__(self, keeper: RecordKeeper) -> None:
        self.keeper = keeper
        self._last: tuple[bytes, Admitted] | None = None

    def malformed(self, reason: str) -> None:
        """Count a message that was refused before its records were read."""
        self.keeper.rejected["malformed"] += 1

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey = read_subkey(record.subkey)
        except MalformedMessage:
            subkey = None
        if not isinstance(subkey, str):  # a plain value, which nothing of ours ever stores
            self.keeper.rejected["malformed"] += 1
            return False
        return self.admit(record.key, PeerId(subkey), record.value) is not None

    def admit(self, key_id: bytes, peer: PeerId, data: bytes) -> Admitted | None:
        """The record, if it is valid, belongs under this key and is this peer's newest."""
        if self._last is not None and self._last[0] is data:
            return self._last[1]  # hivemind's validator and then the storage ask for each record
        sealed = check(data)
        if not isinstance(sealed, Rejected) and id_of(sealed.key).to_bytes() != key_id:
            self.keeper.rejected["misplaced"] += 1
            return None
        verdict = self.keeper.admit(data, now=asyncio.get_running_loop().time(), peer=peer)
        if isinstance(verdict, Rejected):
            _logger.debug("record_rejected peer=%s %s: %s", peer, verdict.reason, verdict.detail)
            return None
        self._last = (data, verdict)
        return verdict


class RecordStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """The records that this node stores for other peers: those that the keeper believes.

    The keeper bounds them, under each key and in all.
    """

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge
        judge.keeper.on_evicted = self._evicted

    def store(
        self, key: Any, value: Any, expiration_time: float, subkey: str | None = None
    ) -> bool:
        if subkey is None:
            return False  # any peer could occupy a key for ever with a plain value
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Store a record for its own time to live, regardless of the sender's expiration time."""
        admitted = self._judge.admit(key.to_bytes(), PeerId(subkey), value)
        if admitted is None:
            return False
        left_s = admitted.expires_at - asyncio.get_running_loop().time()
        until = time.time() + left_s
        records = self._records(key)
        # The newer record replaces the older one even if it holds for a shorter time.
        del records[subkey]
        records.store(subkey, value, until)
        if key in self.data and self.data[key].value is records:
            until = max(until, self.data[key].expiration_time)
            del self[key]
        return bool(super(DHTLocalStorage, self).store(key, records, until))

    def _records(self, key: Any) -> DictionaryDHTValue:
        found = self.get(key)
        if found is None:
            return DictionaryDHTValue()
        found.value._remove_outdated()
        return found.value

    def _evicted(self, key: str, peer: PeerId) -> None:
        found = self.get(id_of(key))
        if found is not None:
            del found.value[peer]

    def size_bytes(self) -> int:
        """Size of all stored records."""
        self._remove_outdated()
        return sum(
            len(entry.value)
            for item in self.data.values()
            for _, entry in item.value.items()  # which drops expired records
        )

    def items(self) -> Iterator[Any]:
        """Yield nothing: hivemind would send everything to each new node in one large message.

        Publishers renew their records soon enough.
        """
        return iter(())


class NoStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """Replaces hivemind's cache, to which any peer may write: stores nothing."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return False

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        return False


class HivemindDirectory:
    """``dht.host.Directory`` on the DHT node of one daemon run after another."""

    def __init__(self, peer_id: PeerId, keeper: RecordKeeper) -> None:
        self._peer_id = peer_id
        self._judge = Judge(keeper)
        self._storage = RecordStorage(self._judge)
        self._node: Any = None
        self._daemon: Daemon | None = None
        self._seeds: frozenset[PeerId] = frozenset()
        self._connected: dict[PeerId, str | None] = {}
        """The network of each connected peer (``dht.addresses.network_of``)."""

        self._holders: Holders[Any] = Holders()
        self._places: Holders[tuple[Any, Any]] = Holders()
        """The places in the directory and the peers that store the own records. To search for them
        at each heartbeat was a third of the daemon's bytes in a swarm of five."""
        self._not_nodes: dict[PeerId, float] = {}  # time until which not to ask them again

    @property
    def stored_bytes(self) -> int:
        """Size of the records that this node stores for the swarm."""
        return self._storage.size_bytes()

    @property
    def neighbours(self) -> int:
        """Number of peers in the routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node else 0

    def set_seeds(self, seeds: Collection[PeerId]) -> None:
        self._seeds = frozenset(seeds) - {self._peer_id}

    async def start(self, daemon: Daemon, *, serve: bool) -> None:
        """Start on a new daemon. With ``serve`` this node stores and routes for other peers."""
        self._daemon, self._connected = daemon, {}
        daemon.on_malformed = self._judge.malformed
        self._node = await DHTNode.create(
            p2p=daemon,
            # The same after each restart, so that neighbours need not learn a new one.
            node_id=id_of(self._peer_id),
            client_mode=not serve,
            bucket_size=BUCKET_SIZE,
            num_replicas=REPLICAS,
            wait_timeout=RPC_TIMEOUT_S,
            record_validator=self._judge,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            reuse_get_requests=False,
            # No doubling: a seed that was down for an hour must be found within seconds.
            backoff_rate=1.0,
            ensure_bootstrap_success=False,
            strict=False,
        )
        protocol = self._node.protocol
        protocol.routing_table = BoundedRoutingTable(
            self._node.node_id, BUCKET_SIZE, protocol.routing_table.depth_modulo
        )
        protocol.storage = self._storage
        protocol.cache = NoStorage()

    async def stop(self) -> None:
        """Stop answering, for a change of role. The stored records stay."""
        node, self._node = self._node, None
        if node is not None:
            await node.shutdown()

    def drop(self) -> None:
        """Forget the node of a daemon that is gone."""
        if self._node is not None:
            self._node.is_alive = False
        self._node = None

    async def introduce(self, peer: PeerId) -> bool:
        """Exchange places in the directory with a peer. Says whether the peer has one."""
        if self._node is None:
            return False
        protocol, target = self._node.protocol, PeerID(peer_bytes(peer))
        place = await protocol.call_ping(target)
        if place is None:
            return False
        # hivemind adds it in a separate task; here the peer can be asked at once.
        await protocol.update_routing_table(place, target, responded=True)
        if peer in self._seeds and peer not in self._connected:
            await self._look_at_connections()
        return True

    async def watch(self, connected: Mapping[PeerId, Sequence[Multiaddr]], *, now: float) -> None:
        """Put connected peers back into the routing table, from which one lost reply drops them.

        hivemind never does that itself. Peers without a directory node (they can only dial out) are
        asked again after a minute.
        """
        self._note_connections(connected)
        if self._node is None:
            return
        self._not_nodes = {p: until for p, until in self._not_nodes.items() if until > now}
        # hivemind counts the failures of each peer for ever, and other peers can name peers without
        # end. The counts are exponents of its backoff, which have no effect: the rate is 1.
        self._node.blacklist.ban_counter.clear()
        table = self._node.protocol.routing_table
        missing = [
            peer
            for peer in sorted(connected)
            if peer not in self._not_nodes and PeerID(peer_bytes(peer)) not in table
        ]
        if self.neighbours >= BUCKET_SIZE:
            return  # enough other peers are known, and a search finds the rest
        asked = missing[:PINGS_AT_ONCE]
        answers = await asyncio.gather(*(self.introduce(peer) for peer in asked))
        for peer, is_node in zip(asked, answers, strict=True):
            if not is_node:
                self._not_nodes[peer] = now + NO_NODE_RETRY_S

    def _note_connections(self, connected: Mapping[PeerId, Sequence[Multiaddr]]) -> None:
        self._connected = {peer: _network_at(tuple(at)) for peer, at in connected.items()}

    async def _look_at_connections(self) -> None:
        if self._daemon is None:
            return
        try:
            connected = await self._daemon.connected(timeout_s=RPC_TIMEOUT_S)
        except (TimeoutError, OSError, P2PDaemonError):
            return  # the known connections stay
        self._note_connections(connected)

    def _seeds_of(self, key_id: Any) -> dict[Any, Any]:
        """The connected seeds that hold the records under a key: everybody prefers the same."""
        places = {id_of(seed): seed for seed in self._seeds if seed in self._connected}
        nearest = sorted(places, key=key_id.xor_distance)[:SEEDS_MAX]
        return {place: PeerID(peer_bytes(places[place])) for place in nearest}

    async def publish(self, key: str, record: bytes, *, ttl_s: float, timeout_s: float) -> int:
        node = self._node
        if node is None:
            return 0
        key_id = id_of(key)
        expiration = time.time() + ttl_s
        stored: set[Any] = set()
        replicas = REPLICAS
        loop = asyncio.get_running_loop()

        async def store_at(place: Any, peer: Any) -> None:
            answer = await node.protocol.call_store(
                peer, [key_id], [record], [expiration], subkeys=[self._peer_id]
            )
            if answer and answer[0]:
                stored.add(place)

        try:
            async with asyncio.timeout(timeout_s):
                peers = dict(self._places.all(key, now=loop.time()))
                if len(peers) < min(BEAM, self.neighbours):
                    peers = await self._search(node, key_id, lambda peer, records: None, {})
                    self._places.found(key, peers.items(), now=loop.time())
                seeds = self._seeds_of(key_id)
                order = self._with_own_place(node, key_id, list(peers))
                peers |= seeds
                wanted = {*seeds, *order[:REPLICAS]}
                while wanted:
                    if node.node_id in wanted:
                        # The own copy counts as a replica, but never as success.
                        self._storage.store_subkey(key_id, self._peer_id, record, expiration)
                        wanted.remove(node.node_id)
                        order.remove(node.node_id)
                        replicas -= 1
                    await asyncio.gather(*(store_at(place, peers[place]) for place in wanted))
                    if wanted - stored:
                        self._places.found(key, (), now=loop.time())
                    order = [place for place in order if place in stored or place not in wanted]
                    wanted = {*order[:replicas]} - stored
        except TimeoutError:
            _logger.debug("publish_timed_out key=%s stored=%d", key, len(stored))
        return len(stored)

    @staticmethod
    def _with_own_place(node: Any, key_id: Any, places: list[Any]) -> list[Any]:
        """These places in their order, and the own one in front of the first that is farther."""
        if node.protocol.client_mode:
            return places
        distance = key_id.xor_distance
        farther = (n for n, at in enumerate(places) if distance(at) > distance(node.node_id))
        places.insert(next(farther, len(places)), node.node_id)
        return places

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        node = self._node
        key_id = id_of(key)
        newest: dict[PeerId, tuple[int, bytes]] = {}
        holders: list[Any] = []

        seeds = self._seeds_of(key_id)

        def consider(holder: Any, records: DictionaryDHTValue) -> None:
            if len(records) > 0 and holder not in seeds.values():
                holders.append(holder)  # seeds have enough to do without quick look-ups
            with records.freeze():  # another clock may call them expired; the keeper decides
                entries = list(records.items())
            for subkey, (data, _) in entries:
                admitted = self._judge.admit(key_id.to_bytes(), PeerId(subkey), data)
                if admitted is None:
                    continue
                sequence = admitted.sealed.sequence
                if admitted.peer not in newest or newest[admitted.peer][0] < sequence:
                    newest[admitted.peer] = (sequence, data)

        own = self._storage.get(key_id)
        if own is not None:
            consider(None, own.value)
            holders.clear()
        if node is None:
            return {peer: data for peer, (_, data) in sorted(newest.items())}
        try:
            async with asyncio.timeout(timeout_s):
                if not (quick and await self._ask_holder(node, key, key_id, consider)):
                    await self._search(node, key_id, consider, seeds)
                    loop = asyncio.get_running_loop()
                    self._holders.found(key, holders, now=loop.time())
        except TimeoutError:
            _logger.debug("look_up_timed_out key=%s found=%d", key, len(newest))
        return {peer: data for peer, (_, data) in sorted(newest.items())}

    async def _ask_holder(
        self, node: Any, key: str, key_id: Any, consider: Callable[[Any, DictionaryDHTValue], None]
    ) -> bool:
        """Ask a peer that had records under this key before. Says whether it had some again."""
        holder = self._holders.next(key, now=asyncio.get_running_loop().time())
        if holder is None:
            return False
        answer = await node._call_find_with_blacklist(holder, [key_id])
        found = answer[key_id][0] if answer and key_id in answer else None
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            self._holders.lost(key, holder)
            return False
        consider(holder, found.value)
        return True

    async def _locate(self, search: Search, found: Mapping[Any, Any]) -> None:
        """Tell a search the networks of peers that it found."""
        if not self._connected.keys() >= {_peer_id(peer) for peer in found.values()}:
            await self._look_at_connections()
        search.locate({p: self._connected.get(_peer_id(peer), _GONE) for p, peer in found.items()})

    def _locate_connected(self, search: Search) -> None:
        """Tell a search the networks of connected peers, which it need not ask to learn them."""
        connected, new = self._connected, search.newly_known()
        if new:
            peers = {place: _peer_id(peer) for place, peer in new.items()}
            search.locate({p: connected[peer] for p, peer in peers.items() if peer in connected})

    async def _search(
        self,
        node: Any,
        key_id: Any,
        consider: Callable[[Any, DictionaryDHTValue], None],
        seeds: dict[Any, Any],
    ) -> dict[Any, Any]:
        """Ask the peers nearest to a key, who may know nearer ones, until these have answered.

        ``seeds`` are asked as well. Returns those that answered, by place, in the order in which
        records are stored there. hivemind's own search leaves tasks behind when it is given up, and
        asks far more peers than needed.
        """
        table = node.protocol.routing_table
        search = Search(
            key_id, dict(table.get_nearest_neighbors(key_id, ROOTS, exclude=node.node_id)), seeds
        )
        asking: dict[asyncio.Task[Any], Any] = {}
        try:
            while True:
                self._locate_connected(search)
                for place in search.to_ask():
                    find = node._call_find_with_blacklist(search.known[place], [key_id])
                    asking[asyncio.ensure_future(find)] = place
                if search.is_over():
                    found = search.found()
                    if search.is_located(found):
                        return found
                    await self._locate(search, found)
                    continue
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = asking.pop(task)
                    answer = task.result()
                    if not answer or key_id not in answer:
                        search.failed(place)
                        continue
                    records, nearer = answer[key_id]
                    if records is not None and isinstance(records.value, DictionaryDHTValue):
                        consider(search.known[place], records.value)
                    search.answered(place, nearer, own_place=node.node_id)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


@lru_cache(maxsize=4096)
def _network_at(at: tuple[Multiaddr, ...]) -> str | None:
    """The network of a peer that is connected at these addresses."""
    best = next(iter(address_rules.rank(at)), None)
    return None if best is None else address_rules.network_of(best)


def _peer_id(peer: Any) -> PeerId:
    return PeerId(peer.to_base58())


def id_of(name: str) -> Any:
    """The place of a key or a peer in the directory's address space."""
    return DHTID.generate(source=name)

"""The directory of records on hivemind's Kademlia protocol.

hivemind provides the routing: the peers near a key, and the calls between them. It moves records,
one at a time to where they are stored and all under a key to who looks it up, and looks into none.
``dht.record_keeper`` decides by the own clock which records are stored, for how long, and
which record replaces another. The expiration times in hivemind's messages come from other clocks,
and are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.identity import PeerId
from dht.libp2p import directory_wire
from dht.libp2p.directory_search import BEAM, ROOTS, Search
from dht.libp2p.directory_wire import MalformedMessage, read_records, write_records
from dht.libp2p.hivemind_calls import MalformedCall, UnaryCalls
from dht.libp2p.hivemind_daemon import Daemon, peer_bytes
from dht.libp2p.hivemind_imports import (
    DHTID,
    DecodeError,
    DHTProtocol,
    P2PContext,
    P2PDaemonError,
    PeerID,
    RoutingTable,
    ValueWithExpiration,
)
from dht.membership.replicas import SEEDS_MAX, Holders
from dht.record_keeper import RecordKeeper
from dht.records import Rejected, check

_logger = logging.getLogger("dht.directory")

REPLICAS = 5
"""A record is stored on this many peers besides its publisher."""

BUCKET_SIZE = 20
DEPTH_MODULO = 5
"""hivemind's own: far buckets are split up to a multiple of this depth."""

RPC_TIMEOUT_S = 3.0
PINGS_AT_ONCE = 8
KEYS_SLACK = 256
"""Places of keys that the keeper has forgotten which may be remembered, besides as many again."""

_GONE = "not connected any more"
NO_NODE_RETRY_S = 60.0


class RecordStorage:
    """The records that this node stores for other peers, as hivemind's protocol asks for them.

    Those under a key are one value. ``dht.record_keeper`` has them, and decides.
    """

    def __init__(self, keeper: RecordKeeper) -> None:
        self._keeper = keeper
        self._key_at: dict[Any, str] = {}
        """Keys by place, and some that the keeper has forgotten."""

    def store(self, place: Any, record: bytes, expiration_time: float) -> bool:
        """Store a record under its own key, for its own time to live, if the keeper believes it.

        Where the sender says that it belongs, and until when, does not matter.
        """
        now = asyncio.get_running_loop().time()
        verdict = self._keeper.admit(record, now=now, store=True)
        if isinstance(verdict, Rejected):
            _logger.debug("record_rejected %s: %s", verdict.reason, verdict.detail)
            return False
        self._key_at[id_of(verdict.key)] = verdict.key
        known = self._keeper.known_keys
        if len(self._key_at) > 2 * len(known) + KEYS_SLACK:
            self._key_at = {place: key for place, key in self._key_at.items() if key in known}
        return True

    def get(self, place: Any) -> ValueWithExpiration | None:
        """All records under the key at a place."""
        now = asyncio.get_running_loop().time()
        records = self._keeper.stored(self._key_at.get(place, ""), now=now)
        return ValueWithExpiration(write_records(records.values()), 0.0) if records else None

    def items(self) -> Iterator[Any]:
        """Yield nothing: hivemind would send everything to each new node in one large message.

        Publishers renew their records soon enough.
        """
        return iter(())


class CheckedCalls:
    """The calls of hivemind's protocol, each message checked before hivemind decodes it.

    It has the three methods of hivemind's ``P2P`` that the protocol uses. Those of the original
    parse messages of any size, and pass them to handlers that trust their lengths, times and
    nesting.
    """

    def __init__(
        self, calls: UnaryCalls, peer_id: Any, on_malformed: Callable[[str], None]
    ) -> None:
        """``on_malformed`` is called for each request refused and each reply dropped."""
        self._calls = calls
        self._peer_id = peer_id
        self._on_malformed = on_malformed

    async def add_protobuf_handler(self, name: str, handler: Any, kind: Any, **_: object) -> None:
        rule = directory_wire.rule_for(kind.DESCRIPTOR.name)

        async def answer(data: bytes, remote_id: Any) -> bytes:
            try:
                request = parsed(kind, data, directory_wire.MESSAGE_MAX_BYTES)
                rule.check(request, remote_id.to_bytes())
            except MalformedMessage as error:
                self._malformed(remote_id, str(error))
                raise MalformedCall(f"malformed: {error}") from error
            context = P2PContext(handle_name=name, local_id=self._peer_id, remote_id=remote_id)
            reply: bytes = (await handler(request, context)).SerializeToString()
            return reply

        await self._calls.serve(name, answer)

    async def remove_protobuf_handler(self, name: str, **_: object) -> None:
        await self._calls.stop_serving(name)

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, kind: Any) -> Any:
        rule = directory_wire.rule_for(request.DESCRIPTOR.name)
        data = await self._calls.call(peer, name, request.SerializeToString())
        try:
            reply = parsed(kind, data, rule.reply_max_bytes)
            rule.check_reply(reply, peer.to_bytes())
        except MalformedMessage as error:
            self._malformed(peer, str(error))
            raise
        return reply

    def _malformed(self, peer: Any, reason: str) -> None:
        _logger.debug("malformed peer=%s reason=%s", peer, reason)
        self._on_malformed(reason)


def parsed(kind: Any, data: bytes, size_max: int) -> Any:
    """A message of at most this size. Raises ``MalformedMessage``."""
    name = kind.DESCRIPTOR.name
    if len(data) > size_max:
        raise MalformedMessage(f"a {name} of {len(data)} bytes; at most {size_max}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"not a {name}") from error


class BoundedRoutingTable(RoutingTable):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's routing table, whose buckets keep a limited number of replacement nodes.

    The original remembers every node that ever asked something while its bucket was full.
    """

    def add_or_update_node(self, node_id: Any, peer_id: Any) -> Any:
        to_ping = super().add_or_update_node(node_id, peer_id)
        bucket = self.buckets[self.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > bucket.size:
            del self[next(iter(bucket.replacement_nodes))]
        # Nodes that were removed while they were pinged.
        bucket.nodes_requested_for_ping.intersection_update(bucket.nodes_to_peer_id)
        return to_ping


class HivemindDirectory:
    """``dht.host.Directory`` on the DHT protocol of one daemon run after another."""

    def __init__(self, peer_id: PeerId, keeper: RecordKeeper) -> None:
        self._peer_id = peer_id
        self._keeper = keeper
        self._storage = RecordStorage(keeper)
        self._protocol: Any = None
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
        return self._keeper.stored_bytes(now=asyncio.get_running_loop().time())

    @property
    def neighbours(self) -> int:
        """Number of peers in the routing table."""
        return len(self._protocol.routing_table.uid_to_peer_id) if self._protocol else 0

    def set_seeds(self, seeds: Collection[PeerId]) -> None:
        self._seeds = frozenset(seeds) - {self._peer_id}

    async def start(self, daemon: Daemon, *, serve: bool) -> None:
        """Start on a new daemon. With ``serve`` this node stores and routes for other peers."""
        self._daemon, self._connected = daemon, {}
        protocol = self._protocol = await DHTProtocol.create(
            CheckedCalls(daemon.calls, daemon.peer_id, self._malformed),
            # The same after each restart, so that neighbours need not learn a new one.
            id_of(self._peer_id),
            BUCKET_SIZE,
            DEPTH_MODULO,
            REPLICAS,
            RPC_TIMEOUT_S,
            client_mode=not serve,
        )
        protocol.routing_table = BoundedRoutingTable(protocol.node_id, BUCKET_SIZE, DEPTH_MODULO)
        protocol.storage = self._storage
        protocol.cache = {}  # hivemind's, to which any peer may write: ``directory_wire`` forbids

    def _malformed(self, reason: str) -> None:
        """Count a message that was refused before its records were read."""
        self._keeper.rejected["malformed"] += 1

    async def stop(self) -> None:
        """Stop answering, for a change of role. The stored records stay."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            await protocol.shutdown()

    def drop(self) -> None:
        """Forget the protocol of a daemon that is gone."""
        self._protocol = None

    async def introduce(self, peer: PeerId) -> bool:
        """Exchange places in the directory with a peer. Says whether the peer has one."""
        if (protocol := self._protocol) is None:
            return False
        target = PeerID(peer_bytes(peer))
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
        if self._protocol is None:
            return
        self._not_nodes = {p: until for p, until in self._not_nodes.items() if until > now}
        table = self._protocol.routing_table
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

    async def publish(self, key: str, record: bytes, *, timeout_s: float) -> int:
        protocol, loop = self._protocol, asyncio.get_running_loop()
        if protocol is None or isinstance(check(record, key=key, peer=self._peer_id), Rejected):
            return 0
        key_id = id_of(key)
        stored: set[Any] = set()
        if not protocol.client_mode:
            self._storage.store(key_id, record, 0.0)  # the own copy never counts as success

        async def store_at(place: Any, peer: Any) -> None:
            answer = await protocol.call_store(peer, [key_id], [record], [0.0])
            if answer and answer[0]:
                stored.add(place)

        try:
            async with asyncio.timeout(timeout_s):
                peers = dict(self._places.all(key, now=loop.time()))
                if len(peers) < min(BEAM, self.neighbours):
                    peers = await self._search(protocol, key_id, {}, {})
                    self._places.found(key, peers.items(), now=loop.time())
                seeds, order = self._seeds_of(key_id), list(peers)
                peers |= seeds
                wanted = {*seeds, *order[:REPLICAS]}
                while wanted:
                    await asyncio.gather(*(store_at(place, peers[place]) for place in wanted))
                    if wanted - stored:
                        self._places.found(key, (), now=loop.time())
                    order = [place for place in order if place in stored or place not in wanted]
                    wanted = {*order[:REPLICAS]} - stored
        except TimeoutError:
            _logger.debug("publish_timed_out key=%s stored=%d", key, len(stored))
        return len(stored)

    async def look_up(
        self, key: str, *, timeout_s: float, quick: bool = False
    ) -> Mapping[PeerId, bytes]:
        protocol, loop = self._protocol, asyncio.get_running_loop()
        found: dict[Any, list[bytes]] = {}
        if protocol is not None:
            key_id = id_of(key)
            try:
                async with asyncio.timeout(timeout_s):
                    if not (quick and await self._ask_holder(protocol, key, key_id, found)):
                        seeds = self._seeds_of(key_id)
                        await self._search(protocol, key_id, found, seeds)
                        # Seeds have enough to do without quick look-ups.
                        holders = [peer for peer in found if peer not in seeds.values()]
                        self._holders.found(key, holders, now=loop.time())
            except TimeoutError:
                _logger.debug("look_up_timed_out key=%s found=%d", key, len(found))
        own = self._keeper.stored(key, now=loop.time()).values()
        others = (record for records in found.values() for record in records)
        return self._keeper.newest([*own, *others], key=key, now=loop.time())

    async def _ask_holder(
        self, protocol: Any, key: str, key_id: Any, found: dict[Any, list[bytes]]
    ) -> bool:
        """Ask a peer that had records under this key before. Says whether it had some again."""
        holder = self._holders.next(key, now=asyncio.get_running_loop().time())
        if holder is None:
            return False
        answer = await self._ask(protocol, holder, key_id)
        if answer is None or not answer[0]:
            self._holders.lost(key, holder)
            return False
        found[holder] = answer[0]
        return True

    @staticmethod
    async def _ask(
        protocol: Any, peer: Any, key_id: Any
    ) -> tuple[list[bytes], Mapping[Any, Any]] | None:
        """The records that a peer has under a key, and peers that may be nearer to it.

        ``None``: it does not answer.
        """
        answer = await protocol.call_find(peer, [key_id])
        if answer is None:
            return None
        value, nearer = answer[key_id]
        return [] if value is None else read_records(value.value), nearer

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
        protocol: Any,
        key_id: Any,
        found: dict[Any, list[bytes]],
        seeds: dict[Any, Any],
    ) -> dict[Any, Any]:
        """Ask the peers nearest to a key, who may know nearer ones, until these have answered.

        ``seeds`` are asked as well. ``found`` receives the records of each peer that has some.
        Returns those that answered, by place, in the order in which records are stored there.
        hivemind's own search leaves tasks behind when it is given up, and asks far more peers than
        needed.
        """
        table = protocol.routing_table
        search = Search(
            key_id,
            dict(table.get_nearest_neighbors(key_id, ROOTS, exclude=protocol.node_id)),
            seeds,
        )
        asking: dict[asyncio.Task[Any], Any] = {}
        try:
            while True:
                self._locate_connected(search)
                for place in search.to_ask():
                    ask = self._ask(protocol, search.known[place], key_id)
                    asking[asyncio.ensure_future(ask)] = place
                if search.is_over():
                    answered = search.found()
                    if search.is_located(answered):
                        return answered
                    await self._locate(search, answered)
                    continue
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = asking.pop(task)
                    if (answer := task.result()) is None:
                        search.failed(place)
                        continue
                    records, nearer = answer
                    if records:
                        found[search.known[place]] = records
                    search.answered(place, nearer, own_place=protocol.node_id)
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

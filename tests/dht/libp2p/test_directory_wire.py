"""Messages of the directory, bytes in: what no peer of ours writes is refused before it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.identity import Identity
from dht.libp2p.directory_wire import (
    NO_SUBKEY,
    RECORDS_MAX,
    MalformedMessage,
    read_records,
    write_records,
)
from dht.libp2p.hivemind_calls import RefusedByHandler
from dht.libp2p.hivemind_directory import CheckedCalls, RecordStorage, id_of
from dht.libp2p.hivemind_imports import DHTProtocol, P2PDaemonError, PeerID, dht_pb2
from dht.record_keeper import RecordKeeper
from dht.records import KEY_MAX_BYTES, PEER_RECORD_MAX_BYTES, PeerRecord, seal

ANNA = Identity.from_seed(bytes(32))
BORIS = Identity.from_seed(bytes(31) + b"\1")
KEY = "run/peers/0"
PLACE = id_of(KEY).to_bytes()
RECORD = seal(
    PeerRecord(protocol=(1, 1), role="learner", incarnation=1), BORIS, key=KEY, sequence=1, ttl_s=30
)

HOSTILE = {
    "arrays in arrays": b"\x91" * 200_000 + b"\xc0",
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "huge bytes": b"\x91\xc6\xff\xff\xff\xff",
    "many records": msgspec.msgpack.encode([b""] * (RECORDS_MAX + 1)),
    "a large record": msgspec.msgpack.encode([bytes(PEER_RECORD_MAX_BYTES + 1)]),
    "an extension": b"\x91\xd4\x50\xc0",
    "text": b"\x91\xa1x",
    "a map": b"\x80",
    "one record": msgspec.msgpack.encode(RECORD),
    "more behind": write_records([RECORD]) + b"\xc0",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_list_of_records_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_records(data)


def test_the_records_of_a_full_key_are_read_as_they_were_written() -> None:
    full = [RECORD] * (KEY_MAX_BYTES // len(RECORD))
    assert len(full) <= RECORDS_MAX
    assert read_records(write_records(full)) == full


# Whole messages, through hivemind's protocol


class Wire:
    """Stands in for the daemon: records the served protocols and gives prepared answers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.reply: bytes | None = None

    async def serve(self, protocol: str, handler: Any) -> None:
        self.handlers[protocol] = handler

    async def call(self, peer: Any, protocol: str, request: bytes) -> bytes:
        if self.reply is None:
            raise P2PDaemonError("nobody there")
        return self.reply


class Node:
    """hivemind's protocol with our storage, on a wire that is none."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.keeper = RecordKeeper()
        self.malformed: list[str] = []
        self.p2p = CheckedCalls(
            self.wire,  # type: ignore[arg-type]
            PeerID.from_base58(ANNA.peer_id),
            self.malformed.append,
        )
        self.protocol: Any

    async def open(self) -> None:
        self.protocol = await DHTProtocol.create(self.p2p, id_of(ANNA.peer_id), 20, 5, 5, 3.0)
        self.protocol.storage, self.protocol.cache = RecordStorage(self.keeper), {}

    async def ask(self, name: str, request: bytes) -> bytes:
        handler = self.wire.handlers[f"DHTProtocol.rpc_{name}"]
        try:
            reply: bytes = await handler(request, PeerID.from_base58(BORIS.peer_id))
        finally:
            await asyncio.sleep(0)
        return reply


def with_node(scenario: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        node = Node()
        await node.open()
        await scenario(node)

    asyncio.run(main())


async def call(node: Node, name: str) -> Any:
    """Call a peer, and return hivemind's reading of the reply."""
    peer = PeerID.from_base58(BORIS.peer_id)
    if name == "ping":
        answer = await node.protocol.call_ping(peer, validate=True)
    elif name == "store":
        answer = await node.protocol.call_store(peer, [id_of(KEY)], [RECORD], [0.0])
    else:
        answer = await node.protocol.call_find(peer, [id_of(KEY)])
    await asyncio.sleep(0)
    return answer


def store_request(**changes: Any) -> dht_pb2.StoreRequest:
    fields: dict[str, Any] = {
        "keys": [PLACE],
        "subkeys": [NO_SUBKEY],
        "values": [RECORD],
        "expiration_time": [0.0],
        "in_cache": [False],
        "peer": dht_pb2.NodeInfo(node_id=id_of(BORIS.peer_id).to_bytes()),
    }
    return dht_pb2.StoreRequest(**{**fields, **changes})


BAD_PLACE = [b"\0", bytes(19), bytes(21), bytes(5000)]
BAD_REQUESTS: list[tuple[str, str, Any]] = [
    *(
        ("ping", f"place {len(place)}", dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(
        ("find", f"sender {len(place)}", dht_pb2.FindRequest(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(("find", f"key {len(key)}", dht_pb2.FindRequest(keys=[key])) for key in BAD_PLACE),
    ("find", "no key", dht_pb2.FindRequest()),
    ("find", "two keys", dht_pb2.FindRequest(keys=[PLACE, PLACE])),
    *(
        ("store", f"sender {len(place)}", store_request(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(("store", f"key {len(key)}", store_request(keys=[key])) for key in BAD_PLACE),
    *(
        ("store", f"{len(items)} {name}", store_request(**{name: items}))
        for name, item in {
            "keys": PLACE,
            "subkeys": NO_SUBKEY,
            "values": b"",
            "expiration_time": 0.0,
            "in_cache": False,
        }.items()
        for items in ([], [item, item])
    ),
    ("store", "for the cache", store_request(in_cache=[True])),
    ("store", "a dictionary", store_request(subkeys=[b""])),
    ("store", "a subkey", store_request(subkeys=[msgspec.msgpack.encode(BORIS.peer_id)])),
    ("store", "nested subkeys", store_request(subkeys=[b"\xc9\0\0\0\2\x40\x91" * 250])),
]


@pytest.mark.parametrize(
    ("name", "request_message"),
    [(name, message) for name, _, message in BAD_REQUESTS],
    ids=[f"{name} {what}" for name, what, _ in BAD_REQUESTS],
)
def test_malformed_requests_are_refused_and_counted(name: str, request_message: Any) -> None:
    async def scenario(node: Node) -> None:
        with pytest.raises(RefusedByHandler, match="malformed: "):
            await node.ask(name, request_message.SerializeToString())
        assert len(node.malformed) == 1
        assert not node.protocol.routing_table.uid_to_peer_id
        assert node.keeper.stored_bytes(now=0.0) == 0

    with_node(scenario)


@pytest.mark.parametrize("name", ["ping", "find", "store"])
def test_a_place_that_is_not_that_of_the_senders_id_is_refused(name: str) -> None:
    """A peer with a place of its choice would store and answer for any key."""
    chosen = dht_pb2.NodeInfo(node_id=(id_of(KEY) ^ 1).to_bytes(20, "big"))
    requests: dict[str, Any] = {
        "ping": dht_pb2.PingRequest(peer=chosen),
        "find": dht_pb2.FindRequest(keys=[PLACE], peer=chosen),
        "store": store_request(peer=chosen),
    }

    async def scenario(node: Node) -> None:
        with pytest.raises(RefusedByHandler, match="malformed: a place that is not"):
            await node.ask(name, requests[name].SerializeToString())
        replies: dict[str, Any] = {
            "ping": dht_pb2.PingResponse(peer=chosen),
            "find": dht_pb2.FindResponse(results=[dht_pb2.FindResult()], peer=chosen),
            "store": dht_pb2.StoreResponse(store_ok=[True], peer=chosen),
        }
        node.wire.reply = replies[name].SerializeToString()
        assert await call(node, name) is None
        assert len(node.malformed) == 2
        assert not node.protocol.routing_table.uid_to_peer_id

    with_node(scenario)


@pytest.mark.parametrize("name", ["ping", "find", "store"])
@pytest.mark.parametrize("data", [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", bytes(3 << 20)])
def test_requests_that_are_no_protobuf_or_too_large_are_refused(name: str, data: bytes) -> None:
    async def scenario(node: Node) -> None:
        with pytest.raises(RefusedByHandler):
            await node.ask(name, data)
        assert len(node.malformed) == 1

    with_node(scenario)


def test_a_request_of_any_other_kind_is_not_served() -> None:
    async def scenario(node: Node) -> None:
        with pytest.raises(MalformedMessage, match="no message of the directory"):
            await node.p2p.add_protobuf_handler("other", None, dht_pb2.NodeInfo)

    with_node(scenario)


def test_honest_requests_are_answered_as_before() -> None:
    async def scenario(node: Node) -> None:
        for _ in range(2):
            reply = await node.ask("store", store_request().SerializeToString())
            assert list(dht_pb2.StoreResponse.FromString(reply).store_ok) == [True]
        reply = await node.ask("find", dht_pb2.FindRequest(keys=[PLACE]).SerializeToString())
        (result,) = dht_pb2.FindResponse.FromString(reply).results
        assert list(result.nearest_peer_ids) == [PeerID.from_base58(BORIS.peer_id).to_bytes()]
        node.wire.reply = reply
        answer = await node.protocol.call_find(PeerID.from_base58(ANNA.peer_id), [id_of(KEY)])
        found, nearest = answer[id_of(KEY)]
        assert read_records(found.value) == [RECORD]
        assert nearest == {id_of(BORIS.peer_id): PeerID.from_base58(BORIS.peer_id)}
        reply = await node.ask("ping", dht_pb2.PingRequest().SerializeToString())
        assert dht_pb2.PingResponse.FromString(reply).peer.node_id == id_of(ANNA.peer_id).to_bytes()
        assert not node.keeper.rejected and not node.malformed

    with_node(scenario)


def found(**changes: Any) -> dht_pb2.FindResponse:
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(**changes)])


GOOD_PEER = PeerID.from_base58(BORIS.peer_id).to_bytes()
BAD_REPLIES: list[tuple[str, str, Any]] = [
    *(
        ("ping", f"place {len(p)}", dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=p)))
        for p in BAD_PLACE
    ),
    ("store", "no answer", dht_pb2.StoreResponse()),
    ("store", "two answers", dht_pb2.StoreResponse(store_ok=[True, True])),
    (
        "store",
        "place",
        dht_pb2.StoreResponse(store_ok=[True], peer=dht_pb2.NodeInfo(node_id=bytes(21))),
    ),
    ("find", "no result", dht_pb2.FindResponse()),
    ("find", "two results", dht_pb2.FindResponse(results=[dht_pb2.FindResult()] * 2)),
    ("find", "an unknown type", found(type=3)),
    ("find", "a place without a peer", found(nearest_node_ids=[PLACE])),
    ("find", "a peer without a place", found(nearest_peer_ids=[GOOD_PEER])),
    *(
        ("find", f"a place {len(p)}", found(nearest_node_ids=[p], nearest_peer_ids=[GOOD_PEER]))
        for p in (b"", *BAD_PLACE)
    ),
    *(
        (
            "find",
            f"peer id {p[:6]!r} {len(p)}",
            found(nearest_node_ids=[PLACE], nearest_peer_ids=[p]),
        )
        for p in (b"", b"\0", bytes(38), GOOD_PEER[:-1], GOOD_PEER + b"\0", bytes(5000))
    ),
    (
        "find",
        "many peers",
        found(nearest_node_ids=[PLACE] * 65, nearest_peer_ids=[GOOD_PEER] * 65),
    ),
    *(
        ("find", f"records: {name}", found(type=dht_pb2.FOUND_REGULAR, value=data))
        for name, data in HOSTILE.items()
    ),
    ("find", "a dictionary", found(type=dht_pb2.FOUND_DICTIONARY, value=b"\xc0")),
]


@pytest.mark.parametrize(
    ("name", "reply"),
    [(name, reply) for name, _, reply in BAD_REPLIES],
    ids=[f"{name} {what}" for name, what, _ in BAD_REPLIES],
)
def test_malformed_replies_are_no_answer_and_counted(name: str, reply: Any) -> None:
    async def scenario(node: Node) -> None:
        node.wire.reply = reply.SerializeToString()
        assert await call(node, name) is None
        assert len(node.malformed) == 1
        assert not node.protocol.routing_table.uid_to_peer_id

    with_node(scenario)


def lists_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.one_of(st.lists(items, min_size=1, max_size=1), st.lists(items, max_size=3))


STORES = st.builds(
    store_request,
    keys=lists_of(st.sampled_from([PLACE, PLACE, b"", bytes(21)])),
    subkeys=lists_of(st.one_of(st.sampled_from([b"", NO_SUBKEY]), st.binary(max_size=20))),
    values=lists_of(st.one_of(st.just(RECORD), st.binary(max_size=200))),
    expiration_time=lists_of(st.floats()),
    in_cache=lists_of(st.booleans()),
)


@settings(max_examples=200)
@given(STORES)
def test_any_store_request_is_answered_or_refused(request_message: Any) -> None:
    async def scenario(node: Node) -> None:
        try:
            reply = await node.ask("store", request_message.SerializeToString())
        except RefusedByHandler:
            assert node.malformed
            return
        assert len(dht_pb2.StoreResponse.FromString(reply).store_ok) == 1

    with_node(scenario)

"""Messages of the directory, bytes in: what hivemind would not write is refused before it reads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.identity import Identity
from dht.libp2p import directory_wire as wire
from dht.libp2p.directory_wire import MalformedMessage, read_packed, read_subkey
from dht.libp2p.hivemind_directory import Judge, RecordStorage, id_of
from dht.libp2p.hivemind_patches import (
    DHTProtocol,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PDaemonError,
    PeerID,
    RefusedByHandler,
    StrictP2P,
    dht_pb2,
)
from dht.record_keeper import RecordKeeper
from dht.records import KEY_MAX_BYTES, PeerRecord, seal

ANNA = Identity.from_seed(bytes(32))
BORIS = Identity.from_seed(bytes(31) + b"\1")
KEY = "run/peers/0"
PLACE = id_of(KEY).to_bytes()
LATER = 4e9
RECORD = seal(
    PeerRecord(protocol=(1, 1), role="learner", incarnation=1), BORIS, key=KEY, sequence=1, ttl_s=30
)


def extended(code: int, content: bytes) -> bytes:
    return b"\xc9" + len(content).to_bytes(4, "big") + bytes([code]) + content


def tuples(depth: int, inside: bytes = b"\xc4\x00") -> bytes:
    for _ in range(depth):
        inside = extended(0x40, b"\x91" + inside)
    return inside


def dictionaries(depth: int) -> bytes:
    inside = b"\xc0"
    for _ in range(depth):
        inside = extended(0x50, b"\x93" + msgpack.packb(math.inf) + b"\x00\x91" + inside)
    return inside


def packed_dictionary(*entries: Any, size_max: Any = math.inf, latest: Any = LATER) -> bytes:
    return extended(0x50, msgpack.packb([size_max, latest, list(entries)]))


ENTRY = [BORIS.peer_id, RECORD, LATER]

HOSTILE = {
    "tuples in tuples": tuples(250),
    "tuples in tuples, thousands": tuples(20_000),
    "dictionaries in dictionaries": dictionaries(200),
    "a tuple in a tuple": tuples(2),
    "a dictionary in a list": b"\x91" + packed_dictionary(),
    "a dictionary in a tuple": tuples(1, packed_dictionary()),
    "arrays in arrays": b"\x91" * 200_000 + b"\xc0",
    "maps in maps": b"\x81\xc0" * 100_000 + b"\xc0",
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "a huge map": b"\xdf\xff\xff\xff\xff",
    "a huge string": b"\xdb\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "a huge extension": b"\xc9\xff\xff\xff\xff\x40",
    "many values": b"\xdd\x00\x08\x00\x00" + bytes(1 << 19),
    "too many bytes": b"\xc6\x00\x20\x00\x00" + bytes(2 << 20),
    "a time of msgpack's own": msgpack.packb(msgpack.Timestamp(1)),
    "an unknown extension": extended(0x51, b"\xc0"),
    "a tuple that is a number": extended(0x40, b"\x01"),
    "a tuple that is a map": extended(0x40, b"\x80"),
    "an extension cut short": extended(0x40, b"\x91\xc0")[:-1],
    "an extension with more behind": extended(0x40, b"\x90\xc0"),
    "an extension whose value ends beyond it": b"\xd4\x40\x91\xc0",
    "an empty extension": b"\xc7\x00\x40",
    "nothing": b"",
    "a byte that msgpack never uses": b"\xc1",
    "two values": b"\xc0\xc0",
    "text that is no text": b"\xa1\xff",
    "a map with a list as its key": b"\x81\x91\x91\x01\xc0",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_packed_values_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_subkey(data)
    if data != HOSTILE["a map with a list as its key"]:  # the decoder reads that as a tuple
        with pytest.raises(MalformedMessage):
            MSGPackSerializer.loads(data)


@pytest.mark.parametrize(
    "value", [None, "", "peer", b"peer", 0, -1, 2**63, ("a", 1, None), (), "ü" * 60]
)
def test_subkeys_that_hivemind_writes_are_read(value: Any) -> None:
    assert read_subkey(MSGPackSerializer.dumps(value)) == value


@pytest.mark.parametrize(
    "value", [1.5, [1], {"a": 1}, "x" * 300, ("x", 1.5), tuple(range(17)), ([],)]
)
def test_other_subkeys_are_refused(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        read_subkey(MSGPackSerializer.dumps(value))


@pytest.mark.parametrize(
    "value", [True, 3, 1.5, "text", b"bytes", [1, [2, "a"]], {"a": [None]}, ("a", 1), [(1, 2)]]
)
def test_values_that_hivemind_writes_are_read_as_before(value: Any) -> None:
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value


def test_dictionaries_come_back_as_they_were() -> None:
    written = DictionaryDHTValue()
    for number in range(300):
        written.store(f"peer {number}", bytes([number % 256]) * 800, LATER + number)
    written.store(("a", 1), b"under a tuple", LATER - 1)
    read = MSGPackSerializer.loads(MSGPackSerializer.dumps(written))
    assert isinstance(read, DictionaryDHTValue)
    assert dict(read.items()) == dict(written.items())
    assert read.latest_expiration_time == written.latest_expiration_time
    assert MSGPackSerializer.dumps(read) == MSGPackSerializer.dumps(written)


BAD_DICTIONARIES = {
    "no parts": extended(0x50, b"\x90"),
    "no array": extended(0x50, b"\xc0"),
    "another size": packed_dictionary(size_max=-1.0),
    "a size that is no number": packed_dictionary(size_max=math.nan),
    "an entry of two": packed_dictionary(["a", b"b"]),
    "an entry that is none": packed_dictionary(None),
    "a value that is no bytes": packed_dictionary(["a", "b", LATER]),
    "a subkey that is a list": packed_dictionary([["a"], b"b", LATER]),
    "a subkey without end": packed_dictionary(["a" * 1000, b"b", LATER]),
    "more than a key may hold": packed_dictionary(["a", bytes(KEY_MAX_BYTES + 1), LATER]),
    "subkeys without an order": packed_dictionary(["a", b"b", LATER], [1, b"b", LATER]),
    **{
        f"time {time!r} of an entry": packed_dictionary(["a", b"b", time])
        for time in (math.nan, math.inf, -math.inf, -1.0, 1e300, 2**63, None, "1", True)
    },
    **{
        f"time {time!r}": packed_dictionary(latest=time)
        for time in (math.nan, math.inf, -math.inf, -1.0, None)
    },
}


@pytest.mark.parametrize("data", BAD_DICTIONARIES.values(), ids=BAD_DICTIONARIES.keys())
def test_dictionaries_of_another_shape_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        MSGPackSerializer.loads(data)


# Whole messages, through hivemind's protocol


class Wire:
    """Stands in for the daemon: records the served protocols and gives prepared answers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.reply: bytes | None = None

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool) -> None:
        self.handlers[proto] = handler

    async def call_unary_handler(self, peer: Any, proto: str, data: bytes) -> bytes:
        if self.reply is None:
            raise P2PDaemonError("nobody there")
        return self.reply


class WiredP2P(StrictP2P):
    """Without a daemon there is nothing to end."""

    def __del__(self) -> None:
        return


class Node:
    """hivemind's protocol with our storage and our judge, on a wire that is none."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.keeper = RecordKeeper()
        self.p2p = WiredP2P()
        self.p2p._client = self.wire
        self.p2p.peer_id = PeerID.from_base58(ANNA.peer_id)
        self.judge = Judge(self.keeper)
        self.p2p.on_malformed = self.judge.malformed
        self.protocol: Any

    async def open(self) -> None:
        self.protocol = await DHTProtocol.create(
            self.p2p, id_of(ANNA.peer_id), 20, 5, 5, 3.0, record_validator=self.judge
        )
        self.protocol.storage = RecordStorage(self.judge)

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
        answer = await node.protocol.call_store(
            peer, [id_of(KEY)], [RECORD], [LATER], subkeys=[BORIS.peer_id]
        )
    else:
        answer = await node.protocol.call_find(peer, [id_of(KEY)])
    await asyncio.sleep(0)
    return answer


def store_request(**changes: Any) -> dht_pb2.StoreRequest:
    fields: dict[str, Any] = {
        "keys": [PLACE],
        "subkeys": [MSGPackSerializer.dumps(BORIS.peer_id)],
        "values": [RECORD],
        "expiration_time": [LATER],
        "in_cache": [False],
        "peer": dht_pb2.NodeInfo(node_id=id_of(BORIS.peer_id).to_bytes()),
    }
    return dht_pb2.StoreRequest(**{**fields, **changes})


BAD_PLACE = [b"\0", bytes(19), bytes(21), bytes(5000)]
BAD_TIME = [math.nan, math.inf, -math.inf, -1.0, 1e300]
BAD_REQUESTS: list[tuple[str, str, Any]] = [
    *(
        ("ping", f"place {len(place)}", dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(
        ("find", f"sender {len(place)}", dht_pb2.FindRequest(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(("find", f"key {len(k)}", dht_pb2.FindRequest(keys=[PLACE, k])) for k in BAD_PLACE),
    ("find", "an empty key", dht_pb2.FindRequest(keys=[b""])),
    ("find", "many keys", dht_pb2.FindRequest(keys=[PLACE] * 65)),
    ("find", "a hundred thousand keys", dht_pb2.FindRequest(keys=[b""] * 100_000)),
    *(
        ("store", f"sender {len(place)}", store_request(peer=dht_pb2.NodeInfo(node_id=place)))
        for place in BAD_PLACE
    ),
    *(("store", f"key {len(key)}", store_request(keys=[key])) for key in BAD_PLACE),
    *(("store", f"time {t}", store_request(expiration_time=[t])) for t in BAD_TIME),
    *(
        ("store", f"{len(items)} {name}", store_request(**{name: items}))
        for name, item in {
            "keys": PLACE,
            "subkeys": b"\xc0",
            "values": b"",
            "expiration_time": LATER,
            "in_cache": False,
        }.items()
        for items in ([], [item, item])
    ),
    (
        "store",
        "many keys",
        store_request(
            keys=[PLACE] * 65,
            subkeys=[b"\xc0"] * 65,
            values=[b""] * 65,
            expiration_time=[LATER] * 65,
            in_cache=[False] * 65,
        ),
    ),
    *(("store", f"subkey: {name}", store_request(subkeys=[d])) for name, d in HOSTILE.items() if d),
    ("store", "many records", store_request(subkeys=[b""], values=[packed_dictionary()])),
    *(
        ("store", f"dictionary: {name}", store_request(subkeys=[b""], values=[data]))
        for name, data in {**HOSTILE, **BAD_DICTIONARIES}.items()
        if name != "subkeys without an order"  # known only when they are put in order
    ),
    ("store", "no dictionary", store_request(subkeys=[b""], values=[b"\xc0"])),
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
        assert node.keeper.rejected == {"malformed": 1}
        assert not node.protocol.routing_table.uid_to_peer_id
        assert node.protocol.storage.size_bytes() == 0

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
        assert node.keeper.rejected == {"malformed": 2}
        assert not node.protocol.routing_table.uid_to_peer_id

    with_node(scenario)


@pytest.mark.parametrize("name", ["ping", "find", "store"])
@pytest.mark.parametrize("data", [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", bytes(3 << 20)])
def test_requests_that_are_no_protobuf_or_too_large_are_refused(name: str, data: bytes) -> None:
    async def scenario(node: Node) -> None:
        with pytest.raises(RefusedByHandler):
            await node.ask(name, data)
        assert node.keeper.rejected == {"malformed": 1}

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
        assert [(subkey, item.value) for subkey, item in found.value.items()] == [
            (BORIS.peer_id, RECORD)
        ]
        assert nearest == {id_of(BORIS.peer_id): PeerID.from_base58(BORIS.peer_id)}
        reply = await node.ask("ping", dht_pb2.PingRequest().SerializeToString())
        assert dht_pb2.PingResponse.FromString(reply).peer.node_id == id_of(ANNA.peer_id).to_bytes()
        assert not node.keeper.rejected

    with_node(scenario)


def found(**changes: Any) -> dht_pb2.FindResponse:
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(**changes)])


GOOD_PEER = PeerID.from_base58(BORIS.peer_id).to_bytes()
BAD_REPLIES: list[tuple[str, str, Any]] = [
    *(
        ("ping", f"place {len(p)}", dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=p)))
        for p in BAD_PLACE
    ),
    *(("ping", f"time {time}", dht_pb2.PingResponse(dht_time=time)) for time in BAD_TIME),
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
        ("find", f"time {time}", found(type=1, value=b"\xc0", expiration_time=time))
        for time in BAD_TIME
    ),
    *(
        ("find", f"dictionary: {name}", found(type=2, value=data))
        for name, data in {**HOSTILE, **BAD_DICTIONARIES}.items()
        if name != "subkeys without an order"
    ),
    ("find", "no dictionary", found(type=2, value=b"\xc0")),
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
        assert node.keeper.rejected == {"malformed": 1}
        assert not node.protocol.routing_table.uid_to_peer_id

    with_node(scenario)


def test_a_reply_with_subkeys_that_have_no_order_is_no_answer() -> None:
    async def scenario(node: Node) -> None:
        value = BAD_DICTIONARIES["subkeys without an order"]
        node.wire.reply = found(type=2, value=value).SerializeToString()
        assert await node.protocol.call_find(PeerID(GOOD_PEER), [id_of(KEY)]) is None

    with_node(scenario)


# Any bytes at all, with structure

ATOMS = st.one_of(
    st.sampled_from([b"\xc0", b"\xc2", b"\xc3", b"\x00", b"\xff", b"\xa0", b"\xa1a", b"\xc4\x00"]),
    st.integers(-(2**63), 2**64 - 1).map(msgpack.packb),
    st.floats().map(msgpack.packb),
    st.text(max_size=4).map(msgpack.packb),
    st.binary(max_size=4).map(msgpack.packb),
)
CODES = st.sampled_from([0x40, 0x40, 0x50, 0x50, 0x51, 0xFF, 0x00])


def _array(items: list[bytes]) -> bytes:
    return b"\xdc" + len(items).to_bytes(2, "big") + b"".join(items)


def _map(items: list[tuple[bytes, bytes]]) -> bytes:
    pairs = [key + value for key, value in items]
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(pairs)


PACKED = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(_array),
        st.lists(st.tuples(ATOMS, inner), max_size=3).map(_map),
        st.builds(extended, CODES, inner),
        st.builds(extended, CODES, st.lists(inner, max_size=3).map(_array)),
        st.lists(inner, max_size=2).map(lambda items: extended(0x50, _array(items))),
        st.builds(tuples, st.integers(0, 300), inner),
    ),
    max_leaves=12,
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Packed values with wrong lengths, wrong types, and ends too early."""
    data = bytearray(draw(PACKED))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def _nothing_else(code: int, content: bytes) -> Any:
    assert code == 0x40, "only a tuple may be inside a value"
    return tuple(msgpack.unpackb(content, ext_hook=_nothing_else, strict_map_key=False))


@settings(max_examples=200)
@given(PACKED)
def test_values_read_are_those_that_another_decoder_reads(data: bytes) -> None:
    try:
        value = read_packed(data)
    except MalformedMessage:
        return
    if isinstance(value, wire.Dictionary):
        return
    other = msgpack.unpackb(data, ext_hook=_nothing_else, strict_map_key=False)
    assert repr(value) == repr(other)


def lists_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.one_of(st.lists(items, min_size=1, max_size=1), st.lists(items, max_size=3))


STORES = st.builds(
    store_request,
    keys=lists_of(st.sampled_from([PLACE, PLACE, b"", bytes(21)])),
    subkeys=lists_of(
        st.one_of(st.sampled_from([b"", b"\xc0", MSGPackSerializer.dumps(BORIS.peer_id)]), spoilt())
    ),
    values=lists_of(st.one_of(st.sampled_from([RECORD, packed_dictionary(ENTRY)]), spoilt())),
    expiration_time=lists_of(st.one_of(st.just(LATER), st.floats())),
    in_cache=lists_of(st.booleans()),
)


@settings(max_examples=200)
@given(STORES)
def test_any_store_request_is_answered_or_refused(request_message: Any) -> None:
    async def scenario(node: Node) -> None:
        try:
            reply = await node.ask("store", request_message.SerializeToString())
        except RefusedByHandler:
            assert node.keeper.rejected["malformed"]
            return
        answers = dht_pb2.StoreResponse.FromString(reply).store_ok
        assert len(answers) == len(request_message.keys) == len(request_message.subkeys)

    with_node(scenario)

"""Hostile requests of seventeen kinds that any peer can send to any other one."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import msgspec
from multiaddr import Multiaddr

from dht import addresses
from dht.errors import DhtError
from dht.host import UNARY_MAX_BYTES
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.directory_wire import NO_SUBKEY
from dht.libp2p.hivemind_directory import id_of
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.hivemind_imports import dht_pb2
from dht.membership import hello
from dht.membership.table import bucket_key
from dht.records import (
    SEQUENCE_MAX,
    PeerRecord,
    seal,
)

HOST = HostSettings(listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),), port_mapping=False)
TIMEOUT_S = 10.0
LATER = 4e9
CROWDED = RunId("cd" * 32)
"""A run whose first bucket the attackers fill, and then read."""

RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, name="x" * 32)


class Attacker:
    """One identity that sends one request after another to one peer."""

    def __init__(
        self, identity: Identity, host: HivemindHost, target: PeerId, rng: random.Random
    ) -> None:
        self.key = identity
        """The host's own identity."""
        self.host = host
        self.target = target
        self.rng = rng
        self.run = CROWDED
        self.identity = Identity.from_seed(rng.randbytes(32))
        """The identity that its records are signed by."""
        self.place = id_of(host.peer_id).to_bytes()
        self.sequence = 1

    async def call(self, protocol: str, request: bytes) -> None:
        await self.host.call(self.target, protocol, request, timeout_s=TIMEOUT_S)

    async def find(self, *keys: bytes, place: bytes = b"") -> None:
        info = dht_pb2.NodeInfo(node_id=place)
        await self.call(
            "DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=keys, peer=info).SerializeToString()
        )

    async def store(self, key: str, value: bytes, subkey: bytes = NO_SUBKEY) -> None:
        request = dht_pb2.StoreRequest(
            keys=[id_of(key).to_bytes()],
            subkeys=[subkey],
            values=[value],
            expiration_time=[LATER],
            in_cache=[False],
            peer=dht_pb2.NodeInfo(node_id=self.place),
        )
        await self.call("DHTProtocol.rpc_store", request.SerializeToString())

    def sealed(self, key: str, *, sequence: int = 1) -> bytes:
        return seal(RECORD, self.identity, key=key, sequence=sequence, ttl_s=600)

    def new_run(self) -> RunId:
        return RunId(self.rng.randbytes(32).hex())

    # Seventeen kinds

    async def ping_with_a_chosen_place(self) -> None:
        info = dht_pb2.NodeInfo(node_id=self.rng.randbytes(20))
        await self.call("DHTProtocol.rpc_ping", dht_pb2.PingRequest(peer=info).SerializeToString())

    async def ping_of_garbage(self) -> None:
        await self.call("DHTProtocol.rpc_ping", self.rng.randbytes(200))

    async def find_anything(self) -> None:
        await self.find(self.rng.randbytes(20), place=self.place)

    async def find_many_keys(self) -> None:
        await self.find(*(self.rng.randbytes(20) for _ in range(1000)))

    async def find_what_is_large(self) -> None:
        await self.find(id_of(bucket_key(self.run, "")).to_bytes())

    async def store_under_a_nested_subkey(self) -> None:
        nested = b"\xc4\x00"
        for _ in range(250):
            nested = b"\xc9" + (len(nested) + 1).to_bytes(4, "big") + b"\x40\x91" + nested
        await self.store("x", b"x", nested)

    async def store_garbage(self) -> None:
        await self.store(bucket_key(self.run, ""), self.rng.randbytes(900))

    async def store_a_member_of_a_new_run(self) -> None:
        self.identity = Identity.from_seed(self.rng.randbytes(32))
        key = bucket_key(self.new_run(), "")
        await self.store(key, self.sealed(key))

    async def store_one_more_member(self) -> None:
        self.identity = Identity.from_seed(self.rng.randbytes(32))
        key = bucket_key(self.run, "")
        await self.store(key, self.sealed(key, sequence=SEQUENCE_MAX))

    async def renew_a_member(self) -> None:
        key = bucket_key(self.run, "")
        self.sequence += 1
        await self.store(key, self.sealed(key, sequence=self.sequence))

    async def store_under_a_subkey(self) -> None:
        key = bucket_key(self.run, "")
        await self.store(key, self.sealed(key), msgspec.msgpack.encode(self.identity.peer_id))

    async def store_a_dictionary(self) -> None:
        rows = [[self.rng.randbytes(8).hex(), self.rng.randbytes(60), LATER] for _ in range(100)]
        packed = msgspec.msgpack.encode([math.inf, LATER, rows])
        value = b"\xc9" + len(packed).to_bytes(4, "big") + b"\x50" + packed
        await self.store(bucket_key(self.run, ""), value, b"")

    async def greet_with_garbage(self) -> None:
        await self.call(hello.HELLO_PROTOCOL, self.rng.randbytes(500))

    async def greet_for_a_new_run(self) -> None:
        run = self.new_run()
        record = seal(RECORD, self.key, key=bucket_key(run, ""), sequence=1, ttl_s=600)
        passed = tuple(
            hello.Passed(self.sealed(bucket_key(run, ""), sequence=n), 0.0)
            for n in range(hello.PASSED_MAX)
        )
        message = hello.Hello(run=run, record=record, passed=passed)
        await self.call(hello.HELLO_PROTOCOL, hello.write(message))

    async def ask_for_a_dial_back(self) -> None:
        places = tuple(
            addresses.pack(addresses.parse(f"/ip4/10.0.0.{n}/tcp/{self.rng.randrange(1, 65536)}"))
            for n in range(1, 4)
        )
        message = hello.DialBack(
            peer=self.identity.peer_id,
            nonce=self.rng.randbytes(16),
            addresses=places,
            relay=False,
        )
        await self.call(hello.DIAL_BACK_PROTOCOL, hello.write(message))

    async def call_what_is_too_large_or_not_served(self) -> None:
        protocol = self.rng.choice((hello.RUN_FILE_PROTOCOL, "/shoal/nothing/1"))
        await self.call(protocol, bytes(UNARY_MAX_BYTES // 2))

    async def open_a_stream_of_garbage(self) -> None:
        protocol = self.rng.choice(("/ipfs/kad/1.0.0", "/libp2p/circuit/relay/0.2.0/hop"))
        stream = await self.host.open_stream(self.target, protocol, timeout_s=TIMEOUT_S)
        with suppress(DhtError):
            await stream.send(self.rng.randbytes(1000), timeout_s=1.0)
        stream.abort()


_VERBS = ("ping_", "find_", "store_", "renew_", "greet_", "ask_", "call_", "open_", "send_")


def kinds_of(attacker: type[Attacker]) -> list[str]:
    """The names of the methods that send a request of one kind."""
    return sorted(name for name in vars(attacker) if name.startswith(_VERBS))


KINDS = kinds_of(Attacker)

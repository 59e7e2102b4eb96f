"""A crowd of strangers beside a run: every kind of hostile request at once, with ever new keys.

It sends to members and bootstrap peers what any peer can send to any other one
(``hostile_requests``), and what only members may send: joins, forged heads, uploads, requests for
states. It also holds half-open connections to the ports of lanes, and sends random bytes to others.
The counter ``believed`` is the number of times that a member came to a stranger for a state.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
from multiaddr import Multiaddr

from averaging import messages as said
from averaging.live.states.fetch_server import AskManifest, fetch_protocol
from averaging.live.streams.links import bulk_protocol, control_protocol
from averaging.messages import Head, Join, Link, Message
from dht.errors import DhtError
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import Identity, RunId
from dht.libp2p.hivemind_host import HivemindHost
from dht.libp2p.lane.wire import LANE_PROTOCOL
from dht.membership import hello
from dht.membership.table import bucket_key
from dht.records import seal
from tests.chaos.attackers.hostile_requests import HOST, KINDS, RECORD, Attacker, kinds_of
from tests.chaos.attackers.stranger import TIMEOUT_S, dial, knock_silently

IDENTITIES = 2
KEEP_S = 10.0
"""Time after which an identity is given up for a new one."""

BABBLE_EVERY_S = 0.1

AT_ONCE = 8
FRAGMENTS = 4
"""Number of fragments of the run."""

VERSION = 1_000_000
"""The version that forged heads claim."""


class Intruder(Attacker):
    """A stranger that also sends what only members may send."""

    done: Counter[str]

    async def _say(self, *messages: Message) -> None:
        stream = await self.host.open_stream(
            self.target, control_protocol(self.run), timeout_s=TIMEOUT_S
        )
        try:
            for message in messages:
                await stream.send(b"\x01" + said.encode(message), timeout_s=TIMEOUT_S)
                self.done["frames"] += 1
            await stream.receive(timeout_s=1.0)
        finally:
            stream.abort()

    def _head(self) -> Head:
        lineage = self.rng.randbytes(32)
        return Head(VERSION, lineage, (Link(VERSION, lineage, 10**12),))

    async def send_joins(self) -> None:
        await self._say(*(self._join(fragment) for fragment in range(FRAGMENTS)))

    def _join(self, fragment: int) -> Join:
        join = Join(
            fragment=fragment,
            topic=self.rng.randbytes(16),
            incarnation=1,
            join=1,
            head=self._head(),
            base_version=VERSION,
            staleness=0,
            mark=10**6,
            steps=10**6,
            tokens=10**9,
            batch_tokens_max=10**6,
            bytes_per_s=1e9,
            reachable=True,
            codecs=("f32", "int8"),
        )
        return msgspec.structs.replace(
            join, signatures=((1, self.key.sign(said.claim_of(join, self.target))),)
        )

    async def send_forged_heads(self) -> None:
        for fragment in range(FRAGMENTS):
            head = self._head()
            await self._say(
                said.Compare(fragment, head),
                said.Behind(fragment, head, self.rng.randbytes(32)),
                said.Finished(fragment, self.rng.randbytes(32), head),
                said.Call(fragment, head, 5.0),
            )

    async def send_large_uploads(self) -> None:
        """Use up bandwidth, on the stream of an upload."""
        stream = await self.host.open_stream(
            self.target, bulk_protocol(self.run), timeout_s=TIMEOUT_S
        )
        try:
            for _ in range(4):
                await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=TIMEOUT_S)
                self.done["frames"] += 1
        finally:
            stream.abort()

    async def ask_for_the_state(self) -> None:
        stream = await self.host.open_stream(
            self.target, fetch_protocol(self.run), timeout_s=TIMEOUT_S
        )
        try:
            await stream.send(msgspec.msgpack.encode(AskManifest(0)), timeout_s=TIMEOUT_S)
            answer = await stream.receive(timeout_s=TIMEOUT_S)
            if answer and answer[0] == 1:
                self.done["states_served"] += 1
        finally:
            stream.abort()

    async def ask_for_a_lane(self) -> None:
        await self.call(LANE_PROTOCOL, b"")

    async def ask_for_the_run_file(self) -> None:
        await self.call(hello.RUN_FILE_PROTOCOL, self.run.encode())

    async def greet_the_run(self) -> None:
        """A right hello of a peer that the run does not admit."""
        key = bucket_key(self.run, "")
        record = seal(RECORD, self.key, key=key, sequence=1, ttl_s=600)
        await self.call(hello.HELLO_PROTOCOL, hello.write(hello.Hello(run=self.run, record=record)))

    async def store_the_own_record(self) -> None:
        self.identity = self.key
        await self.renew_a_member()


ALL_KINDS = [*KINDS, *kinds_of(Intruder)]


class Crowd:
    """Identities that attack the same peers, until they are given up for new ones."""

    def __init__(
        self,
        run: RunId,
        at: Sequence[Multiaddr],
        done: Counter[str],
        rng: random.Random,
        *,
        rate: float,
    ) -> None:
        """``rate``: requests a second of one identity."""
        self._run = run
        self._at = at
        self._done = done
        self._rng = rng
        self._rate = rate

    async def attack(self) -> None:
        """One identity after another."""
        while True:
            self._done["identities"] += 1
            async with self._opened(Identity.from_seed(self._rng.randbytes(32))) as attackers:
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_S), asyncio.TaskGroup() as tasks:
                        for _ in range(AT_ONCE):
                            tasks.create_task(self._act(attackers))

    @asynccontextmanager
    async def _opened(self, identity: Identity) -> AsyncIterator[list[Intruder]]:
        """A host with this identity, connected to the peers."""
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(await HivemindHost.open(identity, HOST))
            for protocol in (fetch_protocol(self._run), control_protocol(self._run)):
                await host.serve_streams(protocol, self._visited)
            attackers = []
            for peer in await dial(host, self._at, self._done):
                attacker = Intruder(identity, host, peer, self._rng)
                attacker.run, attacker.done = self._run, self._done
                attackers.append(attacker)
            yield attackers

    async def _visited(self, stream: Stream) -> None:
        self._done["believed"] += 1
        stream.abort()

    async def _act(self, attackers: Sequence[Intruder]) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(self._rate / AT_ONCE))
            if not attackers:
                continue
            kind = self._rng.choice(ALL_KINDS)
            self._done[kind] += 1
            try:
                await getattr(self._rng.choice(attackers), kind)()
                self._done["answered"] += 1
            except (DhtError, TimeoutError):
                self._done["refused"] += 1


async def babble(port: int, done: Counter[str], rng: random.Random) -> None:
    """Send random bytes to a port, again and again, and hang up."""
    while True:
        await asyncio.sleep(BABBLE_EVERY_S)
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(rng.randbytes(300))
                done["babble"] += 1
                async with asyncio.timeout(1.0):
                    await reader.read(4096)
            finally:
                writer.transport.abort()


async def attack(
    run: RunId,
    at: Sequence[Multiaddr],
    done: Counter[str],
    *,
    knock: Sequence[int],
    babble_at: Sequence[int],
    rate: float,
    seed: int,
) -> None:
    """Attack these addresses without end. Counts in ``done``.

    ``knock``, ``babble_at``: ports to connect to in silence, and to send random bytes to.
    """
    rng = random.Random(seed)
    crowd = Crowd(run, at, done, rng, rate=rate)
    async with asyncio.TaskGroup() as tasks:
        for port in knock:
            tasks.create_task(knock_silently("127.0.0.1", port, done))
        for port in babble_at:
            tasks.create_task(babble(port, done, rng))
        for _ in range(IDENTITIES):
            tasks.create_task(crowd.attack())

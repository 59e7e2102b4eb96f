"""Many keys of each liar, which cost nothing: all peers see them, and none of them ever works."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec

from averaging import messages as said
from averaging.live.streams.links import control_protocol
from averaging.messages import Head, Link, Message
from averaging.rules.peer_view import PeerView
from averaging.virtual.keys import CheapKey
from dht.bounded_mapping import ALL
from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.host import Host, Stream
from dht.identity import PeerId
from tests.averaging.virtual.liars import SwarmWithLiars

TABLES = frozenset(
    (
        "failed peers", "last merges", "late peers", "lives",
        "moved by", "peers behind", "reputation", "tokens in states", "verdicts",
        "witnessed rounds", "work seen",
    )
)  # fmt: skip
"""Tables that these keys fill ..."""
PLACES = 16
"""... because they have fewer places here than there are keys."""
FIRST = 1000
"""Number of the first of these keys: those of peers come before."""
BEAT_S = 4.0
SAY_WITHIN_S = 5.0


class ThrowawayKeys:
    """Twenty keys of each liar, with a host each and no averager.

    Each says something to a peer now and then, mostly what fills a table there: joins to rounds
    that it will not upload to, commits as their leader, states that nobody has, proofs of its own
    invention, votes on bits, and what others have said, in its own name.
    """

    def __init__(
        self, swarm: SwarmWithLiars, seed: int, *, of_each: int = 20, every_s: float = 8.0
    ) -> None:
        self.swarm = swarm
        self.rng = random.Random(f"throwaway keys {seed}")
        self.said = 0
        self._every_s = every_s
        self._overheard: dict[type[Message], Message] = {}
        self._streams: dict[tuple[PeerId, PeerId], Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        keys = [CheapKey(FIRST + number) for number in range(of_each * len(swarm.liars))]
        self.hosts: dict[PeerId, Host] = {key.peer_id: swarm.memory.host(key) for key in keys}
        swarm.keys |= {key.peer_id: key for key in keys}
        swarm.liars |= self.hosts.keys()
        overhear = swarm.on_send

        def listen(sender: PeerId, to: PeerId, message: Message) -> bool:
            if sender not in self.hosts:
                self._overheard[type(message)] = message
            return overhear is None or overhear(sender, to, message)

        swarm.on_send = listen
        swarm.call_in(0.0, self._beat)
        for key in self.hosts:
            swarm.call_in(self.rng.uniform(0.0, every_s), self._speak, key)

    def _beat(self) -> None:
        """Everybody hears from all of them, and has full tables."""
        for table in ALL:
            if table.name in TABLES:
                table.limit = min(table.limit, PLACES)
        self.swarm.call_in(BEAT_S, self._beat)
        for peer in [*self.swarm.alive, *self.swarm.liars_alive()]:
            for key in self.hosts.keys() - set(peer.averager.guard.convicted):
                now, known = peer.now(), peer.view.get(key)
                first_seen = now if known is None else known.first_seen
                peer.view[key] = PeerView(
                    first_seen, now, reachable=False, step_time_s=1.0
                )  # fmt: skip

    def _speak(self, key: PeerId) -> None:
        self.swarm.call_in(self.rng.expovariate(1.0 / self._every_s), self._speak, key)
        to = self.rng.choice(self.swarm.names)
        message = self.rng.choice(_SAYINGS)(self, key, to)
        peer = self.swarm.nodes.get(to)
        if message is not None and peer is not None and peer.alive:
            task = asyncio.get_running_loop().create_task(self._say(key, to, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _say(self, key: PeerId, to: PeerId, message: Message) -> None:
        try:
            stream = self._streams.get((key, to))
            if stream is None:
                host = self.hosts[key]
                await host.connect(to, self.swarm.addresses(to), timeout_s=SAY_WITHIN_S)
                protocol = control_protocol(self.swarm.of.run_id)
                stream = await host.open_stream(to, protocol, timeout_s=SAY_WITHIN_S)
                self._streams[key, to] = stream
            await stream.send(b"\x01" + said.encode(message), timeout_s=SAY_WITHIN_S)
            self.said += 1
        except (PeerUnreachable, StreamBroken, HostClosed, TimeoutError):
            self._streams.pop((key, to), None)

    # What they say

    def _join(self, key: PeerId, to: PeerId) -> Message | None:
        true = self._overheard.get(said.Join)
        if not isinstance(true, said.Join):
            return None
        join = msgspec.structs.replace(true, join=self.rng.randrange(1000), incarnation=1)
        sign = self.swarm.keys[key].sign
        return msgspec.structs.replace(join, signatures=((1, sign(said.claim_of(join, to))),))

    def _commit(self, key: PeerId, to: PeerId) -> Message | None:
        true = self._overheard.get(said.Committed)
        if not isinstance(true, said.Committed):
            return None
        nonce = self.rng.randrange(3)  # two of one number convict it
        commit = msgspec.structs.replace(
            said.decode_commit(true.commit), leader=key, nonce=nonce, round_s=self.rng.uniform(5, 9)
        )
        encoded = said.encode_commit(commit)
        return said.Committed(0, encoded, self.swarm.sign(key, encoded))

    def _head(self, key: PeerId, to: PeerId) -> Message | None:
        peer = self.swarm.nodes.get(to)
        standing = None if peer is None or not peer.alive else peer.machine.standing
        if standing is None:
            return None
        true, rng = standing.head(), self.rng
        tip = Link(true.version + rng.randint(1, 9), rng.randbytes(32), standing.merged.tokens + 9)
        claim = said.link_claim(self.swarm.topic, 0, tip)
        signatures = tuple((each, self.swarm.sign(each, claim)) for each in list(self.hosts)[:20])
        head = Head(tip.version, tip.lineage, (tip, *true.links[:20]), signatures)
        sayings: list[Message] = [
            said.Compare(0, head),
            said.Call(0, head, 5.0),
            said.Behind(0, head, standing.lineage),
        ]
        return rng.choice(sayings)

    def _accusation(self, key: PeerId, to: PeerId) -> Message | None:
        accused = self.rng.choice([*self.swarm.names, *self.hosts])
        return said.Accused(0, self.rng.randbytes(32), accused)

    def _bits(self, key: PeerId, to: PeerId) -> Message | None:
        true = self._overheard.get(said.Bits)
        lineage = true.lineage if isinstance(true, said.Bits) else self.rng.randbytes(32)
        return said.Bits(0, lineage, self.rng.randbytes(32))

    def _repeat(self, key: PeerId, to: PeerId) -> Message | None:
        heard = list(self._overheard.values())
        return self.rng.choice(heard) if heard else None


_SAYINGS: tuple[Callable[[ThrowawayKeys, PeerId, PeerId], Message | None], ...] = (
    ThrowawayKeys._join,
    ThrowawayKeys._commit,
    ThrowawayKeys._head,
    ThrowawayKeys._accusation,
    ThrowawayKeys._bits,
    ThrowawayKeys._repeat,
)

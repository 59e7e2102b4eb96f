"""Swarms in which links between peers break while rosters gather, and what comes of it.

A link that breaks loses what is on its way in both directions and the streams on it, both peers are
told of it, and for the length of the outage each dial fails, as when one's daemon is restarted.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from averaging.virtual.swarm import Peer, PeerPlan
from dht.errors import PeerUnreachable
from dht.host import Messaging, Stream
from dht.identity import PeerId
from dht.wrapped_host import ForwardingHost
from tests.averaging.virtual.swarm import Swarm

POLICY = RoundPolicy(
    due=DuePolicy(cycle_steps=12, fragments=1), codec="int8", catch_up_s=60.0, round_s=120.0
)
"""The waits of a run's defaults, with a cycle of six seconds."""

STEP_S, SLOWEST = 0.5, 1.15
"""Time of a step, and how many times as long it takes the slowest peer."""
CYCLE_S = POLICY.due.cycle_steps * STEP_S * SLOWEST
LOOK_S = 0.05
BEFORE_S = 2.5


class BreakableHost(ForwardingHost):
    """A host that can lose its connections, and for a while opens no stream to a peer."""

    def __init__(self, host: Messaging) -> None:
        super().__init__(host)
        self.down_until: dict[PeerId, float] = {}

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if asyncio.get_running_loop().time() < self.down_until.get(peer, 0.0):
            raise PeerUnreachable(peer, "the daemon is being restarted")
        return await super().open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


class BreakableSwarm(Swarm):
    def host_of(self, name: PeerId) -> Messaging:
        return BreakableHost(super().host_of(name))


@dataclass(eq=False)
class Links:
    """The links of a swarm, which can be broken, and what came of it."""

    swarm: Swarm = field(repr=False)
    down_until: dict[frozenset[PeerId], float] = field(
        default_factory=lambda: defaultdict(float), repr=False
    )
    two_leaders_s: float = 0.0
    """The longest time for which two peers led one version, while their link was there."""
    gap_s: float = 0.0
    """The longest time without a merge, outages not counted."""
    _since: dict[frozenset[PeerId], float] = field(default_factory=dict, repr=False)
    version: int = -1
    merged_at: float = 0.0

    def __post_init__(self) -> None:
        self.swarm.call_in(LOOK_S, self._look)

    def break_link(self, one: PeerId, other: PeerId, lasts_s: float) -> None:
        """Both lose what is on its way, and reach each other again after this time."""
        until = self.swarm.now + lasts_s
        self.down_until[frozenset((one, other))] = until
        for here, there in ((one, other), (other, one)):
            host = self.swarm.nodes[here].averager.host
            assert isinstance(host, BreakableHost)
            host.down_until[there] = until
            self.swarm.await_(self.swarm.memory._hosts[here].disconnect(there))

    def _look(self) -> None:
        now = self.swarm.now
        self.swarm.call_in(LOOK_S, self._look)
        leaders = [node for node in self.swarm.alive if node.machine.open_roster is not None]
        for one in self.swarm.alive:
            for other in self.swarm.alive:
                if one.name < other.name:
                    self._look_at(one, other, now, one in leaders and other in leaders)
        version = max(self.swarm.versions())
        if version > self.version:
            self.version, self.merged_at = version, now
        since = max(self.merged_at, *self.down_until.values(), 0.0)
        self.gap_s = max(self.gap_s, now - since)

    def _look_at(self, one: Peer, other: Peer, now: float, both_lead: bool) -> None:
        pair = frozenset((one.name, other.name))
        assert one.state is not None and other.state is not None
        if not both_lead or one.state.version != other.state.version:
            self._since.pop(pair, None)
            return
        since = self._since[pair] = max(self._since.get(pair, now), self.down_until[pair])
        self.two_leaders_s = max(self.two_leaders_s, now - since)


def _two_or_more(seed: int, peers: int, **changes: Any) -> tuple[Swarm, Links, random.Random]:
    rng = random.Random(seed)
    plans = [
        PeerPlan(step_time_s=STEP_S * rng.uniform(1.0, SLOWEST), founder=number == 0)
        for number in range(peers)
    ]
    plans[1] = replace(plans[1], **changes)
    swarm = BreakableSwarm(seed, plans, policy=POLICY, young="starts_at" in changes)
    return swarm, Links(swarm), rng


def break_again_and_again(
    seed: int, *, lasts_s: float, peers: int = 2, breaks: int = 8, every_s: float = 7.5
) -> Links:
    """Run a swarm one of whose links breaks every few seconds, and then none for a while."""
    swarm, links, rng = _two_or_more(seed, peers)
    swarm.run(2 * CYCLE_S + rng.uniform(0.0, CYCLE_S))
    for _ in range(breaks):
        one, other = rng.sample(swarm.names, 2)
        links.break_link(one, other, lasts_s)
        swarm.run(swarm.now + every_s * rng.uniform(0.8, 1.2))
    swarm.run(swarm.now + 45.0)
    return links


def meet(offset_s: float, *, lasts_s: float, seed: int) -> Links:
    """Run a founder and one that comes to it, and break their link thrice, each time so long after
    the moment ``BEFORE_S`` before they gather."""
    swarm, links, _ = _two_or_more(seed, 2, starts_at=2 * STEP_S)
    one, other = swarm.names
    for version in (1, 2, 3):
        while links.version < version:
            swarm.run(swarm.now + LOOK_S)
        swarm.run(links.merged_at + CYCLE_S / SLOWEST - BEFORE_S + offset_s)
        links.break_link(one, other, lasts_s)
    swarm.run(swarm.now + 45.0)
    return links

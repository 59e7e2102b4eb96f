"""Swarms in which links between peers break while rosters gather, and what comes of it.

A link that breaks loses what is on its way in both directions and the streams on it, both peers are
told of it, and for the length of the outage each dial fails, as when one's daemon is restarted.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.simulated.swarm import Node, PeerPlan, Swarm

POLICY = RoundPolicy(
    due=DuePolicy(cycle_steps=12, fragments=1), codec="int8", catch_up_s=60.0, round_s=120.0
)
"""The waits of a run's defaults, with a cycle of six seconds."""

STEP_S, SLOWEST = 0.5, 1.15
"""Time of a step, and how many times as long it takes the slowest peer."""
CYCLE_S = POLICY.due.cycle_steps * STEP_S * SLOWEST
LOOK_S = 0.05
BEFORE_S = 2.5


@dataclass(eq=False)
class Links:
    """The links of a swarm, which can be broken, and what came of it."""

    swarm: Swarm = field(repr=False)
    down_until: dict[frozenset[PeerId], float] = field(
        default_factory=lambda: defaultdict(float), repr=False
    )
    broken_at: dict[frozenset[PeerId], float] = field(
        default_factory=lambda: defaultdict(lambda: -math.inf), repr=False
    )
    two_leaders_s: float = 0.0
    """The longest time for which two peers led one version, while their link was there."""
    gap_s: float = 0.0
    """The longest time without a merge, outages not counted."""
    _since: dict[frozenset[PeerId], float] = field(default_factory=dict, repr=False)
    version: int = -1
    merged_at: float = 0.0

    def __post_init__(self) -> None:
        network = self.swarm.network
        self._carry = network.transfer
        network.transfer = self._transfer
        self.swarm.heap.call_in(LOOK_S, self._look)

    def _transfer(
        self,
        sender: PeerId,
        receiver: PeerId,
        size_bytes: int,
        deliver: Callable[[], object],
        lost: Callable[[], object],
    ) -> None:
        pair, sent_at = frozenset((sender, receiver)), self.swarm.heap.now

        def arrive() -> None:
            (deliver if self.broken_at[pair] < sent_at else lost)()

        if sent_at < self.down_until[pair]:
            self.swarm.heap.call_in(0.0, lost)
        else:
            self._carry(sender, receiver, size_bytes, arrive, lost)

    def break_link(self, one: PeerId, other: PeerId, lasts_s: float) -> None:
        pair, now = frozenset((one, other)), self.swarm.heap.now
        self.broken_at[pair], self.down_until[pair] = now, now + lasts_s
        for here, there in ((one, other), (other, one)):
            part = self.swarm.nodes[here].part
            part.lost_reducer(there)  # streams on which slices come back
            part.lost(there)

    def _look(self) -> None:
        now = self.swarm.heap.now
        self.swarm.heap.call_in(LOOK_S, self._look)
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

    def _look_at(self, one: Node, other: Node, now: float, both_lead: bool) -> None:
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
    swarm = Swarm(seed, plans, policy=POLICY, young="starts_at" in changes)
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
        swarm.run(swarm.heap.now + every_s * rng.uniform(0.8, 1.2))
    swarm.run(swarm.heap.now + 45.0)
    return links


def meet(offset_s: float, *, lasts_s: float, seed: int) -> Links:
    """Run a founder and one that comes to it, and break their link thrice, each time so long after
    the moment ``BEFORE_S`` before they gather."""
    swarm, links, _ = _two_or_more(seed, 2, starts_at=2 * STEP_S)
    one, other = swarm.names
    for version in (1, 2, 3):
        while links.version < version:
            swarm.run(swarm.heap.now + LOOK_S)
        swarm.run(links.merged_at + CYCLE_S / SLOWEST - BEFORE_S + offset_s)
        links.break_link(one, other, lasts_s)
    swarm.run(swarm.heap.now + 45.0)
    return links

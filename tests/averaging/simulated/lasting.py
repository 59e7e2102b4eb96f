"""A simulated swarm of a day: peers crash and return, are cut off, and new ones come.

The views are those of a membership without errors, and all peers of one side share them: a swarm of
64 has a million heartbeats an hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from averaging.audit.witness import ROUNDS_KEPT_MAX
from averaging.history.chain import CHAIN_MAX_LINKS
from averaging.rules.due import DuePolicy
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.probation import SEEN_MAX
from averaging.rules.quorum import QuorumPolicy
from averaging.simulated.auditing import ROUNDS_KEPT
from dht.identity import PeerId
from dht.memory.network import Weather
from tests import growth
from tests.averaging.simulated.swarm import Node, PeerPlan, Swarm

HOUR_S = 3600.0
STEP_S = 30.0
POLICY = RoundPolicy(
    quorum=QuorumPolicy(wait_s=10.0),
    due=DuePolicy(cycle_steps=10, fragments=1),
    codec="int8",
    audit_rate=0.02,
    catch_up_s=300.0,
)
"""A cycle takes five minutes."""

WEATHER = Weather(latency_s=(0.01, 0.2), jitter_s=0.05, connection_loss=0.0005)
PARTITION_EVERY_S = 3 * HOUR_S

FULL_H = 6
"""Hours after which all containers but those of ``NOT_FULL`` are full."""

NOT_FULL = {
    ".chain._blocks": CHAIN_MAX_LINKS,
    "audits._kept": ROUNDS_KEPT,
    "audits.witness._commits": ROUNDS_KEPT_MAX,
    "peers.probation._seen": SEEN_MAX,
    "peers.probation._tokens_unseen": SEEN_MAX,
    "audits.witness._rounds": ROUNDS_KEPT_MAX,
}
"""Containers with a bound that a day does not reach, and one whose elements share what they have
with each other: now more of it, now less."""


class LastingSwarm(Swarm):
    """A swarm for days. ``settled``: peers that stay; what they keep is measured.

    ``new_at_h``: hours at which a peer comes that nobody knows.
    """

    def __init__(
        self,
        seed: int,
        peers: int,
        settled: int,
        *,
        crash_every_s: float,
        new_at_h: Sequence[float] = (),
    ) -> None:
        plans = [PeerPlan(step_time_s=STEP_S, founder=number == 0) for number in range(peers)]
        plans += [PeerPlan(step_time_s=STEP_S, starts_at=hour * HOUR_S) for hour in new_at_h]
        self._views: dict[PeerId, PeerView] = {}
        self.happened: Counter[str] = Counter()
        super().__init__(seed, plans, weather=WEATHER, policy=POLICY, heartbeat_s=20.0)
        self.replay_bytes_max = 8 << 10
        self._settled = self.names[:settled]
        self._others = self.names[settled:]
        self._crash_every_s = crash_every_s
        self.heap.call_in(crash_every_s, self._crash_somebody)
        self.heap.call_in(PARTITION_EVERY_S / 2, self._cut_some_off)

    def _heartbeat(self) -> None:
        now = self.heap.now
        for node in self.alive:
            first_seen = self._views[node.name].first_seen if node.name in self._views else now
            if self.lives[node.name] == 1 and node.plan.starts_at == 0.0:
                first_seen = -1e6
            self._views[node.name] = PeerView(
                first_seen=first_seen, heard_at=now, step_time_s=STEP_S
            )
        for node in self.alive:
            node.view.update(
                (other.name, self._views[other.name])
                for other in self.alive
                if other is not node and self.network.connected(node.name, other.name)
            )
        self.heap.call_in(self.heartbeat_s, self._heartbeat)

    def _crash_somebody(self) -> None:
        there = [name for name in self._others if name in self.nodes and self.nodes[name].alive]
        if there:
            name = self.rng.choice(there)
            self.happened["crash"] += 1
            self.crash(name)
            self.heap.call_in(self.rng.uniform(30.0, HOUR_S), self.restart, name)
        self.heap.call_in(self._crash_every_s * self.rng.uniform(0.5, 1.5), self._crash_somebody)

    def _cut_some_off(self) -> None:
        self.happened["partition"] += 1
        names = sorted(self.nodes)
        self.network.partition([self.rng.sample(names, max(1, len(names) // 4))])
        self.heap.call_in(self.rng.uniform(60.0, 1200.0), self.network.heal)
        every_s = PARTITION_EVERY_S * self.rng.uniform(0.5, 1.5)
        self.heap.call_in(every_s, self._cut_some_off)

    @property
    def settled(self) -> Sequence[Node]:
        return [self.nodes[name] for name in self._settled]

    def sizes(self) -> growth.Sizes:
        """Sizes of what the settled peers keep, added up by path."""
        beyond = [self, self.heap, self.network, self.wires, self.truth, *self.nodes.values()]
        total: Counter[str] = Counter()
        for node in self.settled:
            own: dict[str, Any] = {"machine": node.machine, "node": node.part}
            own |= {"audits": node.audits, "learner": node.learner}
            total.update(growth.sizes(own, beyond=beyond))
        return total

    def last(self, hours: int) -> list[growth.Sizes]:
        """Let hours pass; the truth about the swarm is checked after every event of it.

        Returns the sizes after each hour from ``FULL_H`` on. Every settled peer has new versions in
        each hour.
        """
        versions, measured = [], []
        for hour in range(hours + 1):
            self.run(hour * HOUR_S)
            versions.append([node.state.version for node in self.settled if node.state])
            measured.append(self.sizes())
        for hour, (before, after) in enumerate(pairwise(versions)):
            made = [new - old for old, new in zip(before, after, strict=True)]
            assert min(made) > 0, f"versions made in hour {hour + 1}: {made}"
        return measured[FULL_H:]

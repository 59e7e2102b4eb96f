"""Cost of membership while a swarm changes its size: presences on a simulated network.

Each peer is the presence of a live one (``dht.presence``) on a host in memory, in virtual time: its
hellos, heartbeats, dial-backs and share of the directory are all there; encryption and libp2p are
not. Nobody trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dht.identity import PeerId, RunId
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from dht.presence.settings import PresenceSettings, Profile
from tests.swarms.sizes import Sizes

RUN = RunId("c0" * 32)
SETTINGS = PresenceSettings()
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class MembershipCost:
    """Cost of membership for a mean peer between two moments."""

    until_s: float
    bytes_per_s: float
    """Bytes that a peer sends in a second; those of the bootstrap peer are not counted."""
    hellos_per_beat: float
    """Hellos that a peer sends in one heartbeat."""
    wrong_s: float
    """Time in which the table of at least one peer was not that of the peers present."""


@dataclass(slots=True)
class _Member:
    host: MemoryHost
    presence: Presence


class _Swarm:
    """The peers that are there now."""

    def __init__(self, network: MemoryNetwork, seed: int, bootstrap: _Member) -> None:
        self.network = network
        self.members: dict[int, _Member] = {}
        self.hellos_of_ended = 0
        self._seed = seed
        self._bootstrap = bootstrap

    async def start(self, number: int) -> None:
        name = f"peer-{number}"
        host = self.network.host(name)
        rng = np.random.default_rng([self._seed, number + 1])
        seeds = await self._bootstrap.host.addresses()
        presence = Presence(host, identity_of(name), Profile(RUN), SETTINGS, seeds=seeds, rng=rng)
        self.members[number] = _Member(host, presence)
        await presence.start()

    async def end(self, number: int, *, politely: bool) -> None:
        member = self.members.pop(number)
        self.hellos_of_ended += member.presence.stats.hellos_sent
        if politely:
            await member.presence.leave()
        self.network.crash(member.host.peer_id)
        await member.presence.close()

    def sent_bytes(self) -> int:
        simulated = self.network.simulated
        return simulated.bytes_sent - simulated.traffic(self._bootstrap.host.peer_id)[0]

    def hellos(self) -> int:
        return self.hellos_of_ended + sum(
            member.presence.stats.hellos_sent for member in self.members.values()
        )

    def is_seen_right(self, now: float) -> bool:
        ids = {member.host.peer_id for member in self.members.values()}
        return all(_sees(member, now) == ids for member in self.members.values())


async def _open_bootstrap(network: MemoryNetwork, seed: int) -> _Member:
    host, rng = network.host("bootstrap"), np.random.default_rng([seed, 0])
    profile = Profile(None, role="bootstrap")
    presence = Presence(host, identity_of("bootstrap"), profile, SETTINGS, rng=rng)
    await presence.start()
    return _Member(host, presence)


def _sees(member: _Member, now: float) -> set[PeerId]:
    present = {other.peer for other in member.presence.table.present(now)}
    return present | {member.host.peer_id}


def membership_cost(
    sizes: Sizes,
    until_s: Sequence[float],
    *,
    politely: bool,
    seed: int = 0,
) -> list[MembershipCost]:
    """Follow a schedule of sizes; returns the cost up to each of these moments.

    ``politely``: peers that end say goodbye.
    """
    beat_s = SETTINGS.membership.heartbeat_s

    async def follow() -> list[MembershipCost]:
        network = MemoryNetwork(seed=seed)
        bootstrap = await _open_bootstrap(network, seed)
        swarm = _Swarm(network, seed, bootstrap)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(sizes.founders):
                tasks.create_task(swarm.start(number))
        left = list(sizes.changes)
        costs = []
        for end_s in until_s:
            sent, hellos, peers_s, wrong_s = swarm.sent_bytes(), swarm.hellos(), 0.0, 0.0
            while (at_s := loop.time() - began) < end_s:
                async with asyncio.TaskGroup() as tasks:
                    while left and left[0].at_s <= at_s:
                        change = left.pop(0)
                        for number in change.starts:
                            tasks.create_task(swarm.start(number))
                        for number in change.ends:
                            tasks.create_task(swarm.end(number, politely=politely))
                step_s = min(LOOK_S, end_s - at_s)
                await asyncio.sleep(step_s)
                peers_s += step_s * len(swarm.members)
                if not swarm.is_seen_right(loop.time()):
                    wrong_s += step_s
            costs.append(
                MembershipCost(
                    until_s=end_s,
                    bytes_per_s=(swarm.sent_bytes() - sent) / peers_s,
                    hellos_per_beat=(swarm.hellos() - hellos) * beat_s / peers_s,
                    wrong_s=wrong_s,
                )
            )
        for member in swarm.members.values():
            await member.presence.close()
        await bootstrap.presence.close()
        return costs

    return run(follow(), seed=seed)

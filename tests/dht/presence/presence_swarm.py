"""A swarm of presences on the simulated network, for the tests of ``dht.presence``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from multiaddr import Multiaddr

from dht.identity import PeerId, RunId
from dht.membership.admission import Admission
from dht.membership.table import Member
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from dht.memory.network import CALM, Weather
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, PresenceSettings, Profile
from dht.records import Role

RUN = RunId("5f" * 32)
OTHER_RUN = RunId("6f" * 32)


@dataclass
class Peer:
    """One peer, its host, and what it told its human."""

    name: str
    host: MemoryHost
    presence: Presence
    events: list[PresenceEvent] = field(default_factory=list)

    @property
    def id(self) -> PeerId:
        return self.host.peer_id

    def state(self, **facts: Any) -> None:
        """Change facts that the peer states of itself."""
        self.presence.facts = msgspec.structs.replace(self.presence.facts, **facts)

    def told(self, name: str) -> list[PresenceEvent]:
        return [event for event in self.events if event.name == name]

    def sees(self) -> set[PeerId]:
        now = asyncio.get_running_loop().time()
        return {member.peer for member in self.presence.table.present(now)}


class Swarm:
    """Starts, stops and counts peers. All of it on the virtual clock, from one seed."""

    def __init__(self, weather: Weather = CALM, *, seed: int = 0) -> None:
        self.weather = weather
        self.seed = seed
        self.peers: dict[str, Peer] = {}

    @cached_property
    def network(self) -> MemoryNetwork:
        """Made at its first use, on the loop of the test."""
        return MemoryNetwork(self.weather, seed=self.seed)

    async def seed_addresses(self, *names: str) -> list[Multiaddr]:
        return [address for name in names for address in await self.peers[name].host.addresses()]

    async def start(
        self,
        name: str,
        *,
        seeds: Sequence[Multiaddr] = (),
        run: RunId | None = RUN,
        role: Role = "learner",
        wall_offset_s: float = 0.0,
        settings: PresenceSettings | None = None,
        cache_path: Path | None = None,
        run_file: bytes | None = None,
        dial_out_only: bool = False,
        at: str | None = None,
        on_reachable: Callable[[bool], Awaitable[None]] | None = None,
        on_event: Callable[[PresenceEvent], None] | None = None,
        on_record: Callable[[Member], None] | None = None,
        observes: bool = False,
        admission: Admission | None = None,
        credential: bytes = b"",
    ) -> Peer:
        identity = identity_of(name)
        if at is not None:
            self.network.place(identity.peer_id, Multiaddr(at))
        host = self.network.host(identity, wall_offset_s=wall_offset_s)
        if dial_out_only:
            self.network.simulated.dial_out_only(host.peer_id)
        events: list[PresenceEvent] = []
        presence = Presence(
            host,
            identity,
            Profile(
                run,
                role=role,
                name=name,
                run_file=run_file,
                credential=credential,
                observes=observes,
            ),
            replace(settings or PresenceSettings(), cache_path=cache_path),
            seeds=seeds,
            rng=np.random.default_rng([self.seed, len(self.peers), *name.encode()]),
            events=Events(on_event or events.append, on_reachable, on_record),
            admission=admission,
        )
        await presence.start()
        peer = self.peers[name] = Peer(name, host, presence, events)
        return peer

    async def start_bootstrap(self, name: str, seeds: Sequence[Multiaddr] = ()) -> Peer:
        return await self.start(name, run=None, role="bootstrap", seeds=seeds)

    async def stop(self, name: str, *, leave: bool = False) -> None:
        peer = self.peers.pop(name)
        if leave:
            await peer.presence.leave()
        await peer.presence.close()
        await peer.host.close()

    async def crash(self, name: str) -> None:
        """Gone without a word; the process ends with it."""
        peer = self.peers.pop(name)
        self.network.crash(peer.id)
        await peer.presence.close()

    async def stop_all(self) -> None:
        for name in list(self.peers):
            await self.stop(name)

    def members(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.presence.profile.is_member]

    def all_see(self, peers: Iterable[Peer]) -> bool:
        """Say whether each of these sees exactly the others as present."""
        peers = list(peers)
        ids = {peer.id for peer in peers}
        return all(peer.sees() == ids - {peer.id} for peer in peers)


async def until(
    condition: Callable[[], bool], *, within_s: float, what: str, step_s: float = 0.5
) -> float:
    """Wait for it on the virtual clock. Returns how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(step_s)
    return loop.time() - began


def simulate(
    story: Callable[[Swarm], Awaitable[Any]], *, weather: Weather = CALM, seed: int = 0
) -> Any:
    """Tell a story about a swarm on virtual time, and close what is left of it at the end."""

    async def main() -> Any:
        swarm = Swarm(weather, seed=seed)
        result = await story(swarm)
        await swarm.stop_all()
        return result

    return run(main(), seed=seed)

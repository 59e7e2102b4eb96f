"""Two averagers whose link breaks again and again: the daemon of one is restarted, say."""

from __future__ import annotations

import asyncio
import random

import pytest

from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from dht.errors import PeerUnreachable
from dht.forwarding_host import ForwardingHost
from dht.host import Host, Stream
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import LAYOUT, Swarm, swarm
from tests.seeds import seeds

POLICY = RoundPolicy(
    due=DuePolicy(cycle_steps=24, fragments=len(LAYOUT.fragments)),
    slice_bytes_min=128,
    codec="int8",
)
"""The waits of a run's defaults, with a cycle of six seconds."""

STEP_S, SLOWEST = 0.25, 1.1
CYCLE_S = POLICY.due.cycle_steps * STEP_S * SLOWEST
BREAKS, EVERY_S = 8, 7.5
SETTLED_S = 3.0
LOOK_S = 0.05


class BreakableHost(ForwardingHost):
    """A host that can lose its connections, and for a while opens no stream."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.down_until = 0.0

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if asyncio.get_running_loop().time() < self.down_until:
            raise PeerUnreachable(peer, "the daemon is being restarted")
        return await super().open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


def hosts_of(made: Swarm) -> list[BreakableHost]:
    return [peer.host for peer in made.peers if isinstance(peer.host, BreakableHost)]


async def break_links(made: Swarm, lasts_s: float) -> None:
    """Both lose what is on its way, and reach each other again after this time."""
    until = asyncio.get_running_loop().time() + lasts_s
    for host in hosts_of(made):
        host.down_until = until
    for peer, other in zip(made.peers, reversed(made.peers), strict=True):
        await peer.host.disconnect(other.id)


def both_lead(made: Swarm, fragment: int) -> bool:
    """True if both peers have a roster open for one version."""
    machines = [peer.averager._works[fragment].machine for peer in made.peers]
    versions = {each.standing.version for each in machines if each.standing is not None}
    return len(versions) == 1 and all(each.open_roster is not None for each in machines)


async def watch(made: Swarm, longest: dict[str, float]) -> None:
    """Keep the longest times of two leaders, and without a merge, of any fragment; outages do not
    count."""
    loop = asyncio.get_running_loop()
    fragments = range(len(LAYOUT.fragments))
    led_at = dict.fromkeys(fragments, loop.time())
    merged_at = dict(led_at)
    versions = dict.fromkeys(fragments, 0)
    while True:
        await asyncio.sleep(LOOK_S)
        now, back_at = loop.time(), max(host.down_until for host in hosts_of(made))
        for fragment in fragments:
            if not both_lead(made, fragment):
                led_at[fragment] = now
            states = [peer.averager.states[fragment] for peer in made.peers]
            newest = max(state.version for state in states if state is not None)
            if newest > versions[fragment]:
                versions[fragment], merged_at[fragment] = newest, now
            for what, since in (("two leaders", led_at), ("no merge", merged_at)):
                lasted_s = now - max(since[fragment], back_at)
                longest[what] = max(longest[what], lasted_s)


async def storm(seed: int, lasts_s: float) -> dict[str, float]:
    rng = random.Random(seed)
    longest = {"two leaders": 0.0, "no merge": 0.0}
    async with swarm(MemoryNetwork(seed=seed)) as made:
        for number in range(2):
            slower = rng.uniform(1.0, SLOWEST)
            await made.add(
                f"{seed} {number}",
                policy=POLICY,
                wrap=BreakableHost,
                step_time_s=STEP_S * slower,
                founder=not number,
            )
        await made.live(CYCLE_S * rng.uniform(2.0, 3.0))
        watching = asyncio.create_task(watch(made, longest))
        for _ in range(BREAKS):
            await break_links(made, lasts_s)
            await made.live(EVERY_S * rng.uniform(0.8, 1.2))
        await made.live(2 * CYCLE_S)
        watching.cancel()
        await asyncio.wait([watching])
        made.check()
    return longest


@pytest.mark.parametrize("lasts_s", [0.2, 1.5])
@pytest.mark.parametrize("seed", seeds(3, soak=100))
def test_no_two_averagers_wait_for_one_another_once_their_link_is_back(
    seed: int, lasts_s: float
) -> None:
    """Both led one version for 30 s in each of 24 such runs, until the quorum's deadline."""
    longest = run(storm(seed, lasts_s), seed=seed)
    assert longest["two leaders"] <= SETTLED_S
    assert longest["no merge"] <= CYCLE_S + SETTLED_S

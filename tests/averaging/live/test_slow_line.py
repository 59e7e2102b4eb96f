"""Five peers, of which one has a slow line for a while, on the virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pytest

from averaging.live.settings import AveragerSettings
from averaging.live.streams.bulk import TransportSettings
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level, ladder
from averaging.rules.policy import RoundPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.network import Weather
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import Peer, Swarm, swarm

FRAGMENTS: Final = 2
CYCLE_STEPS, STEP_S = 3, 4.8
CYCLE_S: Final = CYCLE_STEPS * STEP_S
LAYOUT: Final = Layout.build([TensorSpec(f"block.{i}", (25, 1000)) for i in range(22)], FRAGMENTS)
MBIT: Final = 125_000.0
LINES: Final = {"pa": (50, 50), "pb": (100, 100), "pc": (20, 20), "h1": (20, 50), "h2": (20, 50)}
"""Mbit/s up and down; the last two can only dial out."""

SLOW_MBIT: Final = 0.4
"""Carries the payload of a cycle in 0.76 of it."""

FIRST: Final = Level(codec="int8", codec_down="int8", cycle_steps=CYCLE_STEPS)
POLICY: Final = RoundPolicy(
    codec="int8",
    due=DuePolicy(cycle_steps=CYCLE_STEPS, fragments=FRAGMENTS),
    slice_bytes_min=128 << 10,
    smaller_levels=tuple(ladder(FIRST, [("int4", "int4")], cycle_max=2 * CYCLE_STEPS)[1:]),
)


def merges(made: Swarm, *, since: float) -> list[tuple[float, str, frozenset[str]]]:
    """Time, leader and contributors of each round."""
    names = {peer.id: peer.nick for peer in made.peers}
    found: dict[str, tuple[float, str, frozenset[str]]] = {}
    for peer in made.peers:
        for at, event, told in peer.events:
            if event == "round" and at >= since and told["contributors"]:
                who = frozenset(names[each] for each in told["contributors"])
                found.setdefault(told["round"], (at, names[told["leader"]], who))
    return sorted(found.values())


def entered(peer: Peer) -> list[tuple[float, Mapping[str, Any]]]:
    return [(at, told) for at, event, told in peer.events if event == "entered"]


def set_line(network: MemoryNetwork, peer: Peer, up: float, down: float) -> None:
    network.simulated.set_link(peer.id, up_bytes_s=up * MBIT, down_bytes_s=down * MBIT)


async def live(made: Swarm, seconds: float) -> None:
    """Records say how fast their peers' lines are, ten seconds late at most."""
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        await made.live(min(10.0, left))
        for peer in made.peers:
            for other in made.peers:
                if other is not peer:
                    speed = other.averager.bytes_per_s or None
                    seen = msgspec.structs.replace(peer.view[other.id], bytes_per_s=speed)
                    peer.view[other.id] = seen


@pytest.mark.slow  # rules/test_line_speed.py: who has a slow line reduces nothing
def test_one_slow_line_slows_nobody_else_down() -> None:
    async def main() -> None:
        network = MemoryNetwork(Weather(latency_s=(0.01, 0.07)), seed=1)
        settings = AveragerSettings(
            progress_s=0.1, transport=TransportSettings(piece_bytes=64 << 10)
        )
        async with swarm(network, layout=LAYOUT) as made:
            for name, (up, down) in LINES.items():
                peer = await made.add(
                    name,
                    policy=POLICY,
                    settings=settings,
                    step_time_s=STEP_S,
                    reachable=name.startswith("p"),
                )
                assert peer.learner is not None
                peer.learner.is_noisy = False
                set_line(network, peer, up, down)
            await live(made, 4 * CYCLE_S)
            slow = made.peers[2]

            set_line(network, slow, SLOW_MBIT, SLOW_MBIT)
            began = asyncio.get_running_loop().time()
            await live(made, 8 * CYCLE_S)
            second, third = began + CYCLE_S, began + 2 * CYCLE_S
            found = merges(made, since=second)
            per_cycle = len(found) / (7 * FRAGMENTS)
            assert per_cycle >= 22 / 25, f"{per_cycle:.0%} of the merges that are due"
            assert all(leader != slow.nick for at, leader, _ in found if at > third)
            reduced = [at for at, told in entered(slow) if at > third and told["slices"]]
            assert not reduced, f"it still reduces at {[at - began for at in reduced]} s"
            every = max([told["every"] for told in slow.told("takes_part")], default=1)
            took_part = sum(slow.nick in who for *_, who in found)
            assert took_part >= len(found) / every - 1, f"in {took_part} of {len(found)}"
            assert all(who >= LINES.keys() - {slow.nick} for at, _, who in found if at > third)

            set_line(network, slow, *LINES[slow.nick])
            began = asyncio.get_running_loop().time()
            await live(made, 5 * CYCLE_S)
            found = merges(made, since=began + 3 * CYCLE_S)
            assert found and all(who == LINES.keys() for *_, who in found)
            for peer in made.peers:
                assert len(peer.told("level")) <= 3 * FRAGMENTS, peer.nick
                level = peer.averager.level()
                assert level is not None and level[0] == FIRST and level[1].level == 0, peer.nick
            made.check()

    run(main())

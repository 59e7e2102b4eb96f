"""Rounds whose codec and cycle follow the lines of their members, on the virtual loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from averaging.live.settings import AveragerSettings
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.line_levels import Level, ladder
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from dht.wrapped_host import Gate, ThrottledHost
from tests.averaging.live.quadratic import POLICY, Swarm, swarm

LAYOUT: Final = Layout.build([TensorSpec(f"block.{i}", (25, 1000)) for i in range(64)], 1)
"""1.6 MB in int8: even an eighth of it tells the speed of a line."""

CYCLE_S: Final = 30.0
FAST, SLOW = 4_000_000.0, 80_000.0

LONGEST: Final = 12
"""Steps of the longest cycle."""

FIRST: Final = Level(codec="f16", codec_down="f16", cycle_steps=3)
POLICY_HERE = replace(
    POLICY,
    codec="f16",
    snapshot_s=CYCLE_S,  # the next safe point may be a whole step away
    due=replace(POLICY.due, fragments=1, cycle_steps=3),
    smaller_levels=tuple(ladder(FIRST, [("int8", "int8")], cycle_max=LONGEST)[1:]),
)


async def four_peers(made: Swarm) -> list[Gate]:
    """Add four peers. Returns the gates of their lines, two of each."""
    gates = [Gate() for _ in range(8)]
    for number in range(4):
        up, down = gates[2 * number : 2 * number + 2]
        peer = await made.add(
            f"peer {number}",
            policy=POLICY_HERE,
            settings=AveragerSettings(progress_s=0.5),
            step_time_s=CYCLE_S / 3,
            wrap=lambda host, up=up, down=down: ThrottledHost(host, up=up, down=down),  # type: ignore[misc]
        )
        assert peer.learner is not None
        peer.learner.is_noisy = False
    return gates


def cycles(made: Swarm) -> list[int]:
    """The cycle that each peer goes by now."""
    levels = [peer.averager.level() for peer in made.peers]
    return [level[0].cycle_steps for level in levels if level is not None]


def test_peers_change_over_together_when_lines_become_slow_and_back_when_they_recover() -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
            gates = await four_peers(made)

            def all_lines(rate: float) -> None:
                for gate in gates:
                    gate.set_rate(rate)

            all_lines(FAST)
            await made.live(4 * CYCLE_S)
            assert set(cycles(made)) == {3}
            all_lines(SLOW)
            await made.until(
                lambda: len(there := set(cycles(made))) == 1 and min(there) > 3,
                within_s=14 * CYCLE_S,
            )
            versions = made.peers[0].versions()
            all_lines(FAST)
            longest_s = CYCLE_S * LONGEST / FIRST.cycle_steps
            await made.until(
                lambda: set(cycles(made)) == {3} and made.peers[0].versions() > versions,
                within_s=3 * longest_s,
            )
            for peer in made.peers:  # what follows from a measurement is told
                assert peer.told("line_needs") and peer.told("level")
            made.check()

    run(main())

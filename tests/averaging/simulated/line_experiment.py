"""The duration of a round with one member on a line ten times slower, before and after lines are
measured: ``python -m tests.averaging.simulated.line_experiment``. Virtual time, a few seconds of
work.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from averaging.live.settings import AveragerSettings
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.quorum import ALL
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from dht.throttled_host import Gate, ThrottledHost
from tests.averaging.live.quadratic import POLICY, swarm

FAST, SLOW = 4_000_000.0, 400_000.0

LAYOUT = Layout.build([TensorSpec(f"block.{i}", (25, 1000)) for i in range(64)], 1)
"""3.2 MB in f16."""

POLICY_HERE = replace(
    POLICY,
    codec="f16",
    due=replace(POLICY.due, fragments=1, cycle_steps=3),
    quorum=replace(POLICY.quorum, required=ALL, wait_s=60.0),
    slice_bytes_min=256 << 10,
)


def seconds(peers: int, *, measured: bool) -> tuple[float, float]:
    """Median seconds of a round, at the last of the fast members and at the slow one."""
    found: list[tuple[float, float]] = []

    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
            for index in range(peers):
                up, down = Gate(), Gate()
                for gate in (up, down):
                    gate.set_rate(FAST if index else SLOW)
                peer = await made.add(
                    f"peer {index}",
                    policy=POLICY_HERE,
                    settings=AveragerSettings(progress_s=0.5),
                    step_time_s=10.0,
                    wrap=lambda host, up=up, down=down: ThrottledHost(host, up=up, down=down),  # type: ignore[misc]
                )
                if not measured:
                    # Nothing is known of any line.
                    around = peer.averager.around
                    peer.averager.around = replace(around, line_max=lambda: 0.0)
            await made.live(300.0)
            slow, *fast = (
                {told["round"]: told["seconds"] for told in peer.told("round")}
                for peer in made.peers
            )
            for told in made.peers[0].told("round")[1:]:
                name = told["round"]
                if len(told["contributors"]) == peers:
                    found.append((max(each[name] for each in fast), slow[name]))

    run(main())
    return statistics.median(f for f, _ in found), statistics.median(s for _, s in found)


if __name__ == "__main__":
    for peers in (4, 8):
        for measured in (False, True):
            fast, slow = seconds(peers, measured=measured)
            what = "slices by line speed" if measured else "equal slices"
            print(f"{peers} peers, {what}: {fast:.1f} s at the others, {slow:.1f} at it")  # noqa: T201

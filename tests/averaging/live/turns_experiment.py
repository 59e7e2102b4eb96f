"""Rounds that are left where more fragments are due than may be under way at once:
``python -m tests.averaging.live.turns_experiment``. Virtual time, half a minute of work.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from averaging.live.settings import AveragerSettings
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.network import CALM
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, swarm

LIVE_S = 400.0


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one second, those of the last peer ``slowest`` times as long."""

    peers: int
    line_bytes_s: float
    slowest: float = 1.0
    fragments: int = 24
    places: int = 64
    """Rounds that memory has room for."""
    group_size: int = 16


CASES = (
    Case(peers=4, line_bytes_s=1e6),
    Case(peers=4, line_bytes_s=4e3),
    Case(peers=4, line_bytes_s=2e3, slowest=2.0),
    Case(peers=6, line_bytes_s=2e3, slowest=4.0),
    Case(peers=2, line_bytes_s=2e3, fragments=4, places=1),
    Case(peers=4, line_bytes_s=2e3, slowest=1.5, fragments=4, places=1),
    Case(peers=12, line_bytes_s=1e6, slowest=1.5, group_size=4),
    Case(peers=12, line_bytes_s=4e3, slowest=1.5, group_size=4),
)


def row(case: Case) -> str:
    """The result as a line of a table."""
    shapes = [TensorSpec(f"block.{index}", (12, 40)) for index in range(case.fragments)]
    layout = Layout.build(shapes, case.fragments)
    cells: list[str] = []

    async def main() -> None:
        network = MemoryNetwork(replace(CALM, bandwidth_bytes_s=case.line_bytes_s))
        async with swarm(network, layout=layout) as made:
            policy = replace(
                POLICY,
                codec="f32",
                group_size=case.group_size,
                quorum=QuorumPolicy(wait_s=30.0, tau=6.0),
                due=DuePolicy(cycle_steps=max(8, case.fragments), fragments=case.fragments),
            )
            peers = [
                await made.add(
                    f"peer {index}",
                    policy=policy,
                    settings=AveragerSettings(progress_s=0.1, in_flight_max=case.places),
                    step_time_s=1.0 + (case.slowest - 1.0) * index / (case.peers - 1),
                )
                for index in range(case.peers)
            ]
            await made.live(LIVE_S)
            made.check()
            versions = [version or 0 for version in peers[0].versions()]
            rosters = [told["members"] for peer in peers for told in peer.told("closed")]
            lasted = [told["seconds"] for told in peers[0].told("round")]
            cells.append(f"{statistics.mean(lasted):.1f}")
            cells.append(f"{min(versions)} to {max(versions)}")
            cells.append(f"{statistics.mean(rosters):.1f}")
            cells.append(str(sum(len(peer.told("no_quorum")) for peer in peers)))

    run(main())
    return " | ".join(cells)


def main() -> None:
    head = "peers, in groups of | slowest | line, kB/s | fragments, places | a round lasts, s"
    print(f"{head} | versions | rosters | no quorum")  # noqa: T201
    for case in CASES:
        who = f"{case.peers}, {min(case.peers, case.group_size)} | {case.slowest:g}x"
        where = f"{case.line_bytes_s / 1e3:g} | {case.fragments}, {case.places}"
        print(f"{who} | {where} | {row(case)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

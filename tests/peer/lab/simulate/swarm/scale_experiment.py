"""What a simulated peer costs in each round, by the size of its swarm: is it the same for all?

    python -m tests.peer.lab.simulate.swarm.scale_experiment --peers 100 1000 --turns 3

All swarms in one process, in turn, so that they meet the same machine; each size's best turn counts
least of what else the machine did.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from peer.lab.simulate.swarm.experiment import parse
from peer.lab.simulate.swarm.swarm import SimulatedSwarm

EXPERIMENT = Path(__file__).parents[5] / "benchmark" / "swarm_of_1000.toml"
GROWN_CYCLES = 4.0
"""Until every peer has heard of all others: before that rounds are cheaper."""
LEAST_ROUNDS = 2000
"""Of peers and fragments, in one turn."""


def versions(swarm: SimulatedSwarm) -> int:
    return sum(state.version for peer in swarm.alive for state in peer.states)


def turn_ms(swarm: SimulatedSwarm) -> float:
    """Processor time per peer and round, over so many rounds that it can be told."""
    begun, before = time.process_time(), versions(swarm)
    while versions(swarm) - before < LEAST_ROUNDS:
        swarm.heap.run(swarm.heap.now + swarm.experiment.cycle_s / 4)
    return 1e3 * (time.process_time() - begun) / (versions(swarm) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    whole = parse(EXPERIMENT.read_text())
    swarms = {}
    for peers in chosen.peers:
        swarms[peers] = swarm = SimulatedSwarm(whole.with_settings({"peers.count": peers}))
        swarm.heap.run(GROWN_CYCLES * swarm.experiment.cycle_s)
    took: dict[int, list[float]] = {peers: [] for peers in swarms}
    for _ in range(chosen.turns):
        for peers, swarm in swarms.items():
            took[peers].append(turn_ms(swarm))
    for peers, times in took.items():
        row = " ".join(f"{ms:.2f}" for ms in times)
        print(f"{peers:>6} peers: {row} ms per peer and round; best {min(times):.2f}")  # noqa: T201


if __name__ == "__main__":
    main()

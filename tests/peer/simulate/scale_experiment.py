"""Measures the cost of a simulated peer per round, by the size of its swarm.

    python -m tests.peer.simulate.scale_experiment --peers 100 1000 --turns 3

All swarms run in one process, in turn, under the same conditions. The best turn of each size is the
one that other programs disturbed least.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from peer.simulate.lifecycle import states_of
from peer.simulate.settings import parse
from peer.simulate.simulation import SimulatedSwarm

EXPERIMENT = Path(__file__).parents[2] / "benchmark" / "swarm_of_1000.toml"
GROWN_CYCLES = 4.0
"""Cycles until every peer has heard of all others: before that rounds are cheaper."""
LEAST_ROUNDS = 2000
"""Number of rounds in one turn, summed over peers and fragments."""


def versions(swarm: SimulatedSwarm) -> int:
    return sum(state.version for peer in swarm.alive for state in states_of(peer))


def turn_ms(swarm: SimulatedSwarm) -> float:
    """Processor time per peer and round, over enough rounds to measure it."""
    begun, before = time.process_time(), versions(swarm)
    while versions(swarm) - before < LEAST_ROUNDS:
        swarm.pass_time(swarm.lives.now + swarm.experiment.cycle_s / 4)
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
        swarm.pass_time(GROWN_CYCLES * swarm.experiment.cycle_s)
    took: dict[int, list[float]] = {peers: [] for peers in swarms}
    for _ in range(chosen.turns):
        for peers, swarm in swarms.items():
            took[peers].append(turn_ms(swarm))
    for swarm in swarms.values():
        swarm.lives.close()
    for peers, times in took.items():
        row = " ".join(f"{ms:.2f}" for ms in times)
        print(f"{peers:>6} peers: {row} ms per peer and round; best {min(times):.2f}")  # noqa: T201


if __name__ == "__main__":
    main()

"""What a second of a virtual swarm costs in processor time and memory.

    python -m tests.benchmark.virtual_swarm --peers 6,48,100 --seconds 60

Swarms of live averagers, and of the simulator's machines, go through the same storm, in turn and in
a process of their own each. What is printed is processor time by virtual second, and the memory
that a peer takes beside what the process took before.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import resource
import time
from dataclasses import dataclass
from typing import Any

from dht.memory.virtual_loop import run
from tests.averaging.live.stormy import LiveSwarm
from tests.averaging.simulated.swarm import Storm, Swarm, cause_storm

KINDS = ("live", "simulated")


@dataclass(frozen=True, slots=True)
class Cost:
    processor_s: float
    """By virtual second."""
    peer_bytes: float
    versions: int
    """The newest version that a peer stands on."""


def storm_of(peers: int, seconds: float) -> Storm:
    return Storm(peers=(peers, peers), accidents=(peers // 6 + 1, peers // 6 + 1), rough_s=seconds)


def measure(kind: str, peers: int, seconds: float, seed: int) -> Cost:
    memory_before = _memory_bytes()
    began = time.process_time()
    versions = _run(kind, peers, seconds, seed)
    processor_s = time.process_time() - began
    return Cost(
        processor_s / seconds, (_memory_bytes() - memory_before) / peers, max(versions, default=0)
    )


def _run(kind: str, peers: int, seconds: float, seed: int) -> list[int]:
    how = storm_of(peers, seconds)
    if kind == "simulated":
        simulated = cause_storm(Swarm, seed, how)
        simulated.run(seconds)
        found: list[int] = simulated.versions()
        return found

    async def main() -> Any:
        live = cause_storm(LiveSwarm, seed, how)
        with live.watched():
            try:
                await live.run(seconds)
                return live.versions()
            finally:
                await live.close()

    return list(run(main(), seed=seed))


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="6,48,100", help="sizes of swarms")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="swarms of each kind and size")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--profile", type=int, help="print so many functions, by their own time")
    given = parser.parse_args()
    kinds = (given.only,) if given.only else KINDS
    for peers in map(int, given.peers.split(",")):
        costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
        for number in range(given.times):
            for kind in kinds:
                task = (kind, peers, given.seconds, given.seed + number)
                if given.profile:
                    _profile(given.profile, *task)
                    continue
                with multiprocessing.get_context("spawn").Pool(1) as process:
                    cost = process.apply(measure, task)
                costs[kind].append(cost)
                print(
                    f"{peers:5} peers  {kind:9}  {1000 * cost.processor_s:8.1f} ms/s"
                    f"  {cost.peer_bytes / 2**20:7.2f} MiB/peer  version {cost.versions}",
                    flush=True,
                )
        if all(costs.get(kind) for kind in KINDS):
            live, simulated = (sum(each.processor_s for each in costs[kind]) for kind in KINDS)
            print(f"{peers:5} peers  live / simulated: {live / simulated:.2f}", flush=True)


def _profile(lines: int, kind: str, peers: int, seconds: float, seed: int) -> None:
    profile = cProfile.Profile()
    profile.runcall(_run, kind, peers, seconds, seed)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(lines)


if __name__ == "__main__":
    main()

"""What a second of a virtual swarm costs in processor time and memory.

    python -m tests.benchmark.virtual_swarm --peers 6,48,100 --seconds 60

A swarm of live averagers goes through a storm in a process of its own. What is printed is processor
time by virtual second, and the memory that a peer takes beside what the process took before.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import resource
import time
from dataclasses import dataclass

from tests.averaging.virtual.swarm import Storm, storm


@dataclass(frozen=True, slots=True)
class Cost:
    processor_s: float
    """By virtual second."""
    peer_bytes: float
    versions: int
    """The newest version that a peer stands on."""


def storm_of(peers: int, seconds: float) -> Storm:
    accidents = peers // 6 + 1
    return Storm(peers=(peers, peers), accidents=(accidents, accidents), rough_s=seconds)


def measure(peers: int, seconds: float, seed: int) -> Cost:
    memory_before = _memory_bytes()
    began = time.process_time()
    versions = run_storm(peers, seconds, seed)
    processor_s = time.process_time() - began
    return Cost(
        processor_s / seconds, (_memory_bytes() - memory_before) / peers, max(versions, default=0)
    )


def run_storm(peers: int, seconds: float, seed: int) -> list[int]:
    with storm(seed, storm_of(peers, seconds)) as swarm:
        swarm.run(seconds)
        return swarm.versions()


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="6,48,100", help="sizes of swarms")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="swarms of each size")
    parser.add_argument("--profile", type=int, help="print so many functions, by their own time")
    given = parser.parse_args()
    for peers in map(int, given.peers.split(",")):
        for number in range(given.times):
            task = (peers, given.seconds, given.seed + number)
            if given.profile:
                _profile(given.profile, *task)
                continue
            with multiprocessing.get_context("spawn").Pool(1) as process:
                cost = process.apply(measure, task)
            print(
                f"{peers:5} peers  {1000 * cost.processor_s:8.1f} ms/s"
                f"  {cost.peer_bytes / 2**20:7.2f} MiB/peer  version {cost.versions}",
                flush=True,
            )


def _profile(lines: int, peers: int, seconds: float, seed: int) -> None:
    profile = cProfile.Profile()
    profile.runcall(run_storm, peers, seconds, seed)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(lines)


if __name__ == "__main__":
    main()

"""Measures memory, processor time and traffic of a bootstrap host by the number of its peers.

    python -m tests.benchmark.bootstrap_figures 10 20

Starts `shoal bootstrap` as a process, and a growing swarm of real peers (a libp2p daemon and a
presence each) in this process. At each size it waits until all peers see each other, then measures
for a while. Traffic is counted by the kernel on the connections to the bootstrap peer's port, so it
includes encryption and all of libp2p.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from multiaddr import Multiaddr

from dht.identity import Identity, RunId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.presence.presence import Presence
from dht.presence.this_peer import Profile
from tests.processes import Processes
from tests.swarms.commands import Swarm, address_of

PORT = 17790
RUN = RunId("be" * 32)
MEASURE_S = 30.0
SETTLE_S = 90.0
HOST = HostSettings(listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),), port_mapping=False)


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of the bootstrap peer while ``peers`` peers of one run are connected."""

    peers: int
    settled_s: float
    """Time until all peers see each other."""

    python_mib: float
    daemon_mib: float
    cpu_percent: float
    received_bytes_s: float
    sent_bytes_s: float


async def main(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        swarm = Swarm(processes, Path(folder))
        bootstrap = swarm.bootstrap(listen=f"/ip4/127.0.0.1/tcp/{PORT}")
        address, pid = Multiaddr(address_of(bootstrap)), bootstrap.process.pid
        async with AsyncExitStack() as stack:
            peers: list[Presence] = []
            for size in sorted(sizes):
                figures = await grow(stack, peers, size, address, pid)
                print(json.dumps(asdict(figures)), flush=True)


async def grow(
    stack: AsyncExitStack, peers: list[Presence], size: int, seed: Multiaddr, pid: int
) -> Figures:
    started = time.monotonic()
    while len(peers) < size:
        identity = Identity.from_seed(len(peers).to_bytes(32, "big"))
        host = await stack.enter_async_context(await HivemindHost.open(identity, HOST))
        presence = Presence(host, identity, Profile(RUN, name=f"peer-{len(peers)}"), seeds=(seed,))
        await presence.start()
        stack.push_async_callback(presence.close)
        peers.append(presence)
    loop = asyncio.get_running_loop()
    while time.monotonic() - started < SETTLE_S:
        if all(len(peer.table.live(loop.time())) == size - 1 for peer in peers):
            break
        await asyncio.sleep(0.2)
    settled_s = time.monotonic() - started
    await asyncio.sleep(5)
    return await measure(size, settled_s, pid)


async def measure(size: int, settled_s: float, pid: int) -> Figures:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    before, spent = traffic(), cpu_s(processes)
    await asyncio.sleep(MEASURE_S)
    after, spent = traffic(), cpu_s(processes) - spent
    return Figures(
        peers=size,
        settled_s=round(settled_s, 1),
        python_mib=round(processes[0].memory_full_info().pss / 2**20, 1),
        daemon_mib=round(sum(p.memory_full_info().pss for p in processes[1:]) / 2**20, 1),
        cpu_percent=round(100 * spent / MEASURE_S, 1),
        received_bytes_s=round((after[0] - before[0]) / MEASURE_S),
        sent_bytes_s=round((after[1] - before[1]) / MEASURE_S),
    )


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def traffic() -> tuple[int, int]:
    """Bytes received and sent on the connections of the bootstrap peer's port, so far."""
    shown = subprocess.run(
        ["ss", "-tinH", f"( sport = :{PORT} )"], capture_output=True, text=True, check=True
    ).stdout

    def total(name: str) -> int:
        return sum(int(count) for count in re.findall(rf"\b{name}:(\d+)", shown))

    return total("bytes_received"), total("bytes_sent")


if __name__ == "__main__":
    uvloop.run(main([int(text) for text in sys.argv[1:]] or [10, 20]))

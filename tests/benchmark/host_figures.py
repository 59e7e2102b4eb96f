"""Measures a host: ``python -m tests.benchmark.host_figures [--json FILE] [--hosts N]``.

Both ends run on this machine, over loopback, so that it does the work of two. Rates are compared
with those of the bare daemon (plain asyncio streams on the daemon's sockets, without frames and
acknowledgements), alternating within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from multiaddr import Multiaddr

from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import PeerId, RunId
from dht.libp2p.hivemind_daemon import Daemon, peer_bytes
from dht.libp2p.hivemind_host import HivemindHost
from dht.libp2p.hivemind_patches import HivemindMultiaddr, delimited, p2pd_pb2
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from dht.records import PeerRecord, seal
from tests.integration.loopback import LOOPBACK, hosts, identity

Figures = dict[str, Any]

RUN = RunId("feed")
REPEATS = 5
BULK_FRAMES = 128
RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)

START = """
import time
began = time.perf_counter()
import asyncio
from dht.libp2p.hivemind_host import HivemindHost
from tests.integration.loopback import LOOPBACK, identity
imported = time.perf_counter()
async def main():
    host = await HivemindHost.open(identity(77), LOOPBACK)
    print(imported - began, time.perf_counter() - imported)
    await host.close()
asyncio.run(main())
"""


def spread(samples: list[float], *, scale: float = 1.0, digits: int = 2) -> Figures:
    ordered = sorted(sample * scale for sample in samples)
    return {
        "median": round(statistics.median(ordered), digits),
        "low": round(ordered[0], digits),
        "high": round(ordered[-1], digits),
        "samples": len(ordered),
    }


async def timed(work: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await work()
        samples.append(time.perf_counter() - began)
    return samples


def start_up() -> Figures:
    """Time from the start of a Python process until its host serves."""
    samples = []
    for _ in range(REPEATS):
        done = subprocess.run(
            [sys.executable, "-c", START], capture_output=True, text=True, check=True
        )
        samples.append([float(word) for word in done.stdout.split()])
    imports, opens = zip(*samples, strict=True)
    return {
        "import_ms": spread(list(imports), scale=1000, digits=0),
        "open_ms": spread(list(opens), scale=1000, digits=0),
    }


def memory_of(pid: int) -> Figures:
    memory = psutil.Process(pid).memory_full_info()
    pss = getattr(memory, "pss", None)  # only on Linux
    return {
        "rss_mb": round(memory.rss / 1e6, 1),
        "pss_mb": None if pss is None else round(pss / 1e6, 1),
    }


async def latencies() -> Figures:
    key = "feed/peers/0"

    async def echo(peer: PeerId, request: bytes) -> bytes:
        return request

    async def greet(stream: Stream) -> None:
        await stream.finish(timeout_s=10)

    async with hosts(3) as (seed, server, client):
        await client.connect(server.peer_id, await server.addresses(), timeout_s=10)
        await server.serve_calls("/bench/echo", echo, request_max_bytes=1 << 20)
        await server.serve_streams("/bench/greet", greet)
        for number, host in enumerate((seed, server, client), start=1):
            record = seal(RECORD, identity(number), key=key, sequence=1, ttl_s=60)
            await host.directory.publish(key, record, ttl_s=60, timeout_s=10)

        async def open_one() -> None:
            stream = await client.open_stream(server.peer_id, "/bench/greet", timeout_s=10)
            stream.abort()

        async def call(size: int) -> None:
            await client.call(server.peer_id, "/bench/echo", bytes(size), timeout_s=10)

        await call(100)
        figures = {
            "call_100_bytes_ms": spread(await timed(lambda: call(100), 200), scale=1000),
            "call_100_kb_ms": spread(await timed(lambda: call(100_000), 50), scale=1000),
            "open_stream_ms": spread(await timed(open_one, 100), scale=1000),
            "look_up_ms": spread(
                await timed(lambda: client.directory.look_up(key, timeout_s=10), 100), scale=1000
            ),
            "memory_of_python_with_3_hosts": memory_of(os.getpid()),
        }
        assert client.daemon_pid is not None
        return figures | {"memory_of_a_daemon": memory_of(client.daemon_pid)}


class _Bare:
    """The daemon without frames: the rate that any program on its sockets could reach."""

    def __init__(self) -> None:
        self.received = 0
        self._arrived = asyncio.Event()
        self._wanted = 0

    async def serve(self, daemon: Daemon, path: Path) -> asyncio.Server:
        server = await asyncio.start_unix_server(self._swallow, path=str(path))
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=HivemindMultiaddr(f"/unix{path}").to_bytes(),
                proto=["/bench/bare"],
                balanced=False,
            ),
        )
        await daemon.request(request, timeout_s=10)
        return server

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 18):
            self.received += len(chunk)
            if self.received >= self._wanted:
                self._arrived.set()
        writer.close()

    async def send(self, daemon: Daemon, peer: PeerId, frame: bytes, count: int) -> None:
        self.received, self._wanted = 0, count * len(frame)
        self._arrived.clear()
        reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer_bytes(peer), proto=["/bench/bare"]),
        )
        writer.write(delimited(request))
        await reader.read(1000)
        for _ in range(count):
            writer.write(frame)
            await writer.drain()
        async with asyncio.timeout(60):
            await self._arrived.wait()
        writer.close()
        await writer.wait_closed()


async def throughput() -> Figures:
    async def swallow(stream: Stream) -> None:
        target = memoryview(bytearray(FRAME_MAX_BYTES))
        while await stream.receive_into(target, timeout_s=30) is not None:
            pass

    frame = os.urandom(FRAME_MAX_BYTES)
    size_gb = BULK_FRAMES * len(frame) / 1e9
    framed: list[float] = []
    bare: list[float] = []
    python_s: list[float] = []
    async with hosts(2) as (server, client):
        assert server._daemon is not None and client._daemon is not None
        await server.serve_streams("/bench/swallow", swallow)
        plain = _Bare()
        listener = await plain.serve(server._daemon, server._run_directory.new_socket("b"))
        for turn in range(REPEATS + 1):
            stream = await client.open_stream(server.peer_id, "/bench/swallow", timeout_s=10)
            began, own = time.perf_counter(), time.process_time()
            for _ in range(BULK_FRAMES):
                await stream.send(frame, timeout_s=30)
            await stream.finish(timeout_s=30)
            framed_s, own_s = time.perf_counter() - began, time.process_time() - own
            stream.abort()
            began = time.perf_counter()
            await plain.send(client._daemon, server.peer_id, frame, BULK_FRAMES)
            bare_s = time.perf_counter() - began
            if turn:  # the first round warms up
                framed.append(size_gb * 1000 / framed_s)
                bare.append(size_gb * 1000 / bare_s)
                python_s.append(own_s / size_gb)
        listener.close()
    return {
        "framed_mb_s": spread(framed, digits=0),
        "bare_mb_s": spread(bare, digits=0),
        "framed_to_bare": spread([a / b for a, b in zip(framed, bare, strict=True)]),
        "python_cpu_s_per_gb_both_ends": spread(python_s),
    }


async def meeting(count: int) -> Figures:
    """Time until ``count`` hosts, started at once with one seed, all see each other."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        began = loop.time()
        opened: list[HivemindHost] = []
        starting = asyncio.Semaphore(4)  # more daemons at once would slow each other down

        async def open_one(number: int) -> HivemindHost:
            async with starting:
                return await HivemindHost.open(identity(1000 + number), LOOPBACK)

        opened = list(await asyncio.gather(*(open_one(number) for number in range(count))))
        for host in opened:
            stack.push_async_callback(host.close)
        opened_s = loop.time() - began
        seed = (await opened[0].addresses())[:1]
        began = loop.time()
        presences = []
        for number, host in enumerate(opened):
            presence = Presence(
                host, identity(1000 + number), Profile(RUN), seeds=() if number == 0 else seed
            )
            await presence.start()
            stack.push_async_callback(presence.close)
            presences.append(presence)
        half_s: float | None = None
        while True:
            seen = [len(p.table.live(loop.time())) for p in presences]
            if half_s is None and sum(seen) >= count * count / 2:
                half_s = loop.time() - began
            # A table may contain its owner, which does not count.
            if min(seen) >= count - 1:
                break
            if loop.time() - began > 120:
                raise TimeoutError(f"after 120 s the tables hold {sorted(seen)}")
            await asyncio.sleep(0.05)
        return {
            "hosts": count,
            "open_all_s": round(opened_s, 1),
            "half_of_all_pairs_s": None if half_s is None else round(half_s, 1),
            "all_see_all_s": round(loop.time() - began, 1),
            "memory_of_python": memory_of(os.getpid()),
        }


async def return_of_a_seed() -> Figures:
    """Time to reconnect after all seeds have died and one has come back with its key and port."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        seeds = [await HivemindHost.open(identity(2000 + i), LOOPBACK) for i in range(2)]
        addresses: list[Multiaddr] = []
        for number, seed in enumerate(seeds):
            addresses += (await seed.addresses())[:1]
            presence = Presence(seed, identity(2000 + number), Profile(None))
            await presence.start()
            stack.push_async_callback(presence.close)
        member = await HivemindHost.open(identity(2009), LOOPBACK)
        stack.push_async_callback(member.close)
        presence = Presence(member, identity(2009), Profile(RUN), seeds=addresses)
        await presence.start()
        stack.push_async_callback(presence.close)

        async def until_connected(wanted: bool) -> float:
            began = loop.time()
            async with asyncio.timeout(90):
                while bool(presence.connected) is not wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return loop.time() - began

        await until_connected(True)
        for seed in seeds:
            await seed.close()
        lost_s = await until_connected(False)
        await asyncio.sleep(20)  # until the backoff of the member has reached its maximum
        listen = Multiaddr(str(addresses[0]).split("/p2p/", maxsplit=1)[0])
        settings = replace(LOOPBACK, daemon=replace(LOOPBACK.daemon, listen=(listen,)))
        returned = await HivemindHost.open(identity(2000), settings)
        stack.push_async_callback(returned.close)
        back = Presence(returned, identity(2000), Profile(None))
        await back.start()
        stack.push_async_callback(back.close)
        found_s = await until_connected(True)
        return {"noticed_after_s": round(lost_s, 1), "found_again_after_s": round(found_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a host costs, on loopback.")
    parser.add_argument("--hosts", type=int, default=30, help="how many meet (default: 30)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    figures: Figures = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    parts: dict[str, Callable[[], Figures]] = {
        "start_up": start_up,
        "latencies": lambda: uvloop.run(latencies()),
        "throughput": lambda: uvloop.run(throughput()),
        "meeting": lambda: uvloop.run(meeting(options.hosts)),
        "return_of_a_seed": lambda: uvloop.run(return_of_a_seed()),
    }
    for name, measure in parts.items():
        figures[name] = measure()
        print(name, json.dumps(figures[name], indent=2), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

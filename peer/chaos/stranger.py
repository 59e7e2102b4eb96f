"""A stranger on the network who belongs to no run: random bytes, or a flood, on every protocol.

``python -m peer.chaos.stranger --what garbage|flood --run ID --seconds S ADDRESS...`` dials the
addresses with a key of its own and does its worst until the time is over. The last line that it
prints is one JSON object, which counts what it did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from multiaddr import Multiaddr

from averaging.fetch import fetch_protocol
from dht import addresses as address_rules
from dht.errors import DhtError
from dht.hello import (
    CONFIRM_PROTOCOL,
    DIAL_BACK_PROTOCOL,
    GOODBYE_PROTOCOL,
    HELLO_PROTOCOL,
    RUN_FILE_PROTOCOL,
)
from dht.hivemind_daemon import DaemonSettings
from dht.hivemind_host import HivemindHost, HostSettings
from dht.host import FRAME_MAX_BYTES, Stream
from dht.identity import Identity, PeerId, RunId
from peer import status
from peer.loop import run_until_stopped

CALLS = (
    HELLO_PROTOCOL,
    GOODBYE_PROTOCOL,
    DIAL_BACK_PROTOCOL,
    CONFIRM_PROTOCOL,
    RUN_FILE_PROTOCOL,
    status.PROTOCOL,
    "DHTProtocol.rpc_ping",
    "DHTProtocol.rpc_store",
    "DHTProtocol.rpc_find",
)
FLOOD_STREAMS = 200
"""Opened at once, of each protocol and peer."""
TIMEOUT_S = 5.0


def streams_of(run: RunId) -> tuple[str, ...]:
    return (f"shoal/{run}/control/1", f"shoal/{run}/bulk/1", fetch_protocol(run))


async def garbage(
    host: HivemindHost,
    peers: Sequence[PeerId],
    run: RunId,
    rng: np.random.Generator,
    done: Counter[str],
) -> None:
    """One piece of nonsense on each protocol of each peer."""
    for peer in peers:
        for protocol in CALLS:
            try:
                await host.call(
                    peer, protocol, rng.bytes(int(rng.integers(0, 2000))), timeout_s=TIMEOUT_S
                )
                done["calls_answered"] += 1
            except (DhtError, ValueError):
                done["calls_refused"] += 1
        for protocol in streams_of(run):
            try:
                stream = await host.open_stream(peer, protocol, timeout_s=TIMEOUT_S)
            except DhtError:
                done["streams_refused"] += 1
                continue
            try:
                for _ in range(20):
                    # The first byte is often right, so that what comes after it is read as well.
                    head = bytes([1, 1][: int(rng.integers(0, 3))])
                    data = head + rng.bytes(int(rng.integers(0, 3000)))
                    await stream.send(data, timeout_s=TIMEOUT_S)
                    done["frames"] += 1
            except DhtError:
                done["streams_broken"] += 1
            finally:
                stream.abort()


async def flood(
    host: HivemindHost,
    peers: Sequence[PeerId],
    run: RunId,
    rng: np.random.Generator,
    done: Counter[str],
) -> None:
    """As many streams as can be had, full of large frames, or announcing impossible ones."""

    async def one(peer: PeerId, protocol: str) -> None:
        try:
            stream = await host.open_stream(peer, protocol, timeout_s=TIMEOUT_S)
        except DhtError:
            done["streams_refused"] += 1
            return
        done["streams"] += 1
        try:
            if rng.random() < 0.3:
                announce_too_much(stream)
                done["frames_too_large"] += 1
                await stream.receive(timeout_s=TIMEOUT_S)
            else:
                for _ in range(4):
                    await stream.send(bytes(FRAME_MAX_BYTES), timeout_s=TIMEOUT_S)
                    done["frames"] += 1
        except DhtError:
            done["streams_broken"] += 1
        finally:
            stream.abort()

    for protocol in streams_of(run):
        for peer in peers:
            await asyncio.gather(*(one(peer, protocol) for _ in range(FLOOD_STREAMS)))


def announce_too_much(stream: Stream) -> None:
    """A frame's header that no honest peer writes: four gigabytes follow."""
    transport = getattr(stream, "_transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        transport.write(b"\xff\xff\xff\xff\x00" + bytes(1000))


async def visit(
    what: str,
    run: RunId,
    at: Sequence[Multiaddr],
    *,
    seconds: float,
    seed: int,
    stop: asyncio.Event | None = None,
) -> Counter[str]:
    """Do it for so long, or until told to stop. Returns the counts."""
    done: Counter[str] = Counter()
    acting = asyncio.ensure_future(_act(what, run, at, done, seconds=seconds, seed=seed))
    stopped = asyncio.ensure_future((stop or asyncio.Event()).wait())
    await asyncio.wait((acting, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    acting.cancel()
    await asyncio.wait((acting, stopped))
    if not acting.cancelled():
        acting.result()
    return done


async def _act(
    what: str,
    run: RunId,
    at: Sequence[Multiaddr],
    done: Counter[str],
    *,
    seconds: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    settings = HostSettings(
        daemon=DaemonSettings(listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),)), serve_directory=False
    )
    deadline = time.monotonic() + seconds
    async with await HivemindHost.open(Identity.generate(), settings) as host:
        while time.monotonic() < deadline:
            peers = []
            for address in at:
                peer = address_rules.peer_of(address)
                assert peer is not None
                try:
                    await host.connect(peer, [address], timeout_s=TIMEOUT_S)
                    peers.append(peer)
                except DhtError:
                    done["dials_failed"] += 1
            act = flood if what == "flood" else garbage
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    await act(host, peers, run, rng, done)
            except TimeoutError:
                break
            done["turns"] += 1
            await asyncio.sleep(0.1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=["garbage", "flood"], required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("addresses", nargs="+")
    given = parser.parse_args(arguments)
    done = run_until_stopped(
        lambda stop: visit(
            given.what,
            RunId(given.run),
            [Multiaddr(text) for text in given.addresses],
            seconds=given.seconds,
            seed=given.seed,
            stop=stop,
        )
    )
    sys.stdout.write(json.dumps({"event": "did", **done}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

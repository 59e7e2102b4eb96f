"""Attacks a bootstrap peer with hostile requests of twenty kinds.

``python -m tests.integration.hostile_attack ADDRESS PAGE_PORT REQUESTS SEED SECONDS`` sends so many
requests of ``tests.chaos.attackers.hostile_requests``, or as many as it can in this time, from
several identities of one process, and prints one JSON object with the number of requests of each
kind. The twentieth are bare TCP connections to its daemon and its page.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from dht import addresses
from dht.errors import DhtError
from dht.identity import Identity
from dht.libp2p.hivemind_host import HivemindHost
from tests.chaos.attackers.hostile_requests import HOST, KINDS, Attacker

IDENTITIES = 3
AT_ONCE = 16
"""Requests of one identity under way at once."""

KNOCK_EVERY = 50
"""Every so many requests, the kind is a TCP connection to the daemon or to the page instead."""


async def knock(port: int, data: bytes) -> None:
    """Open a TCP connection, send bytes, and close it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(1.0):
            await reader.read(4096)
    finally:
        writer.transport.abort()


async def attack(
    at: str, page_port: int, requests: int, seed: int, *, seconds: float
) -> Counter[str]:
    """Send so many requests, or as many as possible within a time.

    Returns the number of each kind, and of answers to refuse them.
    """
    address = addresses.parse_seed(at)
    target = addresses.peer_of(address)
    assert target is not None, "a seed names its peer"
    port = int(str(address).split("/")[4])
    done: Counter[str] = Counter()
    left, until = requests, time.monotonic() + seconds

    async def one(kind: str, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
            done["answered"] += 1
        except (DhtError, OSError, TimeoutError):
            done["refused"] += 1
        done[kind] += 1

    async def work(attacker: Attacker) -> None:
        nonlocal left
        rng = attacker.rng
        while left > 0 and time.monotonic() < until:
            left -= 1
            if left % KNOCK_EVERY:
                kind = rng.choice(KINDS)
                await one(kind, getattr(attacker, kind))
            else:
                where = rng.choice((port, page_port))
                await one("knock", lambda where=where: knock(where, rng.randbytes(300)))  # type: ignore[misc]

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(IDENTITIES):
            rng = random.Random(f"{seed} {number}")
            identity = Identity.from_seed(rng.randbytes(32))
            host = await stack.enter_async_context(await HivemindHost.open(identity, HOST))
            await host.connect(target, [address], timeout_s=30.0)
            attacker = Attacker(identity, host, target, rng)
            for _ in range(AT_ONCE):
                group.create_task(work(attacker))
    return done


def main(arguments: list[str]) -> None:
    os.nice(19)
    at, page_port, requests, seed, seconds = arguments
    began = time.monotonic()
    attacking = attack(at, int(page_port), int(requests), int(seed), seconds=float(seconds))
    done: dict[str, Any] = dict(asyncio.run(attacking))
    sys.stdout.write(json.dumps({**done, "seconds": time.monotonic() - began}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

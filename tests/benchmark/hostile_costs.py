"""Measures what hostile requests cost a bootstrap peer.

``python -m tests.benchmark.hostile_costs [REQUESTS]`` makes requests of the kinds in
``tests.chaos.attackers.hostile_requests``, hands them to a bootstrap peer in this process as its
libp2p daemon would, and prints the processor time by kind in milliseconds. The daemon's own work
and the limits of each peer are left out.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

from multiaddr import Multiaddr

from dht.identity import Identity, PeerId
from dht.libp2p.hivemind_imports import PeerID, p2pd_pb2
from dht.limits import Rate
from peer.extras.hosting.bootstrap import BootstrapSettings, open_bootstrap
from tests.chaos.attackers.hostile_requests import KINDS, Attacker

REQUESTS = 6000
IDENTITIES = 6
LEFT_OUT = "open_a_stream_of_garbage"
"""No unary call: only the daemon sees it."""

Request = tuple[str, Any]


class Notebook:
    """Stands for the host of an attacker: notes its calls and sends none."""

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.calls: list[tuple[str, bytes]] = []

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        self.calls.append((protocol, request))
        return b""


async def made(target: PeerId, count: int) -> list[Request]:
    """Requests of several identities, each with its kind, in random order."""
    requests: list[Request] = []
    kinds = [kind for kind in KINDS if kind != LEFT_OUT]
    for number in range(IDENTITIES):
        rng = random.Random(number)
        identity = Identity.from_seed(rng.randbytes(32))
        host = Notebook(identity.peer_id)
        attacker = Attacker(identity, host, target, rng)  # type: ignore[arg-type]
        sender = PeerID.from_base58(identity.peer_id).to_bytes()
        for _ in range(count // IDENTITIES):
            kind = rng.choice(kinds)
            await getattr(attacker, kind)()
            protocol, data = host.calls.pop()
            call = p2pd_pb2.CallUnaryRequest(peer=sender, proto=protocol, data=data)
            requests.append((kind, call))
    random.Random(0).shuffle(requests)
    return requests


async def measure(count: int) -> dict[str, float]:
    """Milliseconds of processor time for one request of each kind, and for all together."""
    spent: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        at = Multiaddr("/ip4/127.0.0.1/tcp/0")
        settings = BootstrapSettings(data_directory=Path(folder), listen=(at,), page=None)
        async with open_bootstrap(settings) as bootstrap:
            requests = await made(bootstrap.peer_id, count)
            calls = bootstrap.host._daemon.calls  # type: ignore[union-attr]
            calls._rate = Rate(1e9, 1e9)
            for kind, request in requests:
                began = time.process_time()
                calls._begin_request(uuid4(), request)
                await asyncio.sleep(0)  # the call begins
                if tasks := list(calls._tasks.values()):
                    await asyncio.wait(tasks)
                spent[kind] += time.process_time() - began  # type: ignore[assignment]
                seen[kind] += 1
    figures = {kind: round(1e3 * total / seen[kind], 3) for kind, total in spent.most_common()}
    return {"all": round(1e3 * sum(spent.values()) / len(requests), 3), **figures}


def main(arguments: list[str]) -> None:
    count = int(arguments[0]) if arguments else REQUESTS
    sys.stdout.write(json.dumps(asyncio.run(measure(count)), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

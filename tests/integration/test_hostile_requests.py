"""A bootstrap peer under hostile requests: its memory, and the honest look-ups beside them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from dht import addresses
from dht.libp2p.hivemind_directory import id_of
from dht.libp2p.hivemind_patches import PeerID
from dht.records import PeerRecord, seal
from peer.lab.processes import free_port
from tests.integration.hostile_requests import KINDS
from tests.integration.loopback import WAIT_S, hosts, identity, run

ATTACKERS = 2
KEY = "ef" * 32 + "/peers/"
LOOK_EVERY_S = 0.1
GROWN_MAX_BYTES = 320 << 20
"""The records of a full directory are 64 MiB, twice what they are in Python's objects, and the
daemon remembers addresses and connections."""


def resident(server: psutil.Process) -> int:
    """Memory of the server and of its daemon."""
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


async def look_ups_beside(attackers: list[subprocess.Popen[str]], at: str) -> list[float]:
    """Times of an honest member's look-ups while the attack goes on."""
    times: list[float] = []
    address = addresses.parse_seed(at)
    server = addresses.peer_of(address)
    async with hosts(1, first=1000) as (member,):
        await member.connect(server, [address], timeout_s=WAIT_S)
        record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
        sequence = 0
        while any(attacker.poll() is None for attacker in attackers) or len(times) < 50:
            if sequence % 100 == 0:
                sealed = seal(record, identity(1000), key=KEY, sequence=sequence + 1, ttl_s=600)
                await member.directory.publish(KEY, sealed, ttl_s=600, timeout_s=WAIT_S)
            sequence += 1
            # The server alone: the attackers are nodes of the directory too, and slow ones.
            find = member.records._node.protocol.call_find
            began = time.perf_counter()
            answer = await find(PeerID.from_base58(server), [id_of(KEY)])
            times.append(time.perf_counter() - began)
            assert answer is not None, "no answer within 3 s"
            records = dict(answer[id_of(KEY)][0].value.items())
            assert records[member.peer_id].value == sealed
            await asyncio.sleep(LOOK_EVERY_S)
    return times


def attack(tmp_path: Path, requests: int) -> None:
    port, page_port = free_port(), free_port()
    command = [sys.executable, "-m", "peer.cli", "bootstrap", "--data-dir", str(tmp_path / "data")]
    listen = ["--listen", f"/ip4/127.0.0.1/tcp/{port}", "--page", f"127.0.0.1:{page_port}"]
    errors = (tmp_path / "errors.txt").open("w")
    with (
        errors,
        subprocess.Popen(
            [*command, *listen],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        at = process.stdout.readline().strip()
        server = psutil.Process(process.pid)
        attackers = []
        try:
            idle = run(look_ups_beside([], at))
            before = resident(server)
            for seed in range(ATTACKERS):
                arguments = [at, str(page_port), str(requests // ATTACKERS), str(seed)]
                attackers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.integration.hostile_requests", *arguments],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            times = run(look_ups_beside(attackers, at), timeout_s=requests / 50 + 300)
            sent: Counter[str] = Counter()
            for attacker in attackers:
                sent.update(json.loads(attacker.communicate(timeout=WAIT_S)[0]))
            grown = resident(server) - before
            spent = sum(sum(p.cpu_times()[:2]) for p in (server, *server.children()))
            p99, idle_p99 = np.percentile(times, 99), np.percentile(idle, 99)
            sys.stderr.write(
                f"{sum(sent[kind] for kind in (*KINDS, 'knock'))} requests in "
                f"{sent['seconds'] / ATTACKERS:.0f} s, {sent['answered']} answered, "
                f"{spent:.0f} s of processor time; look-ups p50 "
                f"{1e3 * np.percentile(times, 50):.0f} ms, p99 {1e3 * p99:.0f} ms (idle "
                f"{1e3 * idle_p99:.0f} ms); memory +{grown >> 20} MiB\n"
            )
            assert process.poll() is None
            assert len(KINDS) + 1 == 20 and all(sent[kind] for kind in (*KINDS, "knock"))
            assert grown < GROWN_MAX_BYTES
            # The machine also runs the attackers: their load alone slows a look-up down.
            assert p99 < 0.1 + 5 * idle_p99
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.communicate()
            process.terminate()
            process.wait(WAIT_S)
    assert "Traceback" not in (tmp_path / "errors.txt").read_text()


@pytest.mark.slow
def test_a_bootstrap_peer_answers_beside_twenty_thousand_hostile_requests(tmp_path: Path) -> None:
    attack(tmp_path, 20_000)


@pytest.mark.soak
def test_a_bootstrap_peer_answers_beside_a_million_hostile_requests(tmp_path: Path) -> None:
    attack(tmp_path, 1_000_000)

"""A bootstrap peer under hostile requests: its memory, and the honest look-ups beside them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from dht import addresses
from dht.libp2p.directory_wire import read_records
from dht.libp2p.hivemind_directory import id_of
from dht.libp2p.hivemind_host import HivemindHost
from dht.libp2p.hivemind_imports import PeerID
from dht.records import PeerRecord, seal
from tests.chaos.attackers.hostile_requests import CROWDED, KINDS
from tests.integration.loopback import WAIT_S, hosts, identity, run
from tests.processes import Processes, free_port
from tests.swarms.commands import Swarm, address_of

ATTACKERS = 2
KEY = "ef" * 32 + "/peers/"
LOOK_EVERY_S = 0.05
STORE_EVERY = 100
TURNS_MIN = 50
LOOK_UP_MAX_MS = 100.0
"""Limit of the 99th percentile of a look-up beside the attack, besides what the machine costs."""

GROWN_MAX_BYTES = 320 << 20
"""The records of a full directory are 64 MiB, twice what they are in Python's objects, and the
daemon remembers addresses and connections."""


def resident(server: psutil.Process) -> int:
    """Memory of the server and of its daemon."""
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


class Look:
    """Look-ups of an honest member at one bootstrap peer."""

    def __init__(self, member: HivemindHost, at: str) -> None:
        self.times: list[float] = []
        self._member = member
        self._address = addresses.parse_seed(at)
        server = addresses.peer_of(self._address)
        assert server is not None
        self._server = server
        self._sequence = 0
        self._sealed = b""

    async def begin(self) -> None:
        await self._member.connect(self._server, [self._address], timeout_s=WAIT_S)

    async def store(self) -> None:
        """Store the record of the member."""
        self._sequence += 1
        record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
        self._sealed = seal(record, identity(1000), key=KEY, sequence=self._sequence, ttl_s=600)
        store = self._member.directory._protocol.call_store
        peer = PeerID.from_base58(self._server)
        kept: list[bool] | None = None
        while kept is None:  # on a machine this busy a reply may come too late
            kept = await store(peer, [id_of(KEY)], [self._sealed], [0.0])
        assert kept == [True]

    async def look(self) -> None:
        # The server alone: the attackers are nodes of the directory too, and slow ones.
        find = self._member.directory._protocol.call_find
        began = time.perf_counter()
        answer = await find(PeerID.from_base58(self._server), [id_of(KEY)])
        self.times.append(time.perf_counter() - began)
        assert answer is not None, "no answer within 3 s"
        assert self._sealed in read_records(answer[id_of(KEY)][0].value)

    def p99_ms(self) -> float:
        return 1e3 * float(np.percentile(self.times, 99))


async def look_ups_beside(attackers: list[subprocess.Popen[bytes]], *at: str) -> list[Look]:
    """Look-ups at these bootstrap peers in turns, while the attack goes on."""
    async with hosts(1, first=1000) as (member,):
        looks = [Look(member, each) for each in at]
        for look in looks:
            await look.begin()
        turns = 0
        while any(attacker.poll() is None for attacker in attackers) or turns < TURNS_MIN:
            for look in looks:
                if turns % STORE_EVERY == 0:
                    await look.store()
                await look.look()
                await asyncio.sleep(LOOK_EVERY_S)
            turns += 1
    return looks


def attack(processes: Processes, tmp_path: Path, seconds: float, *, seed: int = 0) -> None:
    """Attack a bootstrap peer, and look up at it and at another one, which has no part in it.

    The other one tells what the machine costs, which also runs the attackers.
    """
    page_port, swarm = free_port(), Swarm(processes, tmp_path)
    attacked_one = swarm.bootstrap("attacked", options=("--page", f"127.0.0.1:{page_port}"))
    quiet_one = swarm.bootstrap("quiet")
    at, quiet_at = map(address_of, (attacked_one, quiet_one))
    server = psutil.Process(attacked_one.process.pid)
    before = resident(server)
    ports = [addresses.port_of(addresses.parse_seed(at)), page_port]
    command = [
        *("-m", "tests.chaos.attackers.visit", "--what", "crowd", "--run", CROWDED),
        *("--seconds", str(seconds), "--rate", "inf"),
        *(word for port in ports for word in ("--babble", str(port))),
    ]
    attackers = [
        processes.python(*command, "--seed", str(ATTACKERS * seed + number), at)
        for number in range(ATTACKERS)
    ]
    attacked, quiet = run(look_ups_beside(attackers, at, quiet_at), timeout_s=seconds + 300)
    sent: Counter[str] = Counter()
    for attacker in attackers:
        (told,) = processes.records_of(attacker, "did")
        sent.update({kind: count for kind, count in told.items() if kind != "event"})
    grown = resident(server) - before
    spent = sum(sum(p.cpu_times()[:2]) for p in (server, *server.children()))
    for each in (attacked_one, quiet_one):
        assert each.process.poll() is None and "Traceback" not in each.output, each.output
    sys.stderr.write(
        f"{sent['answered'] + sent['refused']} requests of {sent['identities']} identities in "
        f"{seconds:.0f} s, {sent['answered']} answered, {spent:.0f} s of "
        f"processor time; {len(attacked.times)} look-ups, p50 "
        f"{1e3 * np.percentile(attacked.times, 50):.0f} ms, p99 {attacked.p99_ms():.0f} ms, at a "
        f"peer that is left alone p50 {1e3 * np.percentile(quiet.times, 50):.0f} ms, p99 "
        f"{quiet.p99_ms():.0f} ms; memory +{grown >> 20} MiB\n"
    )
    assert len(KINDS) == 17 and all(sent[kind] for kind in (*KINDS, "babble"))
    assert grown < GROWN_MAX_BYTES
    assert attacked.p99_ms() < LOOK_UP_MAX_MS + quiet.p99_ms()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bootstrap_peer_answers_beside_a_minute_of_hostile_requests(
    processes: Processes, tmp_path: Path
) -> None:
    attack(processes, tmp_path, 60.0)


@pytest.mark.soak
@pytest.mark.timeout(25_000)
def test_a_bootstrap_peer_answers_beside_an_hour_of_hostile_requests(
    processes: Processes, tmp_path: Path
) -> None:
    """``SHOAL_HOSTILE_SECONDS``: the time of one piece; ``SHOAL_HOSTILE_SEED``: its number."""
    seconds = float(os.environ.get("SHOAL_HOSTILE_SECONDS", "3600"))
    seed = int(os.environ.get("SHOAL_HOSTILE_SEED", "0"))
    attack(processes, tmp_path, seconds, seed=seed)

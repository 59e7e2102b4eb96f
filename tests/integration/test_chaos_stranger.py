"""A stranger that floods a host or sends it garbage does so, and the host keeps working."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from averaging.live.streams.bulk import Bulk
from averaging.live.streams.links import Transport
from dht.identity import PeerId, RunId
from dht.libp2p.lane.settings import LaneSettings
from tests.chaos.attackers import stranger
from tests.chaos.attackers.visit import visit
from tests.integration.loopback import LOOPBACK, hosts, run, until

RUN = RunId("ab" * 32)
WITH_LANE = replace(LOOPBACK, lane=LaneSettings())
ENOUGH = {
    "garbage": {"frames": 21, "calls_refused": 6, "lane_babble": 1},
    "flood": {"knocks": 1, "streams": 101, "frames_too_large": 6},
}
"""Amount that the stranger sends before it stops."""


@pytest.mark.slow  # the chaos run has such a stranger, and test_daemon.py the limits of a host
@pytest.mark.parametrize("what", ["garbage", "flood"])
def test_connected_peers_still_exchange_messages_during_an_attack(what: str) -> None:
    async def main() -> Counter[str]:
        heard: list[bytes] = []

        async def bulk(stream: Bulk, header: bytes) -> None:
            await stream.refuse("nothing is going on")

        async with hosts(WITH_LANE, WITH_LANE) as (anna, boris), asyncio.TaskGroup() as tasks:
            transports = []
            for host in (anna, boris):
                transport = Transport(
                    host,
                    run=RUN,
                    message=lambda peer, data: heard.append(data) if peer in friends else None,
                    lost=lambda peer, reason: None,
                    bulk=bulk,
                )
                transports.append(transport)
            friends: set[PeerId] = {anna.peer_id, boris.peer_id}
            for transport in transports:
                await transport.start(tasks)
            at = [await anna.addresses(), await boris.addresses()]
            done: Counter[str] = Counter()
            stop = asyncio.Event()
            attack = stranger.attack(what, RUN, [found[0] for found in at], done, seed=0)
            visiting = asyncio.create_task(visit(attack, seconds=90.0, stop=stop))
            for number in range(25):
                transports[0].send(boris.peer_id, f"message {number}".encode())
                await asyncio.sleep(0.1)
            await until(lambda: done >= Counter(ENOUGH[what]), timeout_s=75.0)
            stop.set()
            await visiting
            await until(lambda: len(heard) == 25)
            for transport in transports:
                await transport.close()
        assert [data.decode() for data in heard] == [f"message {number}" for number in range(25)]
        return done

    done = run(main())
    assert done["dials_failed"] == 0, done

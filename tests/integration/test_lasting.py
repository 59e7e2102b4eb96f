"""Live peers for hours of virtual time: rounds go on, and what lies on their disks is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dht.memory.virtual_loop import run
from peer.views.event_log import read_events
from tests.integration.lasting_swarm import (
    HOUR_S,
    LOG_FILES,
    Churn,
    LastingSwarm,
    Life,
)

CHURN = Churn(
    settled=2,
    accident_every_s=1500.0,
    away_s=(60.0, 900.0),
    partition_every_s=2400.0,
    clock_every_s=1800.0,
    invite_s=(1500.0, 4000.0),
    newcomer_every_s=6000.0,
)
HOURS = 3
LOOK_EVERY_S = 170.0


async def last(swarm: LastingSwarm, life: Life) -> None:
    """Let hours pass. The swarm is checked often, and every settled peer merges in each hour."""
    async with asyncio.TaskGroup() as tasks:
        life.begin(tasks)
        for hour in range(1, HOURS + 1):
            versions = {name: swarm.peers[name].versions() for name in life.settled}
            while swarm.now < hour * HOUR_S:
                await asyncio.sleep(LOOK_EVERY_S)
                swarm.check()
            for name in life.settled:
                made = zip(versions[name], swarm.peers[name].versions(), strict=True)
                assert all(new > old for old, new in made), f"{name}: no merge in hour {hour}"
        life.end()


@pytest.mark.slow  # hours; tests/averaging/live/test_growth.py looks for what grows in minutes
def test_live_peers_last_for_hours_with_churn_wrong_clocks_and_invites_that_end(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        swarm = LastingSwarm(tmp_path, seed=1)
        names = [f"peer {number}" for number in range(5)]
        swarm.seeds = names[:2]
        life = Life(swarm, names, CHURN)
        for name in names:
            await swarm.start(name)
        try:
            await last(swarm, life)
            assert set(life.happened) >= {"crash", "partition", "clock set", "invite renewed"}
            assert swarm.told["not_admitted"], "an invite that ended was told"
            assert swarm.ledgers_checked > 20 * HOURS
            for name in life.settled:
                log = tmp_path / name / "events.jsonl"
                assert log.with_name(f"events.jsonl.{LOG_FILES - 1}").exists()
                versions = [e["version"] for e in read_events(log) if e["event"] == "round"]
                assert versions == sorted(versions) and len(versions) > 3
                assert len(list((tmp_path / name / "outer").iterdir())) == 3
        finally:
            await swarm.stop_all()

    with LastingSwarm.slowed():
        run(main(), seed=1)

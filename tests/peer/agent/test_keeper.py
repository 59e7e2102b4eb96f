"""What a keeper needs to lead: an incarnation that commits hold, and to know that it is dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from averaging import messages as said
from averaging.live.averager import Averager
from averaging.numbers.layout import Layout, TensorSpec
from dht.errors import HostClosed
from dht.identity import RunId
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of, run
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from peer.agent.keeper import Keeper
from peer.agent.station import Station, StationSettings
from peer.guest.enforcement import Guest
from peer.run_file.run_file import parse
from peer.storage.progress import ProgressFile, read_progress
from tests.dht.presence.presence_swarm import until
from tests.integration import learner_process

LAYOUT = Layout.build([TensorSpec("w", (4, 4), "float32")], 1)


@pytest.fixture
def acted_upon(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The verdicts that the daemon of a simulated host was told."""
    verdicts: list[bool] = []

    async def set_reachable(host: MemoryHost, reachable: bool) -> None:
        verdicts.append(reachable)

    monkeypatch.setattr(MemoryHost, "set_reachable", set_reachable, raising=False)
    return verdicts


def keeper_on_line(directory: Path, network: MemoryNetwork) -> Keeper:
    """A keeper as it is when its station has just opened."""
    identity = identity_of("keeper")
    settings = StationSettings(
        run=parse(learner_process.text()),
        identity=identity,
        directory=directory,
        name="keeper",
        role="keeper",
        seeds=(),
        listen=(),
        announce=(),
        page=None,
    )
    keeper = Keeper(settings, LAYOUT, Guest(directory, trains=False))
    station: Any = keeper.station
    station.host = network.host(identity)
    station.presence = Presence(
        station.host,
        identity,
        Profile(RunId(station.run_id), role="keeper"),
        on_reachable=station._reachable_changed,
    )
    return keeper


@asynccontextmanager
async def meeting(keeper: Keeper, helper: MemoryHost) -> AsyncIterator[Keeper]:
    """The keeper looks for peers, and is connected to one that can dial it back."""
    station = keeper.station
    seeing = Presence(helper, identity_of("boris"), Profile(None))
    await seeing.start()
    await station.presence.start()
    await station.host.connect(helper.peer_id, await helper.addresses(), timeout_s=5.0)
    try:
        yield keeper
    finally:
        await station.presence.close()
        await seeing.close()
        station.log.close()


async def taking_part(station: Station, averager: Averager) -> None:
    """Take part, and leave at once."""
    station.end("the test is over", 0, finished=False, timeout_s=0.0)
    async with asyncio.TaskGroup() as tasks:
        await station.take_part(averager, tasks, {})


def test_each_life_of_a_keeper_has_a_larger_incarnation_that_a_commit_holds(
    tmp_path: Path,
) -> None:
    async def life() -> int:
        keeper = keeper_on_line(tmp_path, MemoryNetwork())
        averager = keeper._averager_with(())
        keeper.station.log.close()
        return averager.incarnation

    lives = [run(life()) for _ in range(3)]
    assert lives == sorted(set(lives))
    assert lives[0] >= 1 and lives[-1] <= said.COUNT_MAX


@pytest.mark.parametrize("clean", [True, False])
def test_a_keeper_in_a_learners_folder_leaves_its_account_as_it_is(
    tmp_path: Path, clean: bool
) -> None:
    progress = ProgressFile.begin(tmp_path / "progress", wall_time_s=4e9)  # its clock was ahead
    progress.record(step=3, tokens=300)
    if clean:
        progress.end()
    else:
        progress.close()

    async def life() -> int:
        keeper = keeper_on_line(tmp_path, MemoryNetwork())
        averager = keeper._averager_with(())
        keeper.station.log.close()
        return averager.incarnation

    assert run(life()) == 4_000_000_001
    after = read_progress(tmp_path / "progress")
    assert after is not None
    assert (after.total_tokens, after.clean) == (300, clean)


def test_a_verdict_between_building_the_averager_and_taking_part_is_not_lost(
    tmp_path: Path, acted_upon: list[bool]
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        helper = network.host("boris")
        async with meeting(keeper_on_line(tmp_path, network), helper) as keeper:
            averager = keeper._averager_with(())
            assert keeper.station.presence.reachable is None
            await until(lambda: bool(acted_upon), within_s=60.0, what="it knows")
            assert acted_upon == [True]
            await taking_part(keeper.station, averager)
            assert averager.reachable

    run(main())


def test_whoever_is_not_known_to_be_dialled_begins_as_one_who_only_dials_out(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        keeper = keeper_on_line(tmp_path, MemoryNetwork())
        await keeper.station.presence.start()
        averager = keeper._averager_with(())
        await taking_part(keeper.station, averager)
        assert not averager.reachable
        await keeper.station.presence.close()
        keeper.station.log.close()

    run(main())


def test_a_verdict_reaches_rounds_although_the_daemon_is_just_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def set_reachable(host: MemoryHost, reachable: bool) -> None:
        tried.append(reachable)
        raise HostClosed("its daemon is being restarted")

    tried: list[bool] = []

    monkeypatch.setattr(MemoryHost, "set_reachable", set_reachable, raising=False)

    async def main() -> None:
        network = MemoryNetwork()
        helper = network.host("boris")
        async with meeting(keeper_on_line(tmp_path, network), helper) as keeper:
            station = keeper.station
            station.averager = averager = keeper._averager_with(())
            averager.set_reachable(False)
            await until(lambda: bool(tried), within_s=60.0, what="the daemon is told")
            assert averager.reachable

    run(main())

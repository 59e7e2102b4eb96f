"""What a station tells of its life, without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.grouping import PeerView
from dht.identity import Identity, PeerId
from peer.agent.station import Fields, Owner, Station, StationSettings
from peer.guest.enforcement import Guest, write_limits
from peer.rules.ending import Ending
from peer.rules.limits import Limits
from peer.run_file.reading import parse
from peer.views.event_log import read_events
from tests.integration import learner_process

BORIS, CLARA = PeerId("12D3KooWBoris"), PeerId("12D3KooWClara")


class Hearing(Owner):
    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def told(self, name: str, fields: Fields) -> None:
        self.heard.append((name, dict(fields)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Station, Hearing]]:
    async def make() -> tuple[Station, Hearing]:
        settings = StationSettings(
            run=parse(learner_process.text()),
            identity=Identity.from_seed(bytes(32)),
            directory=tmp_path,
            name="anna",
            role="learner",
            seeds=(),
            listen=(),
            announce=(),
            page=None,
        )
        layout = Layout.build([TensorSpec("w", (4, 4), "float32")], 1)
        owner = Hearing()
        return Station(settings, layout, owner, Guest(tmp_path)), owner

    station, owner = asyncio.run(make())
    yield station, owner
    station.log.close()


def training(at: float) -> PeerView:
    return PeerView(
        first_seen=at,
        heard_at=at,
        failed_at=None,
        reachable=True,
        trains=True,
        arrives=False,
        step_time_s=1.0,
        bytes_per_s=None,
    )


def test_being_alone_is_told_once_per_spell(place: tuple[Station, Hearing]) -> None:
    station, owner = place

    async def live() -> None:
        now = asyncio.get_running_loop().time()
        for _ in range(3):
            for fragment in range(4):
                station.averager_event("alone", {"fragment": fragment})
            station.see_company()
        assert [name for name, _ in owner.heard] == ["alone"]
        station.view[BORIS] = training(now)
        station.see_company()
        del station.view[BORIS]
        station.averager_event("alone", {"fragment": 2})

    asyncio.run(live())
    logged = [e for e in read_events(station.log.path) if e["event"] == "alone"]
    assert len(logged) == len(owner.heard) == 2
    assert "nobody else trains" in logged[0]["text"]


def test_a_wish_to_leave_is_obeyed_whatever_goes_on(place: tuple[Station, Hearing]) -> None:
    station, _ = place

    async def live() -> None:
        write_limits(station.directory, Limits(leave_at=time.time() + 60.0))
        station.ending = asyncio.get_running_loop().create_future()  # in this test's loop
        leaving = asyncio.create_task(station.leave_when_asked(12.0))
        async with asyncio.timeout(60.0):
            assert await station.unless_ending(asyncio.sleep(3600.0)) is None
        await leaving
        assert station.ending.result() == Ending("its owner asked it to leave", 0, False, 12.0)

    asyncio.run(live())


def a_round(**changes: Any) -> dict[str, Any]:
    return {
        "fragment": 2,
        "version": 7,
        "outcome": "finished",
        "reason": "finished",
        "members": [BORIS, CLARA],
        "contributors": [BORIS],
        "weights": [1.0],
        "left_out": {CLARA: "too long"},
        "seconds": 1.0,
        **changes,
    }


def test_what_became_of_each_peers_last_offer_is_remembered(
    place: tuple[Station, Hearing],
) -> None:
    station, _ = place

    async def live() -> None:
        station.averager_event("round", a_round())
        assert station.last_offers == {BORIS: "merged 2/7", CLARA: "left out 2/7: too long"}
        station.averager_event("round", a_round(outcome="given up", version=8))
        assert station.last_offers[BORIS] == "merged 2/7"
        station.averager_event("round", a_round(contributors=[CLARA], left_out={}, version=9))
        assert station.last_offers[CLARA] == "merged 2/9"
        for number in range(2000):
            station.averager_event("round", a_round(contributors=[PeerId(f"12D3{number}")]))
        assert len(station.last_offers) == 1024

    asyncio.run(live())


def test_an_offer_that_came_to_nothing_before_a_round_is_told_with_its_reason(
    place: tuple[Station, Hearing],
) -> None:
    station, owner = place

    async def live() -> None:
        station.averager_event("too_late", {"fragment": 1, "leader": BORIS})
        station.averager_event("joining", {"fragment": 1, "leader": BORIS})

    asyncio.run(live())
    assert [(name, fields["fragment"]) for name, fields in owner.heard] == [("not_merged", 1)]
    assert "closed the roster" in owner.heard[0][1]["reason"]

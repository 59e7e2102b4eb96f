"""Peers behind routers that open direct connections, and a peer that was not upgraded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from dht.errors import PeerUnreachable
from dht.identity import PeerId
from dht.libp2p.lane.lane import Lane
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from peer import status
from peer.agent.network import MEET_EVERY_S, STATUS_WITHIN_S, Meetings, Network, Told
from peer.rules.others import HUBS_MAX, hubs, to_meet
from peer.status import PeerStatus
from tests.peer.statuses import a_status

ANNA, BORIS = PeerId("12D3KooWAnna"), PeerId("12D3KooWBoris")
CLARA, ZOE = PeerId("12D3KooWClara"), PeerId("12D3KooWZoe")


def test_nobody_is_met_while_somebody_can_be_dialled() -> None:
    assert to_meet(False, {BORIS: False, CLARA: None}, me=ANNA) == {BORIS, CLARA}
    assert to_meet(False, {BORIS: False, CLARA: True}, me=ANNA) == frozenset()
    assert to_meet(True, {BORIS: False}, me=ANNA) == frozenset()
    assert to_meet(None, {BORIS: False}, me=ANNA) == frozenset()


def test_in_a_large_run_everybody_meets_the_same_few() -> None:
    peers = [PeerId(f"12D3KooW{index:03}") for index in range(200)]
    met = [to_meet(False, dict.fromkeys(set(peers) - {me}, False), me=me) for me in peers]
    chosen = hubs(peers)
    assert len(chosen) == HUBS_MAX
    assert all(each == chosen - {me} for me, each in zip(peers, met, strict=True))
    assert sum(map(len, met)) < 200 * HUBS_MAX


class Homes:
    """Stands for the presence and the lane of a peer that can only dial out."""

    def __init__(self) -> None:
        self.reachable: bool | None = False
        self.apart: set[PeerId] = set()
        self.gone: set[PeerId] = set()
        self.doubted: set[PeerId] = set()
        self.connections: set[PeerId] = set()
        self.tried: list[PeerId] = []

    async def connect(self, peer: PeerId, *, timeout_s: float) -> None:
        if peer in self.gone:
            raise PeerUnreachable(peer, "silent")

    async def reach(self, peer: PeerId) -> str | None:
        self.tried.append(peer)
        if peer in self.apart:
            self.doubted.add(peer)
            return "routers"
        self.connections.add(peer)
        return None

    def is_doubted(self, peer: PeerId) -> bool:
        return peer in self.doubted

    def has_connection(self, peer: PeerId) -> bool:
        return peer in self.connections


def after(
    network: Homes,
    members: dict[PeerId, bool | None],
    *steps: Callable[[], object],
    me: PeerId = ANNA,
    counts: Callable[[PeerId], bool] = lambda peer: True,
) -> tuple[Meetings, list[bool]]:
    """Run meetings; each step is done after a round of them. Also returns ``complete`` at each."""
    meetings = Meetings(cast(Presence, network), me=me, members=lambda: members, counts=counts)
    seen: list[bool] = []

    async def scenario() -> None:
        changes: list[None] = []
        task = asyncio.create_task(meetings.run(cast(Lane, network), lambda: changes.append(None)))
        for step in (*steps, lambda: None):
            before = dict(meetings.met)
            await asyncio.sleep(MEET_EVERY_S)
            assert bool(changes) == (meetings.met != before)
            changes.clear()
            seen.append(meetings.complete)
            step()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
    return meetings, seen


def test_a_peer_serves_once_it_has_met_all_others_and_keeps_the_connections() -> None:
    network = Homes()
    meetings, seen = after(network, {BORIS: False, CLARA: False}, lambda: None)
    assert meetings.met == {BORIS: True, CLARA: True} and seen == [True, True]
    assert sorted(network.tried) == [BORIS, CLARA], "connections that are there are not opened anew"


def test_a_peer_that_cannot_meet_one_of_the_others_does_not_serve() -> None:
    network = Homes()
    network.apart.add(CLARA)
    members: dict[PeerId, bool | None] = {BORIS: False, CLARA: False}
    meetings, seen = after(network, members, lambda: members.pop(CLARA))
    assert seen == [False, True], "the other one has left"
    assert network.tried.count(CLARA) == 1, "it is doubted, and not tried again at once"
    assert meetings.met == {BORIS: True}

    gone = Homes()
    gone.gone.add(BORIS)
    assert after(gone, {BORIS: False})[1] == [False]


def test_a_peer_that_not_everybody_meets_does_not_serve_in_a_large_run() -> None:
    many: dict[PeerId, bool | None] = {
        PeerId(f"12D3KooWMany{index:02}"): False for index in range(HUBS_MAX)
    }
    _, seen = after(Homes(), many, many.popitem, me=ZOE)
    assert seen == [False, True], "until the run is small enough"
    assert after(Homes(), many, me=ANNA)[1] == [True]


def test_a_key_that_never_worked_keeps_nobody_behind_routers_from_meeting_the_others() -> None:
    """One record ended all merges: it said that its author can be dialled, or could not be met."""
    network = Homes()
    network.apart.add(ZOE)
    for says in (True, False):
        members: dict[PeerId, bool | None] = {BORIS: False, ZOE: says}
        meetings, seen = after(network, members, counts=lambda peer: peer == BORIS)
        assert meetings.met == {BORIS: True} and seen == [True]


def test_a_connection_that_is_lost_is_opened_again() -> None:
    network = Homes()
    after(network, {BORIS: False}, network.connections.clear)
    assert network.tried == [BORIS, BORIS]


def test_meetings_end_when_a_member_comes_that_can_be_dialled() -> None:
    network = Homes()
    members: dict[PeerId, bool | None] = {BORIS: False}
    meetings, seen = after(network, members, lambda: members.update({CLARA: True}))
    assert seen == [True, False] and not meetings.met


def at_least(count: int) -> Callable[[Sequence[PeerStatus]], bool]:
    return lambda answers: len(answers) >= count


async def test_those_who_have_not_answered_are_waited_for_until_there_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(host: object, peer: PeerId, run_id: object, *, timeout_s: float) -> PeerStatus:
        await asyncio.sleep({ANNA: 2.0, BORIS: 1.0}.get(peer, timeout_s))
        if peer == CLARA:
            raise PeerUnreachable(peer, "silent")
        return a_status(peer=peer)

    monkeypatch.setattr(status, "ask", ask)
    network = cast(
        Network,
        SimpleNamespace(
            presence=Homes(),
            host=None,
            _view={},
            told={},
            _seat=SimpleNamespace(run=SimpleNamespace(run_id="run")),
        ),
    )
    loop = asyncio.get_running_loop()
    for count, seconds in ((3, STATUS_WITHIN_S), (2, 2.0), (1, 1.0)):
        began = loop.time()
        answers = await Network.statuses(network, [ANNA, BORIS, CLARA], enough=at_least(count))
        assert loop.time() - began == pytest.approx(seconds)
        assert [each.peer for each in answers] == [ANNA, BORIS][2 - min(count, 2) :]


def test_states_come_from_the_founding_to_begin_with_or_from_those_that_told_of_none() -> None:
    told = {
        ANNA: Told(0.0, "one", 1, None),
        BORIS: Told(0.0, "other", 2, 2.5),
        CLARA: Told(0.0, "", 3, 2.0),
    }
    network = cast(Network, SimpleNamespace(told=told, _followed="one"))
    unknown = PeerId("12D3KooWUnknown")
    followed = [p for p in (*told, unknown) if Network.is_followed(network, p)]
    assert followed == [ANNA, CLARA, unknown]
    Network.follow(network, "")
    assert Network.is_followed(network, BORIS), "nothing is known of the foundings"

"""A keeper that leads: it has an incarnation that commits hold, and knows that it is dialled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from averaging import messages as said
from averaging.live.averager import Averager
from dht.addresses import peer_of
from dht.errors import HostClosed
from dht.identity import PeerId, RunId
from dht.membership.credentials import Directive
from dht.membership.orders import Orders, Rollback, Root
from dht.membership.table import bucket_key
from dht.memory.host import MemoryHost, identity_of
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from dht.records import PeerRecord, Rejected, seal
from peer.agent.figures import LocalPage
from peer.agent.keeper import ahead, behind
from peer.agent.life import take_part
from peer.agent.network import GREETED_MAX, KEEPS, Network
from peer.agent.peer import Peer
from peer.agent.services import Service
from peer.extras.site.keepers_page import public_link
from peer.joining.link import parse_link
from peer.rules.leaving import Departure
from peer.storage.progress import ProgressFile, read_progress
from tests.dht.presence.presence_swarm import until
from tests.peer.agent.example_keepers import keeper_in, keeper_online
from tests.peer.agent.example_peers import member

AT_ONCE = Departure("the test is over", 0, finished=False, timeout_s=0.0)


@pytest.fixture
def acted_upon(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The verdicts that the daemon of a simulated host was told."""
    verdicts: list[bool] = []

    async def set_reachable(host: MemoryHost, reachable: bool) -> None:
        verdicts.append(reachable)

    monkeypatch.setattr(MemoryHost, "set_reachable", set_reachable, raising=False)
    return verdicts


async def test_links_name_a_bootstrap_host_before_the_peer_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page handed out its keeper's address alone, which leads nowhere once the keeper stops."""
    async with keeper_online(tmp_path, monkeypatch) as (peer, _):
        [host] = map(Multiaddr, peer.seat.settings.seeds)
        network = peer.network
        await until(lambda: network.presence.addresses != (), within_s=30, what="own addresses")

        def named(link: str) -> list[PeerId | None]:
            return [peer_of(seed) for seed in parse_link(link).seeds]

        await until(lambda: peer_of(host) in named(public_link(peer)), within_s=30, what="it")
        assert named(public_link(peer)) == [peer_of(host), peer.me]
        assert named(network.link()) == [peer_of(host), peer.me]


async def taking_part(peer: Peer, averager: Averager) -> None:
    """Take part, and leave at once."""
    peer.end.hear(AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        await take_part(peer, averager, tasks, {})


def test_a_leaving_peer_greets_the_keepers_at_once_and_only_so_many_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeted: list[PeerId] = []

    async def greet(presence: Presence, peers: Sequence[PeerId]) -> None:
        greeted.extend(peers)

    async def main() -> None:
        async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
            monkeypatch.setattr(Network, "live_members", lambda self: members)
            monkeypatch.setattr(Presence, "greet", greet)
            peer.end.hear(Departure("asked", 0, finished=False, timeout_s=1.0))
            async with asyncio.TaskGroup() as tasks:
                await take_part(peer, averager, tasks, {})

    members = [replace(member(role="learner"), peer=PeerId("clara"))]
    members += [
        replace(member(role="keeper"), peer=PeerId(f"keeper {number}"))
        for number in range(GREETED_MAX + 1)
    ]
    run(main())
    assert greeted == [each.peer for each in members[1 : 1 + GREETED_MAX]]


async def test_all_services_of_one_name_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two services without a name one was kept, and Python warned of the other's coroutine."""
    began: list[Service] = []

    class Unnamed(Service):
        async def run(self, averager: Averager) -> None:
            began.append(self)

    two = [Unnamed(), Unnamed()]
    async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
        peer.services += two
        peer.end.hear(Departure("asked", 0, finished=False, timeout_s=1.0))
        async with asyncio.TaskGroup() as tasks:
            await take_part(peer, averager, tasks, {})
    assert began == two


def incarnation_of_a_life(directory: Path) -> int:
    async def life() -> int:
        keeper = keeper_in(directory)
        keeper.peer.log.close()
        return keeper.incarnation

    return run(life())


def test_each_life_of_a_keeper_has_a_larger_incarnation_that_a_commit_holds(
    tmp_path: Path,
) -> None:
    lives = [incarnation_of_a_life(tmp_path) for _ in range(3)]
    assert lives == sorted(set(lives))
    assert lives[0] >= 1 and lives[-1] <= said.COUNT_MAX


@pytest.mark.parametrize("clean", [True, False])
def test_a_keeper_in_a_learners_folder_leaves_its_account_as_it_is(
    tmp_path: Path, clean: bool
) -> None:
    progress = ProgressFile(tmp_path / "progress", wall_time_s=4e9)  # its clock was ahead
    progress.record(step=3, tokens=300)
    if clean:
        progress.end()
    else:
        progress.close()

    assert incarnation_of_a_life(tmp_path) == 4_000_000_001
    after = read_progress(tmp_path / "progress")
    assert after is not None
    assert (after.total_tokens, after.clean) == (300, clean)


async def test_records_of_other_runs_take_little_of_a_members_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make peers and runs without end; a bootstrap peer keeps 64 MiB of them."""
    async with keeper_online(tmp_path, monkeypatch) as (peer, _):
        keeper, refused = peer.network.host.keeper, 0
        mallory = identity_of("mallory")
        record = PeerRecord(
            protocol=(1, 1), role="learner", incarnation=1, addresses=(bytes(128),) * 6
        )
        for number in range(10_000):
            key = bucket_key(RunId(f"{number:064x}"), "")
            sealed = seal(record, mallory, key=key, sequence=1, ttl_s=600)
            refused += isinstance(keeper.admit(sealed, now=0.0, store=True), Rejected)
        assert refused and 1000 < len(keeper._in_order) <= KEEPS.records_max
        assert keeper._size_bytes <= KEEPS.bytes_max


async def test_a_verdict_between_building_the_averager_and_taking_part_is_not_lost(
    tmp_path: Path, acted_upon: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
        assert peer.network.presence.reachable is None
        await until(lambda: bool(acted_upon), within_s=60.0, what="it knows")
        assert acted_upon == [True]
        await taking_part(peer, averager)
        assert averager.reachable


async def test_a_peer_of_unknown_reachability_starts_as_one_that_only_dials_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = keeper_online(tmp_path, monkeypatch, can_be_dialled_back=False)
    async with alone as (peer, averager):
        await taking_part(peer, averager)
        assert not averager.reachable


async def test_a_newcomer_that_hears_late_of_a_rollback_joins_the_rounds_after_it(
    tmp_path: Path, acted_upon: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, it checked all signatures as those of before the rollback, and never got a state."""
    policy = f'\n[policy]\nowner = "{identity_of("owner").peer_id}"\n'
    async with keeper_online(tmp_path, monkeypatch, policy=policy) as (peer, averager):
        rollback = Rollback(number=7, roots=(Root(version=9, lineage=bytes(32)),))
        directive = Directive(number=8, bans=(), orders=Orders(rollback=rollback))
        async with asyncio.TaskGroup() as tasks:
            part = tasks.create_task(take_part(peer, averager, tasks, {}))
            await asyncio.sleep(1.0)
            peer.follow_directive(directive)
            await until(lambda: averager.is_after(7), within_s=10.0, what="it begins again")
            peer.end.hear(AT_ONCE)
            await part


async def test_the_page_has_the_owners_bans_among_the_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a ban was shown by `shoal status` and `shoal explain` alone."""
    policy = f'\n[policy]\nowner = "{identity_of("owner").peer_id}"\n'
    async with keeper_online(tmp_path, monkeypatch, policy=policy) as (peer, averager):
        await taking_part(peer, averager)
        page = LocalPage(peer)
        assert page.state()["orders"] == []
        for bans, orders, shown in (
            ((bytes(32),), Orders(paused=True), ["1 ban", "paused"]),
            ((), Orders(), []),
        ):
            peer.follow_directive(Directive(number=1, bans=bans, orders=orders))
            assert page.state()["orders"] == shown


async def test_a_verdict_reaches_rounds_although_the_daemon_is_just_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def set_reachable(host: MemoryHost, reachable: bool) -> None:
        tried.append(reachable)
        raise HostClosed("its daemon is being restarted")

    tried: list[bool] = []

    monkeypatch.setattr(MemoryHost, "set_reachable", set_reachable, raising=False)

    async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
        peer.network.on_serves = averager.set_reachable
        averager.set_reachable(False)
        await until(lambda: bool(tried), within_s=60.0, what="the daemon is told")
        assert averager.reachable


async def test_the_clocks_of_those_that_have_worked_count_before_those_of_newcomers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acted_upon: list[bool]
) -> None:
    async with keeper_online(tmp_path, monkeypatch) as (peer, averager):
        await taking_part(peer, averager)
        assert peer.network.presence._greeting.has_worked == averager.is_established


def test_a_peer_that_overstates_its_version_is_asked_no_more_than_others() -> None:
    """A keeper hears of new versions by records alone: one of them kept it from all others."""
    said = {"a": 2**53 - 1, "b": 9, "c": 8, "d": 7}
    told = [(identity_of(name).peer_id, version) for name, version in said.items()]
    asked = [ahead(7, told, turn=turn) for turn in range(6)]
    honest = {peer for peer, version in told[1:] if version > 7}
    assert set(asked) == {told[0][0], *honest} and max(map(asked.count, asked)) == 2
    assert ahead(2**53 - 1, told, turn=3) is None


def test_a_keeper_is_behind_by_the_versions_that_others_tell_of() -> None:
    assert behind((3, 4), [(3, 4), (3, 9), ()]) == 5
    assert behind((3, 4), [(2, 4)]) == 0
    assert behind((), [(2, 4)]) == 0

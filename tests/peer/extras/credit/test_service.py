"""Credit on line: live peers tell each other what they know, and keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.history.manifest import rolled_back
from averaging.live.fragment import FragmentWork
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from peer.bridge.settings import default_name
from peer.extras.credit.accounting.tally import contributors, totals_of
from peer.extras.credit.reading import load_tally
from peer.extras.credit.service import Crediting
from peer.storage.outer_state import merged_of
from tests.averaging.live.quadratic import RUN, Peer, Swarm, swarm


async def credited(made: Swarm, peer: Peer, folder: Path, *, name: str = "") -> Crediting:
    """The tally of a live peer, and the calls by which others ask for it."""
    made_of = identity_of(peer.nick)
    folder = folder / peer.nick
    folder.mkdir(exist_ok=True)

    async def connect(other: PeerId, timeout_s: float) -> None: ...

    network = SimpleNamespace(
        host=peer.host,
        guarded=peer.host,
        presence=SimpleNamespace(connect=connect, clock=None),
        followers=lambda: list(peer.view),
    )
    seat = SimpleNamespace(identity=made_of, name=name or default_name(made_of.peer_id))
    here: Any = SimpleNamespace(
        network=network, seat=seat, me=made_of.peer_id, directory=folder, run_id=RUN
    )
    part = Crediting(here)
    await part.open(AsyncExitStack())
    return part


def keeping_tallies(
    tasks: asyncio.TaskGroup, peers: Sequence[Peer], parts: Sequence[Crediting]
) -> list[asyncio.Task[None]]:
    both = zip(peers, parts, strict=True)
    return [tasks.create_task(part.run(peer.averager)) for peer, part in both]


async def test_live_peers_and_a_keeper_have_one_tally_which_is_the_ledger(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        made = await stack.enter_async_context(swarm(MemoryNetwork()))
        peers = [await made.add(f"peer-{number}") for number in range(3)]
        peers.append(await made.add("keeper", trains=False))
        parts = [await credited(made, peer, tmp_path, name=peer.nick) for peer in peers]
        work = keeping_tallies(tasks, peers, parts)
        await made.live(75.0)
        for peer in peers[:3]:
            assert peer.learner is not None
            peer.learner.end()
        await made.live(100.0)

        tallies = [part.tally for part in parts]
        ledger = totals_of([merged_of(peers[0].averager.states)])
        assert [each.totals for each in tallies] == [ledger] * 4
        assert all(each.statements == tallies[0].statements for each in tallies)
        assert all(contributors(each) == contributors(tallies[0]) for each in tallies)
        names = {row.shown for row in contributors(tallies[3])}
        assert names == {"peer-0", "peer-1", "peer-2"}, "the keeper has merged nothing"
        for task in work:
            task.cancel()
        await asyncio.wait(work)

        await parts[3].save()
        assert load_tally(tmp_path / "keeper", RUN) == tallies[3]


async def test_work_that_the_owner_has_taken_back_is_credited_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fragment in the middle of a change goes back later than the others."""
    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(f"peer-{number}") for number in range(3)]
        await made.live(40.0)
        averager = peers[0].averager
        roots = [rolled_back(state, 7) for state in averager.states if state is not None]
        taken_to = sum(totals_of([merged_of(roots)]).values())
        await made.live(40.0)
        part = await credited(made, peers[0], tmp_path)
        part.look(averager)
        assert sum(part.tally.totals.values()) > taken_to

        applying = [averager._works[-1]]
        monkeypatch.setattr(FragmentWork, "_is_applying", property(lambda work: work in applying))
        back = averager.begin_again(roots, rollback=7, reason="rolled back")
        going = asyncio.create_task(back)
        await asyncio.sleep(0)
        part.look(averager)
        applying.clear()
        averager.changed()
        await going
        part.look(averager)
        assert sum(part.tally.totals.values()) <= taken_to

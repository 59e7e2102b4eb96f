"""Runs in whose history thousands of keys have merged work once, and left: each has a mark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.history import merged_map, parent_maps
from averaging.history.chain import Chain
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import POLICY, Swarm, layout_of, swarm

IN_GROUPS = replace(POLICY, group_size=2)


def grown(state: FragmentState, marks: int) -> FragmentState:
    """A state that also contains work of so many peers that are gone."""
    merged = MergedMap(
        {
            PeerId(f"12D3KooW{number:044}"): Mark(1_764_000_000 + number, 60_000, 2**33 + number)
            for number in range(marks)
        }
    )
    lineage = bound(state.history, merged.digest())
    chain = Chain([Link(0, lineage, merged.tokens)])
    return replace(state, merged=merged, lineage=lineage, chain=chain)


async def founded(made: Swarm, marks: int) -> None:
    made.first = [grown(state, marks) for state in made.first]
    for name in ("anna", "boris", "clara", "dora"):
        await made.add(name, policy=IN_GROUPS)


def all_run(made: Swarm) -> bool:
    return all(peer.task is not None and not peer.task.done() for peer in made.peers)


async def test_maps_that_do_not_fit_one_frame_travel_in_several() -> None:
    """The error of the encoder ended each averager, and again after each of its restarts."""
    async with swarm(MemoryNetwork()) as made:
        await founded(made, 18_000)
        await made.live(20.0)
        assert all_run(made)
        assert any(told["kind"] == "meld" for peer in made.peers for told in peer.told("round"))
        assert all(min(version or 0 for version in peer.versions()) >= 1 for peer in made.peers)


async def test_a_newcomer_takes_the_state_of_a_run_with_more_than_50_000_keys() -> None:
    async with swarm(MemoryNetwork(), layout=layout_of(1)) as made:
        made.first = [grown(state, 51_000) for state in made.first]
        await made.add("anna", trains=False)
        late = await made.add("clara", trains=False, knows_start=False)
        await made.until(lambda: None not in late.versions(), within_s=60.0)


async def test_maps_that_are_too_large_to_travel_void_their_round_and_end_no_averager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with swarm(MemoryNetwork()) as made:
        monkeypatch.setattr(parent_maps, "MAPS_MAX_BYTES", 5_000)
        await founded(made, 100)
        await made.live(30.0)
        assert all_run(made)
        failed = [told["reason"] for peer in made.peers for told in peer.told("upload_failed")]
        assert any("merged maps of" in reason for reason in failed)
        before = [peer.versions() for peer in made.peers]
        monkeypatch.undo()
        await made.live(60.0)
        assert [peer.versions() for peer in made.peers] != before


async def test_a_run_with_too_many_keys_takes_no_work_of_new_ones_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with swarm(MemoryNetwork()) as made:
        made.first = [grown(state, 100) for state in made.first]
        monkeypatch.setattr(merged_map, "KEYS_MAX", 103)
        for name in ("anna", "boris", "clara"):
            await made.add(name)
        await made.until(
            lambda: all(len(state.merged) == 103 for state in known(made)), within_s=120.0
        )
        before = made.peers[0].versions()
        late = await made.add("dora", knows_start=False)
        await made.until(lambda: None not in late.versions(), within_s=60.0)
        await made.live(60.0)
        assert all(len(state.merged) == 103 for state in known(made))
        reasons = {told["reason"] for peer in made.peers for told in peer.told("refused")}
        assert "the run has merged work of so many keys that it takes none of new ones" in reasons
        gained = [
            (now or 0) - (then or 0)
            for now, then in zip(made.peers[0].versions(), before, strict=True)
        ]
        assert min(gained) >= 3
        await made.until(lambda: late.versions() == made.peers[0].versions(), within_s=9.0)


def known(made: Swarm) -> list[FragmentState]:
    return [state for peer in made.peers for state in peer.averager.states if state is not None]

"""Downloading a run's parameters from sources that go on merging, on the in-memory network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState, Pieces
from averaging.live.states.fetch_server import FetchServer
from averaging.live.states.fetcher import Fetcher
from averaging.live.streams.threads import Threads
from averaging.messages import Link, Signatures
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import PeerId, RunId
from dht.memory.host import MemoryHost, MemoryNetwork
from dht.memory.network import Weather
from peer.errors import NotAdmitted
from peer.extras.export.download import fetch_fragments, sources_in
from peer.joining.visit import NotDownloaded, RunStatus, Silent
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from tests.averaging.live.links import introduce
from tests.peer.statuses import ME, a_status

RUN = RunId("download")
RUN_FILE = RunFile()
VALUES = 64
FRAGMENTS = 24
LAYOUT = Layout.build(
    [TensorSpec(f"{n}", (8, VALUES // 8)) for n in range(FRAGMENTS)], fragments=FRAGMENTS
)
MOMENTUM = Pieces.of(LAYOUT.fragments[0], RUN_FILE.outer.momentum).momentum
FOR_EVER = 1e9

CALM = Weather()
NEAR = Weather(latency_s=(0.0005, 0.001))


@dataclass(eq=False)
class Merging:
    """The states of a peer that makes a version of each fragment in every period."""

    period_s: float
    late_s: float = 0.0
    """Time after which it has what the others have made."""

    def version(self) -> int:
        return int((asyncio.get_running_loop().time() + 100.0 - self.late_s) / self.period_s)

    def state(self, fragment: int) -> FragmentState:
        version = self.version()
        theta = np.full(VALUES, version + fragment / FRAGMENTS, np.float32)
        founded = FragmentState.founded(bytes(32), fragment, theta, MOMENTUM)
        chain = Chain([Link(version, founded.lineage, version)])
        return replace(founded, version=version, chain=chain)

    def signatures(self, state: FragmentState) -> Signatures:
        return ()

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        return None


@asynccontextmanager
async def reading(
    *merging: Merging, weather: Weather = CALM
) -> AsyncIterator[tuple[Fetcher, list[PeerStatus], list[MemoryHost]]]:
    """A reader, and what the peers of a run say of themselves."""
    network, threads = MemoryNetwork(weather), Threads(1)
    me, hosts = network.host("me"), [network.host(f"peer {n}") for n in range(len(merging))]
    await introduce(me, *hosts)
    for host, library in zip(hosts, merging, strict=True):
        await FetchServer(host, run=RUN, library=library, threads=threads).start()
    fetcher = Fetcher(me, RUN, threads, parameters_alone=True)
    try:
        yield fetcher, [_status(h.peer_id, m) for h, m in zip(hosts, merging, strict=True)], hosts
    finally:
        for host in (me, *hosts):
            await host.close()
        threads.close()


def _status(peer: PeerId, merging: Merging) -> PeerStatus:
    return a_status(peer=peer, versions=(merging.version(),) * FRAGMENTS)


def _files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def check(states: Sequence[FragmentState]) -> None:
    assert [state.fragment for state in states] == list(range(FRAGMENTS))
    for state in states:
        assert (state.theta == np.float32(state.version + state.fragment / FRAGMENTS)).all()


async def test_many_small_fragments_of_two_learners_are_read_without_a_pause(
    tmp_path: Path,
) -> None:
    """A source keeps four states for readers; it lets go of those that their one reader has."""
    learners = Merging(FOR_EVER), Merging(FOR_EVER)
    async with reading(*learners, weather=NEAR) as (fetcher, sources, _):
        began = asyncio.get_running_loop().time()
        check(await fetch_fragments(fetcher, LAYOUT, sources, tmp_path, run=RUN_FILE))
        assert asyncio.get_running_loop().time() - began < 1.0


@pytest.mark.parametrize("late_s", [0.05, 0.25])
async def test_a_model_is_read_from_learners_that_merge_all_the_time(
    late_s: float, tmp_path: Path
) -> None:
    """One of them is always behind for a part of the time: then no two hold the same bits."""
    async with reading(Merging(0.5), Merging(0.5, late_s)) as (fetcher, sources, _):
        states = await fetch_fragments(fetcher, LAYOUT, sources, tmp_path, run=RUN_FILE)
        check(states)
        assert states[-1].version > states[0].version  # they went on meanwhile


async def test_fragments_that_have_arrived_are_kept_when_the_sources_are_gone(
    tmp_path: Path,
) -> None:
    async with reading(Merging(FOR_EVER)) as (fetcher, sources, (host,)):
        closing: list[asyncio.Future[None]] = []

        def close_at_half(share: float) -> None:
            if share >= 0.5 and not closing:
                closing.append(asyncio.ensure_future(host.close()))

        with pytest.raises(NotDownloaded, match="run the command again"):
            await fetch_fragments(
                fetcher, LAYOUT, sources, tmp_path, on_progress=close_at_half, run=RUN_FILE
            )
        kept = _files(tmp_path)
        assert FRAGMENTS // 2 <= kept < FRAGMENTS
    async with reading(Merging(FOR_EVER)) as (fetcher, sources, _):
        shares: list[float] = []
        check(
            await fetch_fragments(
                fetcher, LAYOUT, sources, tmp_path, on_progress=shares.append, run=RUN_FILE
            )
        )
        assert shares[kept - 1] == kept / FRAGMENTS  # each of those was told at once, and once


def test_a_run_that_has_no_state_yet_is_one_sentence() -> None:
    founding = a_status(versions=(), layout=LAYOUT.hash.hex())
    for seen, says in (
        (RunStatus("run", (founding,), {}), "1 peer answered, and none of them has its state yet"),
        (RunStatus("run", (a_status(layout="ab12"),), {}), r"have another layout \(ab12\)"),
        (RunStatus("run", (), {ME: Silent("anna", "learner", None, "it is away")}), "it is away"),
    ):
        with pytest.raises(NotDownloaded, match=says) as refused:
            sources_in(seen, LAYOUT, "small")
        assert "\n" not in str(refused.value)


def test_a_visitor_that_is_not_admitted_is_told_so_and_not_to_try_again() -> None:
    refusal = Silent("anna", "learner", None, "it is not listed", refuses=True)
    with pytest.raises(NotAdmitted, match=r"it is not listed$"):
        sources_in(RunStatus("run", (), {ME: refusal}), LAYOUT, "small")


def test_a_model_comes_from_the_founding_with_the_most_work() -> None:
    layout = LAYOUT.hash.hex()
    heavy = [a_status(founding="a", global_tokens=9, layout=layout) for _ in range(2)]
    light = a_status(founding="b", global_tokens=5, layout=layout)
    assert sources_in(RunStatus("run", (light, *heavy), {}), LAYOUT, "small") == heavy

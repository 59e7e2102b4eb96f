"""Rebase: the side of a fork that gives way offers again its work since the fork."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from averaging.history.adoption import Parting
from averaging.history.chain import Chain
from averaging.history.rewind import rewound, shared_version
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.rules.peer_view import PeerView
from dht.memory.host import MemoryNetwork
from tests.averaging.history.replayed_rounds import SIZES, lived
from tests.averaging.live.quadratic import (
    POLICY,
    Peer,
    QuadraticLearner,
    Swarm,
    check_tokens,
    swarm,
)


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_rewinding_rounds_restores_theta_except_for_rounding(codec: str, rounds: int) -> None:
    first, last, log = lived(rounds, codec)
    entries = log.since(first.version, first.lineage)
    assert entries is not None
    before = last.momentum.copy()

    found = rewound(last, entries, SIZES, Scratch())

    assert found is not None
    moved = np.abs(last.theta - first.theta).max()
    assert np.abs(found - first.theta).max() < 1e-4 * moved
    assert np.array_equal(last.momentum, before), "the state is only read"


def test_a_result_that_would_be_mostly_rounding_is_withheld() -> None:
    first, last, log = lived(20)
    entries = log.since(first.version, first.lineage)
    assert entries is not None

    assert rewound(last, entries, SIZES, Scratch()) is None
    assert rewound(last, entries[-14:], SIZES, Scratch()) is not None


def chain(*names: str) -> Chain:
    return Chain(
        Link(index, name.encode().ljust(32), 100 * index) for index, name in enumerate(names)
    )


def test_the_parting_is_the_last_common_version_if_it_is_recent() -> None:
    mine = chain("start", "one", "left two", "left three")
    theirs = chain("start", "one", *(f"right {index}" for index in range(8)))

    shared = shared_version(mine, theirs, versions_max=8)

    assert shared is not None and shared.version == 1
    assert shared_version(mine, theirs, versions_max=7) is None, "eight versions ago is too long"
    assert shared_version(chain("another start"), theirs, versions_max=8) is None


SLOW_S = 4.0


async def apart_and_together(
    made: Swarm, network: MemoryNetwork, *, stale_max: int = POLICY.stale_max
) -> list[Peer]:
    """Run three fast peers and two slow ones together, apart, and together again."""
    policy = replace(POLICY, stale_max=stale_max)
    quick = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
    slow = [await made.add(name, policy=policy, step_time_s=SLOW_S) for name in ("emil", "fanny")]
    await made.live(30.0)
    network.partition([[peer.id for peer in side] for side in (quick, slow)])
    for side, others in ((quick, slow), (slow, quick)):
        for peer in side:
            for other in others:
                del peer.view[other.id]
    await made.live(30.0)
    made.check()
    network.heal()
    now = asyncio.get_running_loop().time()
    for side, others in ((quick, slow), (slow, quick)):
        for peer in side:
            for other in others:
                peer.view[other.id] = PeerView(
                    first_seen=now - 100.0,
                    heard_at=now,
                    step_time_s=SLOW_S if other in slow else 1.0,
                )
                await peer.host.connect(other.id, await other.host.addresses(), timeout_s=10.0)
    await made.live(60.0)
    made.check()
    return slow


def rebases(peers: list[Peer]) -> list[Mapping[str, Any]]:
    return [fields for peer in peers for fields in peer.told("state_adopted") if fields["rebased"]]


def watch_rebases(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return by how much each learner's displacement since the fork changes by the rebase."""
    thetas: dict[tuple[int, int], Float32s] = {}
    off: list[float] = []
    adopt, rebase = QuadraticLearner.adopt, QuadraticLearner.rebase

    def remember(
        self: QuadraticLearner, fragment: int, state: FragmentState, *, contained: int | None
    ) -> None:
        if self.step_time_s == SLOW_S:
            thetas[fragment, state.version] = state.theta.copy()
        adopt(self, fragment, state, contained=contained)

    def compare(
        self: QuadraticLearner, fragment: int, state: FragmentState, parted: Parting
    ) -> int | None:
        origin = thetas[fragment, parted.version]
        before = self.parameters(fragment) - origin
        again = rebase(self, fragment, state, parted)
        off.append(float(np.abs(self.parameters(fragment) - state.theta - before).max()))
        return again

    monkeypatch.setattr(QuadraticLearner, "adopt", remember)
    monkeypatch.setattr(QuadraticLearner, "rebase", compare)
    return off


async def test_a_light_side_that_parted_lately_offers_all_its_work_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learners of that side end as if they had trained alone since the fork."""
    off = watch_rebases(monkeypatch)

    network = MemoryNetwork()
    async with swarm(network) as made:
        slow = await apart_and_together(made, network)
        found = rebases(slow)
        assert found and all(fields["parted_at"] is not None for fields in found), found
        assert sum(f["tokens"] for peer in slow for f in peer.told("regained")) > 0
        assert len(off) == len(found) and max(off) < 1e-4
        for peer in slow:
            assert not peer.told("written_off")
            assert peer.learner is not None
            for fragment in range(len(made.layout.fragments)):
                assert peer.learner.discarded(fragment) == 0
        check_tokens(made.peers)


async def test_a_light_side_that_parted_long_ago_writes_off_its_merged_work() -> None:
    """The work of that side is too old by the versions of the other one."""
    network = MemoryNetwork()
    async with swarm(network) as made:
        slow = await apart_and_together(made, network, stale_max=1)
        found = rebases(slow)
        assert found and all(fields["parted_at"] is None for fields in found), found
        assert any(peer.told("written_off") for peer in slow)
        check_tokens(made.peers)

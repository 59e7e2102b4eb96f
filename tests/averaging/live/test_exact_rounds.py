"""Whole rounds among eight peers, quorum all and f32: the bits of one central syncer (promise 1).

``test_exactness`` puts the numbers together by hand; here averagers on the in-memory network do it,
with everything that a round is: joins, rosters, slices, streams, seals.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.numbers.arrays import Float32s
from averaging.rules.due import DuePolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from tests.averaging.live import quadratic
from tests.averaging.live.quadratic import POLICY, QuadraticLearner, swarm
from tests.averaging.numbers import reference
from tests.averaging.numbers.exact_work import ETA, LAYOUT, MEMBERS, MU, ROUNDS, trained, work

EXACT = replace(
    POLICY,
    due=DuePolicy(cycle_steps=2, fragments=1),
    quorum=QuorumPolicy(required="all", wait_s=20.0),
    codec="f32",
    eta=ETA,
    mu=MU,
    slice_bytes_min=8192,
)


class CycleLearner(QuadraticLearner):
    """Does one cycle from each version, as the central algorithm has it, and waits for the next."""

    def __init__(self, *args: object, seed: int, **facts: object) -> None:
        super().__init__(*args, seed=seed, **facts)  # type: ignore[arg-type]
        self.member = seed - 1
        self.merged: list[FragmentState] = []
        self.is_ready = False

    async def train(self) -> None:
        await asyncio.Event().wait()

    @property
    def state(self) -> tuple[Float32s, int, bytes]:
        own = self.parts[0].own
        return own.base, own.base_version, own.base_lineage

    def progress(self) -> Progress:
        return Progress(
            step=2 * self.state[1] + self.is_ready,
            tokens=0,
            step_time_s=1.0,
            batch_tokens_max=1 << 20,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        theta, version, lineage = self.state
        done = work(version)[self.member]
        return Snapshot(
            base=theta,
            values=trained(theta, self.member, version),
            base_version=version,
            base_lineage=lineage,
            mark=version + 1,
            steps=done.steps,
            tokens=done.tokens,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        assert contained == state.version == self.state[1] + 1
        own = self.parts[0].own
        # Averaging steps on its momentum in place.
        self.merged.append(replace(state, momentum=state.momentum.copy()))
        own.base, own.base_version, own.base_lineage = state.theta, state.version, state.lineage


@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.slow)])
async def test_rounds_of_eight_peers_have_the_bits_of_the_central_syncer(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(quadratic, "QuadraticLearner", CycleLearner)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = [await made.add(f"member {i}", policy=EXACT) for i in range(MEMBERS)]
        learners = [peer.learner for peer in peers]
        place = {peer.id: index for index, peer in enumerate(peers)}
        await made.live(1.0)  # everybody begins before anybody is due
        for learner in learners:
            assert isinstance(learner, CycleLearner)
            learner.is_ready = True
        while min(peer.averager.stats.rounds for peer in peers) < rounds:
            assert asyncio.get_running_loop().time() < 10.0 * rounds, "a round did not come about"
            await made.live(5.0)
        rosters = {
            told["version"]: [place[peer] for peer in told["contributors"]]
            for told in peers[0].told("round")
            if told["contributors"]
        }
        syncer = reference.Syncer(made.first[0].theta, eta=ETA, mu=MU)
        for version in range(1, rounds + 1):
            done = work(version - 1)
            assert sorted(rosters[version]) == list(range(MEMBERS))
            syncer.merge(
                [
                    reference.Work(
                        trained(syncer.theta, member, version - 1),
                        done[member].tokens,
                        done[member].steps,
                    )
                    for member in rosters[version]
                ]
            )
            for learner in learners:
                assert isinstance(learner, CycleLearner)
                state = learner.merged[version - 1]
                assert np.array_equal(state.theta, syncer.theta), f"version {version}"
                assert np.array_equal(state.momentum, syncer.momentum), f"version {version}"
        orders = {tuple(order) for order in rosters.values()}
        assert len(orders) > rounds / 2, "the roster's order, and with it the sum's, goes round"

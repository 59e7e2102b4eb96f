"""A learner whose side of a fork gives way offers its work since the parting again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from averaging.history.adoption import Parting
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from peer.agent.account import Account
from peer.agent.slots import SlotPort
from peer.rules.ledger import APART
from tests.peer.trainer.learner_pair import INCARNATION, ME, Pair, moved


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param


def mine(step: int, tokens: int) -> MergedMap:
    return MergedMap({ME: Mark(INCARNATION, step, tokens)})


class Fork:
    """Version 1 is common, 2 and 3 are on this peer's side, each with work of it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.states: list[FragmentState] = []

    async def live(self) -> None:
        pair = self.pair
        state = (await pair.found())[0]
        for by in (1.0, 0.5, 0.25):
            snapshot = await pair.offer(0, amount=0.25)
            before = state.merged[ME].tokens if ME in state.merged else 0
            merged = mine(snapshot.mark, before + snapshot.tokens)
            state = moved(state, by, merged)
            pair.port.adopt(0, state, contained=snapshot.mark)
            pair.idle()
            self.states.append(state)
        pair.train(0.125)

    @property
    def common(self) -> FragmentState:
        return self.states[0]

    def heavier(self) -> FragmentState:
        """The other side, which has the work of this peer that was merged in version 1."""
        state = self.common
        for _ in range(4):
            state = moved(state, -0.75)
        return state

    def parting(self) -> Parting:
        return Parting(
            version=self.common.version,
            theta=self.common.theta,
            merged_mark=self.common.merged[ME].step,
            given_up_mark=self.states[-1].merged[ME].step,
        )


async def test_the_displacement_since_the_parting_is_offered_again_with_its_steps(
    dtype: torch.dtype,
) -> None:
    pair = Pair(dtype=dtype)
    fork = Fork(pair)
    await fork.live()
    own = pair.now(0) - fork.common.theta
    heavier = fork.heavier()

    again = pair.port.rebase(0, heavier, fork.parting())
    pair.idle()
    pair.idle()

    merged = fork.common.merged[ME], fork.states[-1].merged[ME]
    assert again == merged[1].tokens - merged[0].tokens
    coarse = dtype is torch.bfloat16
    assert np.allclose(pair.now(0) - heavier.theta, own, atol=0.05 if coarse else 1e-5)
    snapshot = await pair.offer(0)
    assert np.allclose(snapshot.values - snapshot.base, own, atol=0.05 if coarse else 1e-5)
    assert snapshot.base_version == heavier.version
    assert snapshot.steps == snapshot.mark - merged[0].step
    assert snapshot.tokens == pair.memory.tokens - merged[0].tokens


async def test_the_ledger_calls_it_pending_again_and_adds_up() -> None:
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    sizes = [fragment.size for fragment in pair.layout.fragments]
    account = Account(ME, pair.memory, sizes, pair.port.tokens_at)
    account.update([fork.states[-1]])
    pending = account.ledger.fate(0).pending

    again = pair.port.rebase(0, fork.heavier(), fork.parting())
    account.update([fork.heavier()])  # the trainer has not taken it in yet
    assert account.ledger.fate(0).discarded == {APART: again}
    pair.idle()
    pair.idle()
    fate = account.update([fork.heavier()])

    assert again is not None
    assert account.ledger.fate(0).discarded == {}
    assert account.ledger.fate(0).pending == pending + again + 20
    assert fate.imbalance == 0 and fate.excess == 0


async def test_a_trainer_that_took_in_nothing_since_the_parting_keeps_its_displacement() -> None:
    pair = Pair()
    (state, _) = await pair.found()
    pair.train(0.25)
    own = pair.now(0) - state.theta
    parting = Parting(version=0, theta=state.theta + 1000.0, merged_mark=0, given_up_mark=0)

    heavier = moved(state, 3.0)
    assert pair.port.rebase(0, heavier, parting) == 0
    pair.idle()

    assert np.allclose(pair.now(0) - heavier.theta, own, atol=1e-5)


async def test_work_that_was_given_up_since_does_not_come_back() -> None:
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    await pair.offer(0)
    stale = moved(fork.states[-1], 1.0)
    pair.port.discard(0, stale, reason="stale")
    pair.idle()

    assert pair.port.rebase(0, fork.heavier(), fork.parting()) is None


async def test_a_forgotten_mark_cannot_be_returned_to() -> None:
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    parting = fork.parting()
    unknown = Parting(
        version=parting.version,
        theta=parting.theta,
        merged_mark=parting.merged_mark - 1 or 999,
        given_up_mark=parting.given_up_mark,
    )

    assert pair.port.rebase(0, fork.heavier(), unknown) is None


async def test_work_that_was_given_up_at_the_parting_itself_does_not_come_back() -> None:
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    await pair.offer(0)
    stale = moved(fork.states[-1], 1.0)
    pair.port.discard(0, stale, reason="stale")
    pair.idle()
    given_up = pair.memory.base(0)
    assert given_up is not None and given_up.tokens > stale.merged[ME].tokens
    after, other = moved(stale, 0.5), moved(moved(stale, -0.5), -0.5)
    pair.port.adopt(0, after, contained=None)
    pair.idle()
    pair.train(0.125)

    mark = stale.merged[ME].step
    parting = Parting(stale.version, stale.theta, merged_mark=mark, given_up_mark=mark)
    assert pair.port.rebase(0, other, parting) == 0
    pair.idle()
    pair.idle()
    snapshot = await pair.offer(0)
    assert snapshot.tokens == pair.memory.tokens - given_up.tokens


def elsewhere(state: FragmentState, by: float, merged: MergedMap | None = None) -> FragmentState:
    """The next version on another side of a fork."""
    version, lineage = state.version + 1, bytes([100 + state.version]) * 32
    chain = state.chain.extended(Link(version, lineage, 0))
    return replace(moved(state, by, merged), lineage=lineage, chain=chain)


async def test_work_of_a_side_that_was_left_without_its_parting_does_not_come_back() -> None:
    """It was written off. The fork after that one made it pending again."""
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    taken = elsewhere(fork.common, 3.0)
    pair.port.adopt(0, taken, contained=None)
    pair.idle()
    written_off = pair.memory.base(0)
    assert written_off is not None and written_off.tokens > taken.merged[ME].tokens
    snapshot = await pair.offer(0, amount=0.25)
    merged = mine(snapshot.mark, taken.merged[ME].tokens + snapshot.tokens)
    pair.port.adopt(0, elsewhere(taken, 0.5, merged), contained=snapshot.mark)
    pair.idle()

    marks = taken.merged[ME].step, snapshot.mark
    parting = Parting(taken.version, taken.theta, merged_mark=marks[0], given_up_mark=marks[1])
    assert pair.port.rebase(0, moved(taken, -0.5), parting) == snapshot.tokens
    pair.idle()
    pair.idle()
    offer = await pair.offer(0)
    assert offer.tokens == pair.memory.tokens - written_off.tokens


async def test_a_trainer_that_has_yet_to_take_a_side_has_no_displacement_there() -> None:
    pair = Pair()
    fork = Fork(pair)
    await fork.live()
    waiting = asyncio.ensure_future(pair.port.snapshot(0, timeout_s=5))
    await asyncio.sleep(0)
    taken = elsewhere(fork.common, 3.0)
    pair.port.adopt(0, taken, contained=None)

    mark = taken.merged[ME].step
    parting = Parting(taken.version, taken.theta, merged_mark=mark, given_up_mark=mark)
    assert pair.port.rebase(0, moved(taken, -0.5), parting) is None
    waiting.cancel()


async def test_work_that_was_given_up_before_the_agent_died_does_not_come_back() -> None:
    """The agent after it knew nothing of that, and the fork after it made the work pending."""
    pair = Pair()
    (state, _) = await pair.found()
    await pair.offer(0, amount=0.25)
    given_up = moved(state, 1.0)
    pair.port.discard(0, given_up, reason="stale")
    pair.idle()
    pair.port = SlotPort(pair.memory, ME, pair.adopted.append)
    pair.port.resume(0, given_up.theta)
    pair.port.adopt_first(0, given_up)
    snapshot = await pair.offer(0, amount=0.25)
    pair.port.adopt(
        0, moved(given_up, 0.5, mine(snapshot.mark, snapshot.tokens)), contained=snapshot.mark
    )
    pair.idle()

    parting = Parting(given_up.version, given_up.theta, merged_mark=0, given_up_mark=snapshot.mark)
    assert pair.port.rebase(0, elsewhere(given_up, -0.5), parting) == snapshot.tokens

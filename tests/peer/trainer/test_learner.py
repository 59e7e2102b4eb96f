"""The trainer's and the agent's side of the shared memory, together, in one thread."""

from __future__ import annotations

import asyncio
import gc
import math
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from averaging.history.state import FragmentState
from averaging.live.learner_port import Snapshot
from averaging.messages import Link
from averaging.numbers.layout import Layout
from peer.agent.slots import Adopted
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors, SlotState
from peer.description import Described
from peer.errors import ModelMismatch, Unusable
from peer.run_file.reading import parse
from peer.trainer.device_copies import STEPS_MAX, adopt_values
from peer.trainer.learner import Learner
from peer.trainer.parameters import (
    check_layout,
    check_statistics,
    frozen_parameters,
    model_layout,
    specs_of,
    statistics_of,
    trained_parameters,
)
from tests.peer.trainer.custom_run import toml
from tests.peer.trainer.learner_pair import (
    ME,
    Pair,
    merged_to,
    moved,
    successor,
    taken_beyond_the_checkpoint,
)


def test_a_model_with_complex_parameters_is_refused() -> None:
    """They were taken for counters, and replaced by the whole numbers next to their real parts."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'1\.weight' is complex64; only .*float32"):
        model_layout(model, 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param


async def test_an_offer_holds_the_parameters_as_of_its_mark(dtype: torch.dtype) -> None:
    pair = Pair(dtype=dtype)
    await pair.found()
    pair.idle()
    snapshot = await pair.offer(0, amount=0.25)
    values = pair.now(0)
    pair.train(0.5)

    assert np.array_equal(snapshot.values, values)
    assert (snapshot.mark, snapshot.steps, snapshot.tokens) == (2, 2, 20)
    assert snapshot.base_version == 0


async def test_carry_keeps_the_steps_made_while_the_merge_was_under_way() -> None:
    pair = Pair()
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    taken = snapshot.values.copy()
    pair.train(0.5)  # meanwhile
    own = pair.now(0) - taken
    after = moved(states[0], 1.0)
    pair.port.adopt(0, after, contained=snapshot.mark)
    pair.idle()

    assert np.allclose(pair.now(0), after.theta + own, atol=1e-6)
    base = pair.memory.base(0)
    assert base is not None
    assert (base.version, base.mark, base.tokens) == (1, 1, 10)
    assert pair.adopted[-1] == Adopted(0, 1, 0, "")
    assert pair.memory.state(0) is SlotState.FREE


def test_slots_that_are_emptied_carry_the_same_bits(dtype: torch.dtype) -> None:
    async def story(*, empties: bool) -> list[np.ndarray]:
        pair = Pair(dtype=dtype, empties=empties)
        empty, emptied = pair.memory.empty, Counter[int]()

        def count(fragment: int) -> None:
            emptied.update([fragment])
            empty(fragment)

        pair.memory.empty = count
        states = await pair.found()
        for amount in (0.25, 0.5):
            await pair.offer(0, amount=amount)
            pair.port.release(0)
            pair.idle()
        offered = await pair.offer(1, amount=0.125)
        pair.port.adopt(1, moved(states[1], 1.0), contained=offered.mark)
        pair.idle()
        pair.port.adopt(0, moved(states[0], 2.0), contained=None)
        pair.idle()
        pair.idle()
        again = await pair.offer(0)
        # At first, and after each use.
        assert emptied == (Counter({0: 5, 1: 3}) if empties else Counter())
        return [again.values.copy(), *(pair.now(fragment) for fragment in range(2))]

    plain, with_empty = (asyncio.run(story(empties=empties)) for empties in (False, True))
    assert all(np.array_equal(*each) for each in zip(plain, with_empty, strict=True))


async def test_unmerged_work_is_offered_again_whole() -> None:
    pair = Pair()
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    own = snapshot.values - snapshot.base
    after = moved(states[0], 1.0)
    pair.port.adopt(0, after, contained=None)
    pair.idle()
    again = await pair.offer(0)

    assert np.allclose(again.values - again.base, own, atol=1e-6)
    assert again.base is after.theta
    assert (again.steps, again.tokens) == (3, 30)


async def test_an_adoption_without_an_offer_adds_the_runs_progress() -> None:
    pair = Pair()
    states = await pair.found()
    pair.train(0.25)
    before = pair.now(1)
    after = moved(moved(states[1], 1.0), 1.0)
    pair.port.adopt(1, after, contained=None)
    pair.idle()

    assert np.allclose(pair.now(1), before + 2.0, atol=1e-6)


async def test_work_that_is_too_old_is_given_up_and_counted() -> None:
    pair = Pair()
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    after = moved(states[0], 1.0)
    pair.port.discard(0, after, reason="stale")
    pair.idle()

    assert np.array_equal(pair.now(0), after.theta)
    assert pair.adopted[-1] == Adopted(0, 1, 20, "stale")
    assert snapshot.tokens == 10
    pair.idle()
    again = await pair.offer(0)
    assert np.array_equal(again.values, again.base)


@pytest.mark.parametrize("coarse", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
async def test_a_coarse_learner_that_does_not_learn_contributes_exactly_nothing(
    coarse: torch.dtype,
) -> None:
    """Otherwise every round would drag theta back to this learner's grid."""
    pair = Pair(dtype=coarse)
    states = await pair.found()
    state = states[0]
    rng = np.random.default_rng(5)
    for turn in range(30):
        snapshot = await pair.offer(0)
        assert np.array_equal(snapshot.values, snapshot.base), f"turn {turn}"
        # Far finer than the learner's grid, and not on it.
        state = moved(state, float(rng.normal()) * 1e-4)
        contained = snapshot.mark if turn % 3 else None
        pair.port.adopt(0, state, contained=contained)
        pair.idle()
    assert not np.array_equal(pair.now(0), state.theta)  # it did round
    ulp = np.spacing(np.abs(state.theta).astype(np.float16)).astype(np.float32) * 8
    assert np.all(np.abs(pair.now(0) - state.theta) <= 30 * ulp + 1e-6)


async def test_a_coarse_learner_contributes_its_own_steps() -> None:
    pair = Pair(dtype=torch.bfloat16)
    states = await pair.found()
    first = await pair.offer(0, amount=0.0)
    pair.train(0.5)
    grown = pair.now(0) - first.values
    pair.port.adopt(0, moved(states[0], 1.0 / 3), contained=first.mark)
    pair.idle()
    second = await pair.offer(0)

    assert np.array_equal(second.values - second.base, grown)


async def test_an_offer_without_a_waiting_caller_is_dropped() -> None:
    pair = Pair()
    states = await pair.found()
    assert await pair.port.snapshot(0, timeout_s=0.001) is None
    pair.train(0.25)
    pair.port.rang()
    assert pair.memory.state(0) is SlotState.FREE
    pair.port.adopt(0, moved(states[0], 1.0), contained=None)
    pair.idle()
    assert pair.memory.base(0).version == 1  # type: ignore[union-attr]


async def test_a_second_version_waits_until_the_first_was_adopted() -> None:
    pair = Pair()
    states = await pair.found()
    before = pair.now(0)
    one = moved(states[0], 1.0)
    pair.port.adopt(0, one, contained=None)
    pair.port.adopt(0, moved(one, 1.0), contained=None)
    assert pair.memory.order(0).version == 1
    pair.idle()
    assert pair.memory.order(0).version == 2
    pair.idle()

    assert np.allclose(pair.now(0), before + 2.0, atol=1e-6)
    assert [adopted.version for adopted in pair.adopted if adopted.fragment == 0] == [0, 1, 2]


def test_frozen_and_tied_parameters_are_exchanged_never_and_once() -> None:
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(8, 3)
    model.head = torch.nn.Linear(3, 8, bias=False)
    model.head.weight = model.embedding.weight
    model.frozen = torch.nn.Linear(2, 2)
    model.frozen.requires_grad_(False)

    assert list(trained_parameters(model)) == ["embedding.weight"]
    model.embedding.weight.requires_grad_(False)
    with pytest.raises(Unusable):
        trained_parameters(model)


def test_another_model_is_refused_with_both_hashes() -> None:
    pair = Pair()
    other = toml().replace('"custom"\n[data]', f'"custom"\nlayout_hash = "{"0" * 64}"\n[data]')
    with pytest.raises(ModelMismatch) as refused:
        check_layout(pair.layout, parse(other))
    assert refused.value.ours == pair.layout.hash.hex()
    assert refused.value.theirs == "0" * 64


def test_frozen_parameters_are_described_by_their_values_and_dtype() -> None:
    def described(fill: float, dtype: torch.dtype = torch.float32) -> tuple[Described, ...] | None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        model[0].requires_grad_(False)
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.fill_(fill)
        return frozen_parameters(model.to(dtype))

    first = described(0.5)
    assert first is not None
    assert [(each.name, each.shape) for each in first] == [("0.weight", (2, 3)), ("0.bias", (2,))]
    assert first == described(0.5)
    for other in (described(0.25), described(0.5, torch.bfloat16)):
        assert other is not None
        assert all(a.digest != b.digest for a, b in zip(first, other, strict=True))


async def test_parameters_that_are_not_contiguous_are_changed_too() -> None:
    pair = Pair()
    weight = pair.parameters["0.weight"]
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    states = await pair.found()
    before = [pair.now(0), pair.now(1)]
    for fragment in range(2):
        pair.port.adopt(fragment, moved(states[fragment], 1.0), contained=None)
    pair.idle()
    for fragment in range(2):
        assert np.allclose(pair.now(fragment), before[fragment] + 1.0, atol=1e-6)


async def test_a_fragment_that_is_not_finite_is_not_offered_and_can_be_overwritten() -> None:
    pair = Pair()
    told: list[int] = []
    pair.port.on_not_finite = told.append
    states = await pair.found()

    async def ask() -> Snapshot | None:
        waiting = asyncio.ensure_future(pair.port.snapshot(0, timeout_s=5))
        await asyncio.sleep(0)
        pair.idle()
        return await waiting

    assert await ask() is not None
    assert not pair.port.overwrite(0, states[0], reason="not finite"), "a round uses it"
    pair.port.release(0)
    name = pair.layout.fragments[0].units[-1].tensor
    with torch.no_grad():
        pair.parameters[name].view(-1)[-1] = float("nan")
    assert await ask() is None and await ask() is None
    assert told == [0], "once"
    assert pair.port.overwrite(0, states[0], reason="not finite")
    pair.idle()
    assert np.array_equal(pair.now(0), states[0].theta)
    assert pair.learner.overwritten == {0}
    assert (pair.adopted[-1].reason, pair.adopted[-1].lost_tokens) == ("not finite", 40)
    assert await ask() is not None


def with_statistics(dtype: torch.dtype) -> Pair:
    return Pair(dtype=dtype, norm=torch.nn.BatchNorm1d(4), buffers="mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("is_contained", [True, False])
async def test_statistics_are_set_to_the_merged_ones_and_no_token_is_lost(
    dtype: torch.dtype, is_contained: bool
) -> None:
    pair = with_statistics(dtype)
    norm = pair.model[2]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    assert norm.running_var is not None and norm.num_batches_tracked is not None
    states = await pair.found()
    norm.running_var.fill_(0.5)
    norm.num_batches_tracked.fill_(7)
    snapshot = await pair.offer(2)
    assert snapshot.values[-1] == 7.0, "a counter is exchanged as a number"
    norm.running_var.fill_(0.01)  # meanwhile; added to a difference it would be below zero
    after = moved(states[2], 0.0)
    after.theta[:] = 0.25
    after.theta[-1] = 6.5
    pair.port.adopt(2, after, contained=snapshot.mark if is_contained else None)
    pair.idle()
    assert norm.running_var.tolist() == [0.25] * 4
    assert norm.num_batches_tracked.item() == 6
    assert [(a.fragment, a.version, a.lost_tokens) for a in pair.adopted[-1:]] == [(2, 1, 0)]
    again = await pair.offer(2)
    assert again.base[-1] == 6.5 and again.tokens == (20 if is_contained else 30)


async def test_statistics_that_are_not_finite_recover_with_the_next_version() -> None:
    pair = with_statistics(torch.float32)
    states = await pair.found()
    norm = pair.model[2]
    assert isinstance(norm, torch.nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean.fill_(math.nan)
    pair.port.adopt(2, moved(states[2], 1.0), contained=None)
    pair.idle()
    assert norm.running_mean.tolist() == [1.0] * 4


def test_the_merged_buffers_are_those_that_have_a_mean() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    model.register_buffer("indices", torch.arange(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    expected = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(statistics_of(model, "mean")) == expected
    assert not statistics_of(model, "own")
    assert [f.has_statistics for f in model_layout(model, 2, buffers="mean").fragments][-1]
    model.register_buffer("bias", torch.full((2,), -math.inf))
    with pytest.raises(Unusable, match="'bias' has values that are not finite"):
        check_statistics(statistics_of(model, "mean"))


def test_adoption_follows_its_formulas_in_both_precisions() -> None:
    now, given = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.25, 0.5, -1.0])
    for coarse in (False, True):
        for operation, expected in (
            (Adoption.ADD, now + given),
            (Adoption.SET, given),
            (Adoption.PUT, given),
        ):
            values = now.clone()
            order = AdoptionOrder(operation, 1, b"x" * 32, None, 0)
            told = adopt_values(values, given.clone(), order, coarse=coarse)
            assert torch.equal(values, expected)
            assert (told is None) is not coarse
            if told is not None and operation is Adoption.ADD:
                assert torch.equal(told, given)
            if told is not None and operation is not Adoption.ADD:
                assert torch.equal(told, given)


def test_exchanging_allocates_no_second_copy_of_a_large_fragment() -> None:
    model = torch.nn.Linear(1024, 4096, bias=False)
    parameters = trained_parameters(model)
    layout = Layout.build(specs_of(parameters), 1)
    memory = SharedTensors.create([layout.size], layout=layout.hash, incarnation=1, coarse=False)
    learner = Learner(memory, layout, parameters, ring=lambda: None, budget_s=math.inf)
    memory.pass_on(0, SlotState.WANTED)
    gc.collect()
    tracemalloc.start()
    learner.step(1)
    np.subtract(np.float32(1), memory.slot(0), out=memory.slot(0))
    memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, 1, 1))
    learner.step(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert memory.state(0) is SlotState.FREE
    assert torch.allclose(model.weight, torch.ones(()), atol=1e-6)
    assert peak < layout.size  # bytes: a quarter of one copy, and numpy's share of it at that


class Watch:
    """A clock that advances by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def large_pair(
    pieces: int, *, budget_s: float, clock: Watch | None = None
) -> tuple[Learner, SharedTensors, torch.nn.Linear]:
    """One fragment of ``pieces`` pieces, each of which takes a millisecond to copy."""
    model = torch.nn.Linear(1024, 1024 * pieces, bias=False)
    torch.nn.init.zeros_(model.weight)
    parameters = trained_parameters(model)
    layout = Layout.build(specs_of(parameters), 1)
    assert len(layout.fragments[0].units) == pieces
    memory = SharedTensors.create([layout.size], layout=layout.hash, incarnation=1, coarse=False)
    learner = Learner(
        memory, layout, parameters, ring=lambda: None, clock=clock or Watch(), budget_s=budget_s
    )
    return learner, memory, model


def test_a_large_fragment_is_offered_over_several_safe_points_as_of_the_first() -> None:
    learner, memory, model = large_pair(6, budget_s=0.003)
    memory.pass_on(0, SlotState.WANTED)
    steps = 0
    while memory.state(0) is SlotState.WANTED:
        steps += 1
        model.weight.data.fill_(float(steps))
        learner.step(10)
    assert 1 < steps <= 4
    # Every piece is as of some step that its mark is not beyond.
    assert memory.offered(0) == (1, 10)
    assert set(np.unique(memory.slot(0))) == set(range(1, steps + 1))


def test_a_large_version_is_added_over_several_safe_points_and_no_step_is_lost() -> None:
    learner, memory, model = large_pair(6, budget_s=0.003)
    memory.slot(0)[:] = 100.0
    memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
    steps = 0
    while memory.state(0) is SlotState.ADOPT:
        steps += 1
        model.weight.data.add_(1.0)
        learner.step(10)
    assert 1 < steps <= 4
    assert torch.equal(model.weight, torch.full_like(model.weight, 100.0 + steps))


def test_a_fragment_takes_no_more_than_a_few_safe_points_however_slow_the_copies_are() -> None:
    learner, memory, _ = large_pair(2 * STEPS_MAX, budget_s=0.0)
    memory.pass_on(0, SlotState.WANTED)
    for _ in range(STEPS_MAX - 1):
        learner.step(1)
        assert memory.state(0) is SlotState.WANTED
    learner.step(1)
    assert memory.state(0) is SlotState.OFFERED


def test_a_small_fragment_takes_one_safe_point_on_a_machine_too_busy_to_copy_it_in_time() -> None:
    """Else it came after the quorum's deadline where steps took ten seconds."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))
    parameters = trained_parameters(model)
    layout = Layout.build(specs_of(parameters), 1)
    memory = SharedTensors.create([layout.size], layout=layout.hash, incarnation=1, coarse=False)
    learner = Learner(memory, layout, parameters, ring=lambda: None, budget_s=0.0)
    memory.pass_on(0, SlotState.WANTED)
    learner.step(1)
    assert memory.state(0) is SlotState.OFFERED


def test_while_parameters_must_stay_the_learner_offers_and_adopts_nothing() -> None:
    """A snapshot would miss the round whose roster is open while the held-out loss is measured."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    parameters = trained_parameters(model)
    layout = Layout.build(specs_of(parameters), 2)
    memory = SharedTensors.create(
        [each.size for each in layout.fragments], layout=layout.hash, incarnation=1, coarse=False
    )
    rang: list[int] = []
    learner = Learner(memory, layout, parameters, ring=lambda: rang.append(1))
    learner.step(10)
    before = [values.detach().clone() for values in parameters.values()]
    memory.slot(0)[:] = 100.0
    memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
    memory.pass_on(1, SlotState.WANTED)
    learner.exchange(adopts=False)
    assert memory.state(1) is SlotState.OFFERED and rang
    assert memory.offered(1) == (1, 10)
    assert all(map(torch.equal, parameters.values(), before))
    learner.exchange()
    assert memory.state(0) is SlotState.FREE
    assert not all(map(torch.equal, parameters.values(), before))


def test_where_steps_are_slow_a_copy_takes_one_safe_point() -> None:
    """Spread over seconds, an offer would miss its round, and a version would come late."""
    watch = Watch()
    learner, memory, model = large_pair(6, budget_s=0.003, clock=watch)

    def step() -> None:
        watch.now += 1.0
        learner.step(1)

    step()
    step()
    memory.pass_on(0, SlotState.WANTED)
    step()
    assert memory.state(0) is SlotState.OFFERED
    memory.slot(0)[:] = 100.0
    memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
    step()
    assert memory.state(0) is SlotState.FREE
    assert bool((model.weight == 100.0).all())


def test_an_adoption_that_overwrites_steps_takes_one_safe_point() -> None:
    learner, memory, model = large_pair(6, budget_s=0.0)
    memory.slot(0)[:] = 100.0
    memory.give(0, AdoptionOrder(Adoption.SET, 1, b"x" * 32, None, 0))
    learner.step(1)
    assert memory.state(0) is SlotState.FREE
    assert bool((model.weight == 100.0).all())


def test_a_version_that_is_half_adopted_at_the_end_is_adopted_whole() -> None:
    learner, memory, model = large_pair(6, budget_s=0.0)
    memory.slot(0)[:] = 100.0
    memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
    learner.step(1)
    assert memory.state(0) is SlotState.ADOPT
    learner.close()
    assert bool((model.weight == 100.0).all())


async def test_a_synchronous_learner_stays_until_its_round_is_over() -> None:
    pair = Pair()
    states = await pair.found()
    slept = []

    def agent(seconds: float) -> None:
        """Do what the agent process would do while the trainer waits."""
        slept.append(seconds)
        if len(slept) == 1:
            pair.memory.pass_on(0, SlotState.WANTED)
        elif pair.memory.state(0) is SlotState.OFFERED:
            mark = pair.memory.offered(0)[0]
            pair.port.adopt(0, moved(states[0], 1.0), contained=mark)
        else:
            pair.port.rang()

    pair.learner.step(10)
    assert pair.learner.wait_for_round(0, deadline=float("inf"), pause=agent)
    assert pair.memory.base(0).version == 1  # type: ignore[union-attr]
    assert np.array_equal(pair.now(0), states[0].theta + np.float32(1.0))

    def void(seconds: float) -> None:
        if pair.memory.state(0) is SlotState.FREE:
            pair.memory.pass_on(0, SlotState.WANTED)
        elif pair.memory.state(0) is SlotState.OFFERED:
            pair.port.release(0)

    assert not pair.learner.wait_for_round(0, deadline=float("inf"), pause=void)
    clock = pair.learner._clock
    assert not pair.learner.wait_for_round(0, deadline=clock() + 0.002)
    # Nobody is there any more to have the round with.
    assert not pair.learner.wait_for_round(0, deadline=float("inf"), possible=lambda: False)


# --- an agent that died ----------------------------------------------------------------------


async def test_a_new_agent_that_knows_the_base_loses_nothing() -> None:
    pair = Pair()
    states = await pair.found()
    pair.train(0.25)
    before = pair.now(0)
    port = successor(pair, [*states])
    port.adopt_first(0, moved(states[0], 1.0))
    port.adopt_first(1, states[1])
    pair.idle()

    assert np.allclose(pair.now(0), before + 1.0, atol=1e-6)
    again = await pair.offer(0)
    assert again.tokens == 30


async def test_a_snapshot_in_doubt_that_was_merged_is_carried_by_the_new_agent() -> None:
    pair = Pair()
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    taken = snapshot.values.copy()
    pair.train(0.5)
    own = pair.now(0) - taken
    port = successor(pair, [None, None])
    after = moved(states[0], 1.0, merged_to(snapshot.mark))
    port.adopt_first(0, after)
    pair.idle()

    assert np.allclose(pair.now(0), after.theta + own, atol=1e-6)
    assert pair.memory.base(0).mark == snapshot.mark  # type: ignore[union-attr]


async def test_a_snapshot_in_doubt_that_was_not_merged_stays_pending() -> None:
    pair = Pair()
    states = await pair.found()
    snapshot = await pair.offer(0, amount=0.25)
    own = snapshot.values - snapshot.base
    port = successor(pair, [*states])
    assert pair.memory.state(0) is SlotState.OFFERED
    port.adopt_first(0, states[0])
    again = await pair.offer(0)
    assert np.array_equal(again.values - again.base, own)


async def test_work_whose_base_died_with_the_agent_is_given_up_and_counted() -> None:
    pair = Pair()
    states = await pair.found()
    pair.train(0.25)
    pair.memory.pass_on(0, SlotState.TURNING)
    port = successor(pair, [None, None])
    after = moved(states[0], 1.0)
    port.adopt_first(0, after)
    pair.idle()

    assert np.array_equal(pair.now(0), after.theta)
    assert pair.adopted[-1] == Adopted(0, 1, 20, "overwritten")
    snapshot = await pair.offer(0)
    assert snapshot.tokens == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
async def test_a_replay_through_the_trainers_version_saves_its_work(dtype: torch.dtype) -> None:
    pair = Pair(dtype=dtype)
    states, after = await taken_beyond_the_checkpoint(pair)
    before = pair.now(0)
    port = successor(pair, [None, states[1]])
    passing = moved(states[0], 1.0, after.merged)
    port.passed(0, states[0])
    port.passed(0, passing)
    passing.theta[:] = np.nan  # the next step of the replay is made in place
    newest = moved(after, 2.0)
    port.adopt(0, newest, contained=None)
    pair.idle()
    pair.idle()

    assert np.allclose(pair.now(0), before + 2.0, atol=1e-6 if dtype is torch.float32 else 0.05)
    assert not any(adopted.lost_tokens for adopted in pair.adopted)
    snapshot = await pair.offer(0)
    assert snapshot.base_version == 2
    assert snapshot.tokens == pair.learner.tokens - 10  # all since the one that was merged


@pytest.mark.parametrize("adopted", [False, True])
async def test_of_a_state_that_is_put_away_nobody_holds_the_old_arrays(*, adopted: bool) -> None:
    pair = Pair()
    states = await pair.found()
    before = moved(states[0], 1.0)
    pair.port.adopt(0, before, contained=None)
    if adopted:
        pair.idle()
    old, after = weakref.ref(before.theta), replace(before, theta=before.theta.copy())
    pair.port.moved(0, before, after)
    del before
    gc.collect()
    assert old() is None

    pair.idle()
    pair.train(0.25)
    offer = await pair.offer(0)
    assert offer.base_version == 1 and offer.base is after.theta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
async def test_a_trainer_keeps_its_parameters_of_a_version_that_no_peer_has_any_more(
    dtype: torch.dtype,
) -> None:
    pair = Pair(dtype=dtype)
    states, _ = await taken_beyond_the_checkpoint(pair)
    before = pair.now(0)
    port = successor(pair, [None, states[1]])
    port.keep(0, states[0], tokens=0)
    pair.idle()
    pair.idle()

    assert np.array_equal(pair.now(0), before)
    assert not any(adopted.lost_tokens for adopted in pair.adopted)
    snapshot = await pair.offer(0)
    assert snapshot.base_version == 0
    assert np.allclose(snapshot.base, states[0].theta)
    assert np.array_equal(snapshot.values, before)
    assert snapshot.tokens == pair.learner.tokens, "all of it is pending again"
    assert snapshot.steps == pair.learner.steps


async def test_kept_work_is_not_added_to_a_version_that_has_some_of_it() -> None:
    pair = Pair()
    states, lost = await taken_beyond_the_checkpoint(pair)
    port = successor(pair, [None, states[1]])
    port.keep(0, states[0], tokens=0)
    pair.idle()
    pair.idle()
    newest = moved(lost, 2.0)  # somebody has it after all
    port.adopt(0, newest, contained=lost.merged[ME].step)
    pair.idle()
    pair.idle()
    assert np.array_equal(pair.now(0), newest.theta)
    assert pair.adopted[-1].lost_tokens > 0

    elsewhere = moved(newest, 1.0)
    port.adopt(0, elsewhere, contained=None)
    pair.idle()
    assert np.array_equal(pair.now(0), elsewhere.theta), "and from then on as ever"


async def test_kept_work_is_offered_to_peers_that_are_no_further() -> None:
    pair = Pair()
    states, _ = await taken_beyond_the_checkpoint(pair)
    port = successor(pair, [None, states[1]])
    port.keep(0, states[0], tokens=0)
    pair.idle()
    pair.idle()
    before = pair.now(0)
    other = moved(states[0], 3.0)
    other = FragmentState(
        0, 1, b"o" * 32, states[0].chain.extended(Link(1, b"o" * 32, 0)),
        other.theta, other.momentum, other.merged,
    )  # fmt: skip
    port.adopt(0, other, contained=None)
    pair.idle()
    assert np.allclose(pair.now(0), before + 3.0, atol=1e-6)


async def test_a_version_given_by_the_dead_agent_is_still_adopted() -> None:
    pair = Pair()
    states = await pair.found()
    pair.train(0.25)
    before = pair.now(0)
    one = moved(states[0], 1.0)
    pair.port.adopt(0, one, contained=None)
    port = successor(pair, [*states])
    assert pair.memory.state(0) is SlotState.ADOPT
    port.adopt_first(0, one)
    pair.idle()
    pair.idle()

    assert np.allclose(pair.now(0), before + 1.0, atol=1e-6)
    snapshot = await pair.offer(0)
    assert snapshot.base_version == 1
    assert snapshot.tokens == 40  # nothing was given up

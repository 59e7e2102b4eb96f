"""Copies beside a device's own work: with a late queue on the CPU, and on a CUDA device if any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from averaging.history.state import FragmentState
from averaging.numbers.layout import Layout
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors, SlotState
from peer.trainer.device_copies import CudaSideStream, SideStreamCopies
from peer.trainer.learner import Learner
from peer.trainer.parameters import specs_of, trained_parameters
from tests.peer.trainer.late_queue import LateQueue, over
from tests.peer.trainer.learner_pair import Pair, moved

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["f32", "bf16", "f16"]


def test_slots_that_are_pinned_are_not_emptied() -> None:
    """The device would go on with the pages that were given back, and the agent read zeros."""
    pair = Pair()
    assert pair.memory.may_empty
    over(LateQueue(0), pair)
    pair.memory.slot(0).fill(3.0)
    pair.memory.empty(0)
    assert (pair.memory.slot(0) == 3.0).all()


async def rounds(pair: Pair, *, wait: Callable[[], None] = lambda: None) -> list[np.ndarray]:
    """All offers and answers, and the parameters after each adoption."""

    async def until(fragment: int, wanted: SlotState) -> None:
        for _ in range(1000):
            pair.learner.exchange()
            wait()
            if pair.memory.state(fragment) is wanted:
                return
        raise AssertionError(f"slot {fragment} never became {wanted.name}")

    seen = []
    state: FragmentState | None = None
    for turn in range(4):
        waiting = asyncio.ensure_future(pair.port.values(0, timeout_s=20))
        await asyncio.sleep(0)
        pair.learner.exchange()
        pair.train(0.0625)  # behind the snapshot, whenever that is copied
        await until(0, SlotState.OFFERED)
        pair.port.rang()
        values = await waiting
        assert values is not None
        seen.append(values.copy())
        mark = pair.memory.offered(0)[0]
        if state is None:
            state = FragmentState.founded(pair.layout.hash, 0, values.copy(), 0)
        else:
            state = moved(state, 0.01 * turn)
        pair.train(0.125)
        pair.port.adopt(0, state, contained=mark)
        pair.learner.exchange()
        await until(0, SlotState.BASE if pair.memory.coarse else SlotState.FREE)
        if pair.memory.coarse:
            seen.append(pair.memory.slot(0).copy())  # what the rounding made of it
        pair.port.rang()
        seen.append(pair.now(0))
    pair.learner.close()
    return seen


def the_same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("late", [0, 1, 7])
def test_late_copies_give_the_same_as_direct_copies(dtype: torch.dtype, late: int) -> None:
    queue = LateQueue(late)
    slow = over(queue, Pair(dtype=dtype))
    assert the_same(
        asyncio.run(rounds(Pair(dtype=dtype))),
        asyncio.run(rounds(slow)),
    )
    assert queue.asked >= 8 * (late + 1)
    assert not queue.pinned, "the pages stay locked"


def test_a_fragment_that_waits_delays_no_other() -> None:
    async def story() -> None:
        queue = LateQueue(0)
        pair = over(queue, Pair())
        await pair.found()
        queue.late = 1000
        pair.memory.pass_on(0, SlotState.WANTED)
        pair.learner.exchange()
        queue.late = 0
        pair.memory.slot(1)[:] = 1.0
        before = pair.now(1)
        pair.memory.give(1, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
        pair.idle()
        assert pair.memory.state(0) is SlotState.WANTED
        assert pair.memory.state(1) is SlotState.FREE
        assert np.array_equal(pair.now(1), before + 1.0)
        pair.learner.close()

    asyncio.run(story())


def test_a_learner_that_ends_finishes_its_adoptions() -> None:
    async def story() -> None:
        queue = LateQueue(0)
        pair = over(queue, Pair())
        await pair.found()
        queue.late = 1000
        before = pair.now(0)
        pair.memory.slot(0)[:] = 1.0
        pair.memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
        pair.learner.exchange()
        assert pair.memory.state(0) is SlotState.ADOPT
        pair.learner.close()
        assert np.array_equal(pair.now(0), before + 1.0)

    asyncio.run(story())


# --- with a device --------------------------------------------------------------------------------


def needs_cuda(test: Callable[..., None]) -> Callable[..., None]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Callable[..., None] = pytest.mark.gpu(missing(test))
    return marked


class OnCuda:
    """Layers of 64 MB in two fragments on the device, exchanged only on request."""

    def __init__(self) -> None:
        layers = (torch.nn.Linear(2048, 2048, bias=False) for _ in range(4))
        self.model = torch.nn.Sequential(*layers).cuda()
        self.parameters = trained_parameters(self.model)
        self.layout = Layout.build(specs_of(self.parameters), 2)
        self.memory = SharedTensors.create(
            [fragment.size for fragment in self.layout.fragments],
            layout=self.layout.hash,
            incarnation=1,
            coarse=False,
        )
        self.learner = Learner(self.memory, self.layout, self.parameters, ring=lambda: None)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.fill_(value)

    def step_until(self, state: SlotState) -> None:
        for _ in range(1000):
            self.learner.step(1)
            if self.memory.state(0) is state:
                return
            torch.cuda.synchronize()
        raise AssertionError(f"slot 0 never became {state.name}")


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_cuda_copies_give_the_same_as_direct_copies(dtype: torch.dtype) -> None:
    on_device = Pair(dtype=dtype, device="cuda")
    assert the_same(
        asyncio.run(rounds(Pair(dtype=dtype))),
        asyncio.run(rounds(on_device, wait=torch.cuda.synchronize)),
    )


@needs_cuda
def test_no_safe_point_waits_for_the_device() -> None:
    subject = OnCuda()
    copies = subject.learner._copies
    assert isinstance(copies, SideStreamCopies) and len(copies._pinned) == 2

    def exchange(state: SlotState) -> float:
        """Seconds in the safe point that begins an offer or an adoption."""
        if state is SlotState.WANTED:
            subject.memory.pass_on(0, state)
        else:
            subject.memory.give(0, AdoptionOrder(Adoption.ADD, 1, b"x" * 32, None, 0))
        torch.cuda.set_sync_debug_mode("error")
        began = time.perf_counter()
        try:
            subject.learner.step(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return time.perf_counter() - began

    def end(state: SlotState) -> None:
        subject.step_until(SlotState.OFFERED if state is SlotState.WANTED else SlotState.FREE)
        subject.memory.pass_on(0, SlotState.FREE)

    for state in (SlotState.WANTED, SlotState.ADOPT):
        exchange(state)  # kernels are loaded at their first use, which waits
        end(state)
    for state in (SlotState.WANTED, SlotState.ADOPT):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(1_000_000_000)
        took_s = exchange(state)
        assert subject.memory.state(0) is state, "done before the device could be"
        torch.cuda.synchronize()
        assert took_s < (time.perf_counter() - began) / 4
        end(state)
    subject.learner.close()


@needs_cuda
def test_an_offer_is_of_its_safe_point_although_the_next_step_is_queued_behind_it() -> None:
    subject = OnCuda()
    subject.fill(1.0)
    subject.memory.pass_on(0, SlotState.WANTED)
    torch.cuda._sleep(100_000_000)
    subject.learner.step(1)
    subject.fill(2.0)
    subject.step_until(SlotState.OFFERED)
    assert subject.memory.offered(0) == (1, 1)
    assert (subject.memory.slot(0) == 1.0).all()
    subject.learner.close()


@needs_cuda
def test_memory_that_cannot_be_pinned_leaves_the_device_usable() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    queue = CudaSideStream(device)
    slot = torch.zeros(1 << 20)
    assert queue.pin(slot)
    assert not queue.pin(slot), "it is pinned already"
    assert torch.ones(8, device=device).add_(1.0).sum().item() == 16.0
    queue.unpin(slot)

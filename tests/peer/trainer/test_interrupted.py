"""Ctrl-C, and errors of a device, in the middle of an exchange at a safe point."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peer.bridge.shared_memory import SlotState
from tests.peer.trainer.late_queue import LateQueue, over
from tests.peer.trainer.learner_pair import Pair, moved

EMPTY = "aten::empty.memory_format"


class AtCall(TorchDispatchMode):
    """Runs ``happens`` after the first call of an operation of torch."""

    def __init__(self, operation: str, happens: Callable[[], None]) -> None:
        super().__init__()
        self._operation = operation
        self._happens = happens
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == self._operation:
            self.calls += 1
            if self.calls == 1:
                self._happens()
        return result


@contextmanager
def ctrl_c_after(operation: str) -> Iterator[None]:
    """Press Ctrl-C after the first call of an operation, and expect what Python makes of it."""
    # ``asyncio.run`` has put a handler of its own in its place.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            AtCall(operation, lambda: signal.raise_signal(signal.SIGINT)),
        ):
            yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_ctrl_c_in_the_middle_of_an_adoption_leaves_no_half_adopted_version() -> None:
    """The rest of the version was never added, and what was missing was offered as own work."""

    async def story() -> None:
        pair = Pair()
        states = await pair.found()
        fragment = max(range(2), key=lambda i: len(pair.layout.fragments[i].units))
        assert len(pair.layout.fragments[fragment].units) > 1
        after = moved(states[fragment], 1.0)
        pair.port.adopt(fragment, after, contained=None)
        with ctrl_c_after("aten::add_.Tensor"):
            pair.learner.exchange()
        pair.idle()
        assert pair.memory.state(fragment) is SlotState.FREE
        assert np.allclose(pair.now(fragment), after.theta, atol=1e-6)

    asyncio.run(story())


def test_ctrl_c_in_the_middle_of_an_offer_offers_whole_parameters() -> None:
    async def story() -> None:
        pair = Pair()
        await pair.found()
        fragment = max(range(2), key=lambda i: len(pair.layout.fragments[i].units))
        waiting = asyncio.ensure_future(pair.port.snapshot(fragment, timeout_s=5))
        await asyncio.sleep(0)
        with ctrl_c_after("aten::copy_"):
            pair.learner.exchange()
        pair.idle()
        snapshot = await waiting
        assert snapshot is not None
        assert np.array_equal(snapshot.values, pair.now(fragment))

    asyncio.run(story())


def test_an_exchange_that_a_device_had_no_memory_for_is_made_at_a_later_safe_point() -> None:
    """Earlier, each later safe point failed with ``KeyError``."""

    def no_memory() -> None:
        raise torch.OutOfMemoryError("the device is full")

    async def story() -> None:
        pair = Pair()
        states = await pair.found()
        over(LateQueue(late=0), pair)
        waiting = asyncio.ensure_future(pair.port.snapshot(0, timeout_s=5))
        await asyncio.sleep(0)
        with pytest.raises(torch.OutOfMemoryError), AtCall(EMPTY, no_memory):
            pair.learner.exchange()
        for _ in range(2):
            pair.idle()
        snapshot = await waiting
        assert snapshot is not None
        assert np.array_equal(snapshot.values, pair.now(0))
        after = moved(states[0], 1.0)
        pair.port.adopt(0, after, contained=snapshot.mark)
        with pytest.raises(torch.OutOfMemoryError), AtCall(EMPTY, no_memory):
            pair.learner.exchange()
        for _ in range(2):
            pair.idle()
        assert np.allclose(pair.now(0), after.theta, atol=1e-6)

    asyncio.run(story())

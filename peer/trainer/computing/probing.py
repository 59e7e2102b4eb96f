"""Measuring time and memory of forward and backward passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from peer.processes import is_out_of_memory
from peer.run_file.sections import vocabulary
from peer.trainer.computing.choices import Probe
from peer.trainer.computing.engine import Engine

TEMPORARIES = 1.5
"""Memory of both passes over that of the tensors saved between them, where only these are known."""


class Meter:
    """Measures a block in which ``size`` sequences go through both passes."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._size = size
        self._engine, self._device = engine, engine.device
        self.probe: Probe | None = None
        """The measurement; ``None`` if the block has failed."""

    def __enter__(self) -> None:
        self._memory = _MemoryMeter(self._device)
        # Gradients are part of what both passes take, also if an earlier micro-batch made them.
        self._memory.peak_bytes = self._gradient_bytes()
        self._open = ExitStack()
        _synchronize(self._device)
        self._began, self._work = time.perf_counter(), time.process_time()
        self._open.enter_context(self._memory)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _synchronize(self._device)
        seconds, work_s = time.perf_counter() - self._began, time.process_time() - self._work
        self._open.close()
        if kind is None:
            self.probe = Probe(self._size, seconds, self._memory.peak_bytes, work_s)

    def _gradient_bytes(self) -> float:
        if self._device.type != "cuda":
            return 0.0
        gradients = (p.grad for p in self._engine.model.parameters())
        return float(sum(grad.nbytes for grad in gradients if grad is not None))


def probe(
    engine: Engine, size: int, *, length: int | None = None, forward_only: bool = False
) -> Probe:
    """Measure ``size`` sequences of noise. Nothing of the model changes.

    ``length``: tokens of each, if not as many as in the run. Before it no parameter has a gradient.
    ``forward_only``: enough for the memory, except on CUDA, and in a third of the time.
    """
    meter = Meter(engine, size)
    loss_of = engine.code(engine.choices)
    try:
        with _nothing_changes(engine):
            tokens = random_tokens(engine, size, length)
            with meter:
                with engine.autocast():
                    loss = loss_of(engine.model, tokens)
                if not forward_only:
                    torch.autograd.backward(loss)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the handler: the error's traceback held the activations.
    engine.forget_gradients()
    return meter.probe or Probe(size, float("inf"), float("inf"))


def random_tokens(engine: Engine, size: int, length: int | None = None) -> Tensor:
    """Noise from a generator of its own, on the device."""
    shape = (size, (length or engine.run.data.sequence_length) + 1)
    highest = vocabulary(engine.run.model) or 256
    return torch.randint(0, highest, shape, generator=torch.Generator()).to(engine.device)


@contextmanager
def _nothing_changes(engine: Engine) -> Iterator[None]:
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            engine.forget_gradients()


class _MemoryMeter:
    """The most memory that a block took beside what was taken before.

    On a device whose allocations are not counted, it is the size of what the backward pass needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self._saved: dict[int, int] = {}
        self.peak_bytes = 0.0

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._open.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
            )

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self._device)
            self.peak_bytes += float(peak - self._before)
        else:
            self.peak_bytes = TEMPORARIES * sum(self._saved.values())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

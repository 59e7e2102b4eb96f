"""The computing part of a training step: gradients of a batch, and the optimizer's step.

An ``Engine`` trains as ``Choices`` say: under autocast, compiled, several micro-batches to a step.
The gradient is that of the whole batch in one pass, to rounding. Nothing in a step reads a value
from the device, except that a ``GradScaler`` (fp16) tells each step whether it is skipped.

Whatever runs out of memory in forward or backward pass is repeated with half as many sequences at
once, from the same state of the random generators. The optimizer's step is not repeated: by then
the activations are freed, so no smaller micro-batch would help it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peer.model.recipes import clip_gradients, held_out_loss, next_token_loss
from peer.run_file.sections import GptModel, RunFile, vocabulary
from peer.trainer.choices import Choices, Precision, Probe, split
from peer.trainer.device_facts import device_name, temperature_c, used_bytes
from peer.trainer.observed_run import DeviceUse, Fields
from peer.trainer.rank import was_skipped
from peer.trainer.speed import flops_per_token, peak_flops

LOGITS_AT_ONCE = 1 << 24
"""Logits that exist at once where they are computed in chunks: 64 MB in fp32."""

HELD_OUT_AT_ONCE = 32

TEMPORARIES = 1.5
"""Memory of both passes over that of the tensors saved between them, where only these are known."""

_ALLOCATION_FAILED = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Errors of allocators and libraries that are no ``OutOfMemoryError``: CPU, cuBLAS, cuDNN."""

Loss = Callable[[nn.Module, Tensor], Tensor]


class Engine:
    """Trains one model on one device."""

    def __init__(
        self,
        run: RunFile,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        choices: Choices,
        *,
        loss: Loss = next_token_loss,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """``backend``: the compiler, as ``torch.compile`` names it."""
        self.run, self.model, self.optimizer = run, model, optimizer
        self.device = next(model.parameters()).device
        self.events: deque[Fields] = deque()
        """Events for the user, oldest first."""
        self.batch_size = run.inner.batch_size
        """Sequences of one step that are trained on here."""
        self.combine: Callable[[], None] = lambda: None
        """Called when the gradients of a step are there: to combine them with those of others."""
        self._loss_of = loss
        self._backend = backend
        self._scaler: torch.amp.GradScaler | None = None
        self._stepped = False
        self._is_warm = False
        optimizer.register_step_post_hook(self._note_step)
        self.choices = choices
        self.choose(choices)

    def choose(self, choices: Choices, *, any_size: bool = False) -> None:
        """Train this way from now on. Activations that are recomputed once stay so.

        ``any_size``: compile once for micro-batches of all sizes, to measure them.
        """
        self.choices = choices
        if choices.lean:
            recompute_activations(self.model)
        if self.device.type == "cuda":
            high = "highest" if choices.precision == "fp32" else "high"
            torch.set_float32_matmul_precision(high)
        if choices.precision != "fp16":
            self._scaler = None
        elif self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.device.type)
        loss = loss_in_chunks if choices.lean and can_chunk(self.model) else self._loss_of
        self._loss: Callable[[Tensor], Tensor] = partial(loss, self.model)
        if choices.compile:
            self._loss = _compiled(self._loss, any_size=any_size, backend=self._backend)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model computes."""
        return autocast(self.device, self.choices.precision)

    # --- a step ---------------------------------------------------------------------------------

    def gradients(self, batch: Tensor) -> Tensor:
        """Add the gradients of a batch of token sequences. Returns its mean loss, on the device.

        Before it no parameter has a gradient.
        """
        state = _random_state(self.device)
        while (loss := self._try(partial(self._accumulate, batch))) is None:
            self._reduce(len(batch))
            _set_random_state(self.device, state)
        return loss

    def apply(self) -> bool:
        """Clip the gradients, make the optimizer's step, forget the gradients.

        Returns whether the step was made: a scaler skips it if a gradient has overflowed.
        """
        self.combine()
        self._stepped = False
        if self._scaler is None:
            clip_gradients(self.run, self.model)
            self.optimizer.step()
        else:
            self._scaler.unscale_(self.optimizer)
            clip_gradients(self.run, self.model)
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self._stepped

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        # In the hook: the scaler's note for fused optimizers is gone when its step returns.
        self._stepped = self._scaler is None or not was_skipped(optimizer)

    def _accumulate(self, batch: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in torch.split(batch, list(split(len(batch), self.choices.micro_batch))):
            with self.autocast():
                # The mean over a part counts as often as the part has sequences.
                loss = self._loss(part) * (len(part) / len(batch))
            torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a batch has at least one sequence"
        return total

    def _try(self, work: Callable[[], Tensor]) -> Tensor | None:
        """The result; ``None`` if memory ran out, with all that it took given back."""
        try:
            return work()
        except RuntimeError as error:
            # The last resort is spent: nothing is left to reduce.
            if not is_out_of_memory(error) or self._is_smallest():
                raise
        # Outside of the handler: the error's traceback held the activations.
        self._forget_gradients()
        return None

    def _is_smallest(self) -> bool:
        return self.choices.micro_batch == 1 and self.choices.lean

    def _reduce(self, batch_size: int) -> None:
        """Train with half as many sequences at once, in the end with recomputed activations."""
        size = max(split(batch_size, self.choices.micro_batch))
        if size > 1:
            self.choices = replace(self.choices, micro_batch=-(-size // 2))
        else:
            self.choose(replace(self.choices, micro_batch=1, lean=True))
        self.events.append({"event": "micro_batch_reduced", "text": self.choices.text})

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- before the first step ------------------------------------------------------------------

    def probe(self, size: int) -> Probe:
        """Measure forward and backward pass of ``size`` sequences. Nothing of the model changes."""
        with self._nothing_changes():
            tokens = self._random_tokens(size)
            try:
                if self.device.type != "cpu" or self.choices.compile or not self._is_warm:
                    # It compiles, and fills caches of libraries and of the device's memory.
                    self._or_eager(partial(self._one_pass, tokens))
                    self._forget_gradients()
                    self._is_warm = True
                meter = _MemoryMeter(self.device)
                began, work = time.perf_counter(), time.process_time()
                with meter:
                    self._one_pass(tokens)
                    _synchronize(self.device)
                seconds, work_s = time.perf_counter() - began, time.process_time() - work
                return Probe(size, seconds, meter.peak_bytes, work_s)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return Probe(size, float("inf"), float("inf"))

    def _one_pass(self, tokens: Tensor) -> None:
        with self.autocast():
            loss = self._loss(tokens)
        torch.autograd.backward(loss)

    def warm_up(self) -> None:
        """Compile for the shapes of a batch. If that fails, train without compiling."""
        with self._nothing_changes():
            batch = self._random_tokens(self.batch_size)
            self._or_eager(partial(self.gradients, batch))
            _synchronize(self.device)

    def _or_eager(self, work: Callable[[], object]) -> None:
        """Do the work; if the compiler fails, do it and all later work without compiling."""
        try:
            work()
        except Exception as error:
            # A compiler raises errors of any type.
            if is_out_of_memory(error) or not self.choices.compile:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            return
        self.events.append({"event": "compile_failed", "reason": reason[:200]})
        self.choose(replace(self.choices, compile=False))
        self._forget_gradients()
        work()

    @contextmanager
    def warming_up(self) -> Iterator[Callable[[], bool]]:
        """Warm up in a thread. Yields a function that says whether that is done."""
        if not self.choices.compile:
            yield lambda: True
            return
        self.events.append({"event": "compiling"})
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self.warm_up()
            except BaseException as error:
                failures.append(error)  # raised again by the thread that waits

        thread = threading.Thread(target=work, name="compile")
        thread.start()

        def is_warm() -> bool:
            if thread.is_alive():
                return False
            if failures:
                raise failures.pop()
            return True

        try:
            yield is_warm
        finally:
            thread.join()

    @contextmanager
    def _nothing_changes(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                self._forget_gradients()

    def _random_tokens(self, count: int) -> Tensor:
        shape = (count, self.run.data.sequence_length + 1)
        return torch.randint(0, vocabulary(self.run.model) or 256, shape, device=self.device)

    def use(self) -> DeviceUse:
        """State of the device, for people."""
        model, parameters = self.run.model, sum(p.numel() for p in self.model.parameters())
        # Attention adds operations that no parameter stands for; other models may differ.
        shape = (model.layers, model.width) if isinstance(model, GptModel) else (0, 0)
        return DeviceUse(
            flops_per_token=flops_per_token(
                parameters,
                layers=shape[0],
                width=shape[1],
                length=self.run.data.sequence_length,
            ),
            peak_flops=peak_flops(device_name(self.device), self.choices.precision),
            memory_bytes=used_bytes(self.device),
            temperature_c=temperature_c(self.device),
        )

    # --- measuring the model --------------------------------------------------------------------

    def held_out_loss(self, sequences: NDArray[np.int64]) -> float:
        """Mean loss per token over held-out sequences, in the precision of training."""
        at_once = min(HELD_OUT_AT_ONCE, self.choices.micro_batch)
        with self.autocast():
            return held_out_loss(self.model, sequences, at_once=at_once)


def _compiled(
    function: Callable[[Tensor], Tensor], *, any_size: bool, backend: str | Callable[..., Any]
) -> Callable[[Tensor], Tensor]:
    """The compiled function, made in its first call: importing a compiler fails there, too."""

    @cache
    def made() -> Callable[[Tensor], Tensor]:
        return torch.compile(function, dynamic=any_size, backend=backend)

    def call(tokens: Tensor) -> Tensor:
        return made()(tokens)

    return call


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context in which a model computes in this precision."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    if precision == "fp16":
        return torch.autocast(device.type, torch.float16)
    return torch.autocast(device.type, enabled=False)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _ALLOCATION_FAILED
    )


# --- less memory ----------------------------------------------------------------------------------


def recompute_activations(model: nn.Module) -> None:
    """Keep the inputs of each block alone, and compute its activations again when needed."""
    if callable(enable := getattr(model, "gradient_checkpointing_enable", None)):  # transformers
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for block in getattr(model, "blocks", ()):
        if not isinstance(block.forward, partial):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def can_chunk(model: nn.Module) -> bool:
    """Return whether the model computes its logits in a call of their own."""
    return all(callable(getattr(model, part, None)) for part in ("hidden", "logits"))


def loss_in_chunks(model: Any, tokens: Tensor) -> Tensor:
    """``next_token_loss`` without ever holding all logits: each chunk's are computed twice.

    ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 does the same for a plain linear
    head; it is not used because it ends the compiled graph, and earlier releases lack it.
    """
    hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    rows = max(1, LOGITS_AT_ONCE // len(model.head.weight))

    def chunk_loss(part: Tensor, wanted: Tensor) -> Tensor:
        logits = model.logits(part)
        return F.cross_entropy(logits.float(), wanted, reduction="sum")

    parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    losses = [checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / targets.numel()


# --- memory, time and randomness of a device ------------------------------------------------------


class _MemoryMeter:
    """The most memory that a block took beside what was taken before.

    On a CPU, where allocations are not counted, it is the size of what the backward pass will need.
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
        elif self._device.type == "cpu":
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
            self.peak_bytes = float(peak - self._before)
        else:
            self.peak_bytes = TEMPORARIES * sum(self._saved.values())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)

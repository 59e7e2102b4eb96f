"""The computing part of a training step: gradients of a batch, and the optimizer's step.

An ``Engine`` trains as ``Choices`` say: under autocast, compiled, several micro-batches to a step.
The gradient is that of the whole batch in one pass, to rounding. Nothing in a step waits for a
value from the device: whether a ``GradScaler`` (fp16) has skipped a step is known one step later.

A micro-batch that runs out of memory in forward or backward pass is repeated with half as many
sequences at once, from the same state of the random generators; so is a held-out measurement. The
optimizer's step cannot be repeated, because it may have changed some of the parameters. It takes no
memory that it did not have before the first pass (``make_states``): by then activations are freed.
If other programs have it all the same, ``Muon`` goes on with smaller batches of matrices; fused
kernels take none.

The way to train may change from one micro-batch to the next, so that
``peer.trainer.computing.tuning`` finds the best one with work that counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peer.bridge.messages import Fields
from peer.errors import MachineTooSmall
from peer.model.recipes import clip_gradients, held_out_loss, next_token_loss
from peer.model.recipes.chunked_loss import can_chunk, loss_in_chunks
from peer.model.recipes.gpt import Gpt
from peer.processes import is_out_of_memory
from peer.run_file.sections import RunFile
from peer.trainer.computing.choices import Choices, Precision, flops_per_token, peak_flops, split
from peer.trainer.computing.compiling import Backend, Loss, compiled
from peer.trainer.computing.device_facts import (
    DeviceUse,
    Skips,
    device_name,
    temperature_c,
    used_bytes,
)

HELD_OUT_AT_ONCE = 32

_NO_ROOM_FOR_STATES = (
    "the state of its optimizer does not fit beside the model and its gradients; close other "
    "programs, or use a device with more memory (--device)"
)


class Tuning:
    """Changes nothing about the way to train. A ``Tuner`` finds the best one during training."""

    @property
    def text(self) -> str | None:
        """The current preparation, in words; ``None`` if nothing is left to find out."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def around(self, size: int, *, last: bool) -> AbstractContextManager[object]:
        """The context of both passes of ``size`` sequences. Leaving it may change the choices.

        ``last``: whether they are the last ones of a step.
        """
        return nullcontext()

    def leaving(self) -> None:
        """No step follows: tell what ``__exit__`` will wait for, if for anything."""

    def wait(self) -> bool:
        """Wait for work in the background. Returns whether there was any."""
        return False

    def reduced(self) -> None:
        """Memory ran out: the engine has chosen fewer sequences at once, or recomputes."""


class Combination(Protocol):
    """Combines the gradients of a step with those of other processes."""

    def begin_step(self, count: Tensor) -> None:
        """A step begins, whose gradients here are of the mean over ``count`` values."""
        ...

    def begin_pass(self, *, last: bool) -> None:
        """A backward pass begins. ``last``: its gradients complete those of the step."""
        ...

    def finish(self) -> None:
        """Set the gradients to the combined ones."""
        ...


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
        backend: Backend = "inductor",
    ) -> None:
        """``backend``: the compiler, as ``torch.compile`` names it."""
        self.run, self.model, self.optimizer = run, model, optimizer
        self.device = next(model.parameters()).device
        self.events: deque[Fields] = deque()
        """Events for the user, oldest first."""
        self.batch_size = run.inner.batch_size
        """Sequences of one step that are trained on here."""
        self.combine: Combination | None = None
        self.tuning = Tuning()
        """A context manager to enter before the first step and to leave after the last one."""
        self._predicts_answers = getattr(run.data, "form", "text") != "text"
        self._loss_of = loss
        self._backend = backend
        self._codes: dict[bool, Loss] = {}
        """Compiled code, by whether it is lean."""
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss in fp16."""
        self._skips = Skips()
        self._made = 0
        self._held_out_at_once = HELD_OUT_AT_ONCE
        self._told_unmeasured = False
        self._recomputes = False
        optimizer.register_step_post_hook(self._note_step)
        self.choices = choices
        self.choose(choices)

    def choose(self, choices: Choices) -> None:
        """Train this way from now on."""
        self.choices = choices
        if choices.lean != self._recomputes:
            self._recomputes = choices.lean
            recompute_activations(self.model, choices.lean)
        if self.device.type == "cuda":
            high = "highest" if choices.precision == "fp32" else "high"
            torch.set_float32_matmul_precision(high)
        if choices.precision != "fp16":
            self.scaler = None
        elif self.scaler is None:
            self.scaler = torch.amp.GradScaler(self.device.type)
        self._loss: Callable[[Tensor], Tensor]
        self._loss = partial(self.code(choices), self.model)

    def code(self, choices: Choices) -> Loss:
        """The function that computes the loss in this way. Code is compiled once, by any caller."""
        loss = loss_in_chunks if choices.lean and self._can_chunk else self._loss_of
        if not choices.compile:
            return loss
        return self._codes.setdefault(choices.lean, compiled(loss, self.model, self._backend))

    @cached_property
    def _can_chunk(self) -> bool:
        possible = can_chunk(self.model)
        if not possible:
            self.events.append({"event": "logits_at_once"})
        return possible

    def sizes(self, choices: Choices) -> tuple[int, ...]:
        """Micro-batches of a step, if nothing changes during it."""
        return split(self.batch_size, choices.micro_batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model computes."""
        return autocast(self.device, self.choices.precision)

    # --- a step ---------------------------------------------------------------------------------

    def gradients(self, batch: Tensor) -> Tensor:
        """Add the gradients of a batch of token sequences. Returns its mean loss, on the device.

        Before it no parameter has a gradient.
        """
        if self.combine is not None:
            self.combine.begin_step(self._values_in_mean(batch))
        state = _random_state(self.device)
        while (loss := self._try(partial(self._accumulate, batch))) is None:
            _set_random_state(self.device, state)
        return loss

    def make_states(self) -> None:
        """Make the optimizer's state, unless it was restored, by a step that changes nothing.

        It is made before the first pass, so that what is left for activations is known. Raises
        ``MachineTooSmall``: a step that runs out of memory later has changed some parameters.
        """
        if self.optimizer.state:
            return
        groups = self.optimizer.param_groups
        kept = [{name: group[name] for name in ("lr", "weight_decay")} for group in groups]
        try:
            for group in groups:
                group.update(lr=0.0, weight_decay=0.0)
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MachineTooSmall(self.run.name, _NO_ROOM_FOR_STATES) from error
        finally:
            for group, settings in zip(groups, kept, strict=True):
                group.update(settings)
            self.forget_gradients()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):  # moments, and the count of steps
                    value.zero_()

    def apply(self) -> int:
        """Clip the gradients, make the optimizer's step, forget the gradients.

        Returns the number of steps that are known by now to have been made, since the last call: 1,
        except where a scaler skips a step whose gradient has overflowed.
        """
        if self.combine is not None:
            self.combine.finish()
        self._made = 0
        if self.scaler is None:
            clip_gradients(self.run, self.model)
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            clip_gradients(self.run, self.model)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self._made

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        self._made = len(list(self._skips.note(optimizer)))

    def _accumulate(self, batch: Tensor) -> Tensor:
        total: Tensor | None = None
        done = 0
        for part in self._parts(batch):
            done += len(part)
            last = done == len(batch)
            with self.tuning.around(len(part), last=last):
                with self.autocast():
                    loss = self._share_of_loss(part, batch)
                if self.combine is not None:
                    self.combine.begin_pass(last=last)
                torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a batch has at least one sequence"
        return total

    def _values_in_mean(self, batch: Tensor) -> Tensor:
        """Number of values that the loss of a batch is the mean over, or proportional to it."""
        if self._predicts_answers:
            return batch[:, 1:].ge(0).sum()
        return torch.full((), len(batch), device=batch.device)

    def _share_of_loss(self, part: Tensor, batch: Tensor) -> Tensor:
        """The part's share of the mean loss of a batch."""
        if not self._predicts_answers:
            # The mean over a part counts as often as the part has sequences.
            return self._loss(part) * (len(part) / len(batch))
        # ... as it has tokens that are predicted. There may be none, and the mean of none is NaN.
        count, whole = map(self._values_in_mean, (part, batch))
        return torch.where(count > 0, self._loss(part), 0.0) * (count / whole.clamp(min=1))

    def _parts(self, batch: Tensor) -> Iterator[Tensor]:
        """The micro-batches of a batch; the rest is divided anew when the choices change."""
        while len(batch):
            chosen = self.choices
            for size in split(len(batch), chosen.micro_batch):
                yield batch[:size]
                batch = batch[size:]
                if self.choices is not chosen:
                    break

    def _try(self, work: Callable[[], Tensor]) -> Tensor | None:
        """The result; ``None`` if the work is to be repeated, with all that it took given back."""
        try:
            return work()
        except Exception as error:
            short = is_out_of_memory(error)
            # A compiler changes functions of torch for a moment, in all threads.
            if not (short or self.tuning.wait()):
                raise
            # The last resort is spent: nothing is left to reduce.
            if short and self.choices.micro_batch == 1 and self.choices.lean:
                raise
        # Outside of the handler: the error's traceback held the activations.
        self.forget_gradients()
        if short:
            self._reduce()
        return None

    def _reduce(self) -> None:
        """Train with half as many sequences at once, in the end with recomputed activations."""
        size = max(self.sizes(self.choices))
        if size > 1:
            self.choices = replace(self.choices, micro_batch=-(-size // 2))
        else:
            self.choose(replace(self.choices, micro_batch=1, lean=True))
        self.tuning.reduced()
        self.events.append({"event": "micro_batch_reduced", "text": self.choices.text})

    def forget_gradients(self) -> None:
        """Free the memory of gradients, and what the device's allocator keeps for later."""
        self.optimizer.zero_grad(set_to_none=True)
        self._free_unused()

    def _free_unused(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def use(self) -> DeviceUse:
        """State of the device, for people."""
        # Of frozen parameters no gradients are computed, which is a third of the operations.
        parameters = round(
            sum(p.numel() * (1 if p.requires_grad else 2 / 3) for p in self.model.parameters())
        )
        return DeviceUse(
            flops_per_token=flops_per_token(self.run, parameters),
            peak_flops=peak_flops(device_name(self.device), self.choices.precision),
            memory_bytes=used_bytes(self.device),
            temperature_c=temperature_c(self.device),
            preparing=self.tuning.text,
        )

    # --- measuring the model --------------------------------------------------------------------

    def held_out_loss(
        self, sequences: NDArray[np.int64], meanwhile: Callable[[], None] = lambda: None
    ) -> float:
        """Mean loss per token over held-out sequences, in the precision of training.

        ``meanwhile``: as for ``peer.model.recipes.held_out_loss``, and called again where it is
        repeated: without a compiler that has disturbed it, and where memory runs out with half as
        many sequences at once. Raises the error of one, and that of ``meanwhile``.
        """
        failed: list[Exception] = []

        def go_on() -> None:
            try:
                meanwhile()
            except Exception as error:
                failed.append(error)
                raise

        while True:
            failed.clear()
            at_once = min(self._held_out_at_once, self.choices.micro_batch)
            try:
                return self._held_out_loss(sequences, at_once, go_on)
            except Exception as error:
                short = is_out_of_memory(error)
                # A compiler changes functions of torch for a moment, in all threads.
                if not (short or (not failed and self.tuning.wait())):
                    raise
                if short and at_once == 1:
                    raise
            # Outside of the handler: the error's traceback held the activations.
            if short:
                self._held_out_at_once = at_once // 2
                self._free_unused()

    def measured(
        self, sequences: NDArray[np.int64], meanwhile: Callable[[], None]
    ) -> tuple[float, int]:
        """The held-out loss, and of how many sequences: of none if not even one fits."""
        try:
            return self.held_out_loss(sequences, meanwhile), len(sequences)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._free_unused()
        if not self._told_unmeasured:
            self._told_unmeasured = True
            self.events.append({"event": "not_measured"})
        return 0.0, 0

    def _held_out_loss(
        self, sequences: NDArray[np.int64], at_once: int, meanwhile: Callable[[], None]
    ) -> float:
        # Without the code of training: a compiler would make other code for these sizes.
        loss = self.code(replace(self.choices, compile=False))
        with self.autocast():
            return held_out_loss(
                self.model, sequences, at_once=at_once, meanwhile=meanwhile, loss=loss
            )


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context in which a model computes in this precision."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    if precision == "fp16":
        return torch.autocast(device.type, torch.float16)
    return torch.autocast(device.type, enabled=False)


# --- less memory ----------------------------------------------------------------------------------


def recompute_activations(model: nn.Module, wanted: bool) -> None:
    """Keep the inputs of each block alone, and compute its activations again when needed."""
    if isinstance(model, Gpt):
        model.recompute_activations(wanted)
        return
    # The second name is that of transformers before 5.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if callable(enable := getattr(model, f"{name}_enable", None)):
            if wanted:
                enable({"use_reentrant": False})
            else:
                getattr(model, f"{name}_disable")()
            return


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)

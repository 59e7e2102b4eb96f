"""Mistakes of a training loop. Once it has made a step, finding them reads nothing from a device.

Each mistake is told once: as a Python warning (``LoopWarning``) and in the event log.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from blake3 import blake3
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from peer.bridge.messages import BATCH, SEED
from peer.errors import LoopWarning, explained
from peer.model.naming import local_part, named_parameters, saved_buffers
from peer.quantities import listed
from peer.run_file.schedule import Rates

Mistake: TypeAlias = Literal[
    "optimizer", "parameters", "no_exchange", "not_finite", "no_tokens", "rates"
]

OTHERS_STEPS_MAX = 16
"""Steps of an optimizer that was not given, without one of those that were."""

LOGS_LOOKED_AT_MIN = 16
"""Batches that were reported without a step after which parameters are looked at, where a cycle has
fewer steps: a loop may update them and report the batch before it calls ``run.step``.
"""
LOGS_MAX = 1000
"""Batches that were reported without a step; more accumulation than that is unlikely."""

RISE = 2.0
"""A learning rate that grows by this factor more than the run's tokens counts other steps than the
run's: a warm-up over the run's tokens grows at most as they do."""

SAMPLED_TENSORS, SAMPLED_VALUES = 8, 16
"""Values that are compared to find out whether parameters change without a step."""

CYCLES_MAX = 2
NO_EXCHANGE_S = 30.0
"""Least time without an exchange: two cycles of a tiny model are shorter than a round."""


class LoopChecks:
    """Checks of one loop that trains in a run."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        *,
        auto: bool,
        cycle: int,
        tell: Callable[[Mistake, str], None],
        statistics: Mapping[str, torch.Tensor] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tell(mistake, text)`` is called once for each mistake.

        ``statistics``: the buffers that are exchanged.
        """
        self._model = model
        self._optimizers = optimizers
        self._auto = auto
        self._cycle = cycle
        self._tell = tell
        self._clock = clock
        self._told: set[Mistake] = set()
        self._joined = dict(named_parameters(model))
        self._exchanged = {name: p for name, p in self._joined.items() if p.requires_grad}
        self._statistics = dict(statistics)
        self._of_model = {id(p) for p in self._exchanged.values()}
        self._harmless: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers without a parameter that is exchanged."""
        self._sample = self._sampled()
        self._first_rates: dict[int, tuple[float, int]] = {}
        """The first rate above 0 of each optimizer, and the run's tokens then."""
        self._tokens = 0
        self._steps = self._steps_outside = self._logs = 0
        self._exchange_step, self._exchange_at = 0, clock()

    def found(self, mistake: Mistake, text: str) -> None:
        """Tell a mistake, if it is the first of its kind."""
        if mistake in self._told:
            return
        self._told.add(mistake)
        self._tell(mistake, text)
        warnings.warn(explained(text, "loop-mistake"), LoopWarning, stacklevel=4)

    # --- at each step -------------------------------------------------------------------------

    def stepped(self, *, tokens: int, exchanged: bool, alone: bool) -> None:
        """Note a safe point. ``exchanged``: a version was adopted since the last one.

        ``alone``: there is nobody to exchange with.
        """
        self._steps += 1
        self._tokens += tokens
        self._steps_outside = self._logs = 0
        if not tokens:
            self.found(
                "no_tokens",
                "a step without run.log(tokens=...) has no weight in the run: call "
                "run.log(loss=loss, tokens=batch.numel()) before each optimizer step",
            )
        if exchanged or alone:
            self._exchange_step, self._exchange_at = self._steps, self._clock()
        elif self._steps - self._exchange_step > CYCLES_MAX * self._cycle:
            self._check_exchange()
        # Soon after joining, and then once per cycle.
        if self._steps % self._cycle == 0 or self._steps & (self._steps - 1) == 0:
            self._check_parameters()

    def rested(self) -> None:
        """Note a pause: no exchange was to be expected in it."""
        self._exchange_at = self._clock()

    def _check_exchange(self) -> None:
        seconds = self._clock() - self._exchange_at
        if seconds >= NO_EXCHANGE_S:
            steps = self._steps - self._exchange_step
            self.found(
                "no_exchange",
                f"no fragment was exchanged in the last {steps} steps ({seconds:.0f} s): this "
                "peer trains for itself; see `shoal status`, and events.jsonl in the peer's folder "
                "(run.directory)",
            )

    def _check_parameters(self) -> None:
        if any(hasattr(p, "to_local") for p in self._exchanged.values()):
            return  # FSDP exchanges parameters for whole ones and back
        now = dict(named_parameters(self._model))
        replaced = [name for name, p in self._exchanged.items() if now.get(name) is not p]
        if self._statistics:
            buffers = dict(saved_buffers(self._model))
            replaced += [n for n, b in self._statistics.items() if buffers.get(n) is not b]
        trained = [n for n, p in now.items() if p.requires_grad and n not in self._exchanged]
        added = [name for name in trained if name not in self._joined]
        unfrozen = [name for name in trained if name in self._joined]
        changes = {"replaced or removed": replaced, "added": added, "unfrozen": unfrozen}
        parts = [f"{listed(names, most=4)} {what}" for what, names in changes.items() if names]
        if parts:
            self.found(
                "parameters",
                f"since joining, parameters of the model were changed: {'; '.join(parts)}. The run "
                "exchanges those it was joined with: change the model before peer.join",
            )

    # --- between steps ------------------------------------------------------------------------

    def watch_optimizers(self, stack: ExitStack) -> None:
        """Watch the steps of all optimizers of the program until ``stack`` closes."""
        stack.callback(register_optimizer_step_post_hook(self._some_stepped).remove)

    def _some_stepped(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        given = any(optimizer is known for known in self._optimizers)
        if self._auto and optimizer is self._optimizers[-1]:
            return  # its own hook is the safe point
        if not given and (optimizer in self._harmless or not self._is_of_model(optimizer)):
            return
        self._steps_outside += 1
        limit = OTHERS_STEPS_MAX
        if given or not self._auto:
            limit = max(limit, CYCLES_MAX * self._cycle)
        if self._steps_outside <= limit:
            return
        kind, count = type(optimizer).__name__, self._steps_outside
        if self._auto:
            self.found(
                "optimizer",
                f"the optimizer given to peer.join does not step any more: {kind} has made {count} "
                "steps since. Pass the optimizer that trains the model (of several, the one that "
                "steps last at the end of the list), or use auto=False and run.step()",
            )
        else:
            self.found(
                "optimizer",
                f"{kind} has made {count} steps without run.step(): with auto=False call "
                "run.step(tokens=...) after each optimizer step",
            )

    def watch_rates(self, stack: ExitStack, rates: Rates, run_tokens: Callable[[], int]) -> None:
        """Watch who sets the learning rates, before each step, until ``stack`` closes."""
        joined_at: int | None = None

        def steps(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
            nonlocal joined_at
            if joined_at is None:
                joined_at = run_tokens()
            if rates.follows(optimizer):
                self._check_schedule(optimizer, rates)
            elif joined_at:
                now = max(run_tokens(), joined_at + self._tokens)
                self._check_warm_up(optimizer, now, joined_at)

        for optimizer in self._optimizers:
            stack.callback(optimizer.register_step_pre_hook(steps).remove)

    def _check_schedule(self, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        if (pair := rates.overruled(optimizer)) is not None:
            self.found(
                "rates",
                f"the program sets the learning rate of {type(optimizer).__name__} after "
                f"run.schedule(optimizer) has set it ({pair[1]:.3g} in place of {pair[0]:.3g}), "
                "so the run's schedule has no effect: remove the program's own schedule, or do not "
                "call run.schedule",
            )

    def _check_warm_up(
        self, optimizer: torch.optim.Optimizer, run_tokens: int, joined_at: int
    ) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if not isinstance(rate, float | int) or rate <= 0:
            return
        first, tokens = self._first_rates.setdefault(id(optimizer), (rate, run_tokens))
        if rate / first > RISE * run_tokens / tokens:
            self.found(
                "rates",
                f"the learning rate rises from {first:.3g} to {rate:.3g}, as at the beginning of a "
                f"run, but this run had trained on {joined_at} tokens when this peer joined: the "
                "program's schedule counts the steps of this process. Call "
                "run.schedule(optimizer), or compute the rate from run.global_tokens",
            )

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        if any(id(p) in self._of_model for group in groups for p in group["params"]):
            return True
        self._harmless.add(optimizer)
        return False

    def logged(self) -> None:
        """Note a batch that was reported."""
        self._logs += 1
        if self._logs % max(LOGS_LOOKED_AT_MIN, self._cycle) == 0:
            self._check_updates()
        if self._logs > max(LOGS_MAX, CYCLES_MAX * self._cycle):
            self.found(
                "optimizer",
                f"{self._logs} batches were reported with run.log and no step was seen: "
                + (
                    "call step() of the optimizer given to peer.join"
                    if self._auto
                    else "with auto=False call run.step(tokens=...) after each optimizer step"
                ),
            )

    def left(self) -> None:
        """Note that the block is left."""
        self._check_updates()

    def _check_updates(self) -> None:
        """Find parameters that change although no step was ever seen."""
        if self._steps or all(map(torch.equal, self._sample, self._sampled())):
            return
        step = "call run.step(tokens=...) after each update"
        if self._auto:
            step = f"pass optimizer=None and auto=False to peer.join, and {step}"
        self.found(
            "optimizer",
            "parameters have changed and no step of the optimizer was seen, so nothing is "
            f"exchanged. If the program updates them by hand, {step}; otherwise pass the optimizer "
            "that trains the model",
        )

    def _sampled(self) -> list[torch.Tensor]:
        """Copies of the first values of some parameters."""
        parameters = list(self._exchanged.values())
        some = parameters[:: -(-len(parameters) // SAMPLED_TENSORS)]
        return [local_part(p.detach()).reshape(-1)[:SAMPLED_VALUES].clone() for p in some]

    def check_loss(self, loss: float) -> None:
        """Check a loss that has arrived on the host."""
        if not math.isfinite(loss):
            self.not_finite(f"the loss is {loss}")

    def not_finite(self, what: str) -> None:
        """Note that a value of this peer is not finite."""
        self.found(
            "not_finite",
            f"{what}: nothing of it is offered to the run. run.restore() sets the model to the "
            "run's newest parameters; a lower learning rate or clipped gradients may prevent it",
        )


def warn_unless_entered(optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[], None]:
    """Warn when the last optimizer steps before the returned function was called."""
    if not optimizers:
        return lambda: None

    def stepped(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        hook.remove()
        warnings.warn(
            explained(
                "the run was joined and not entered, so nothing is exchanged: write "
                "`with peer.join(...) as run:` around the loop",
                "loop-mistake",
            ),
            LoopWarning,
            stacklevel=3,
        )

    hook = optimizers[-1].register_step_post_hook(stepped)
    return hook.remove


def restart_broken_moments(
    model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    """Forget moments and running statistics that have values which are not finite."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if not _is_finite(state):
                del optimizer.state[parameter]
    for module in model.modules():
        reset = getattr(module, "reset_running_stats", None)
        if callable(reset) and not _is_finite(dict(module.named_buffers(recurse=False))):
            reset()


def _is_finite(values: Mapping[Any, Any]) -> bool:
    return all(
        bool(value.isfinite().all()) for value in values.values() if isinstance(value, torch.Tensor)
    )


VALUES_MAX = 1 << 16
"""Values of each tensor that are read: a batch of images has hundreds of megabytes."""


class FirstBatch:
    """A digest by which peers notice that their programs train on the same batches.

    It is of what the model is given in its first forward pass of training. A compiled model runs no
    hook, and of several networks that are trained together none may be called as a whole: then it
    is of the random seed, which a program that draws its batches by a generator of its own does not
    use.
    """

    def __init__(self, model: torch.nn.Module, run_id: str) -> None:
        self._run_id = run_id
        self._batch = ""
        self._hook = model.register_forward_pre_hook(self._note_batch, with_kwargs=True)

    def close(self) -> None:
        self._hook.remove()

    @property
    def digest(self) -> str:
        """It is equal at peers that draw the same."""
        # A program that sets no seed has one that the system has drawn.
        return self._batch or self._digest(SEED, f"{torch.initial_seed()}".encode())

    def _note_batch(
        self, model: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        # First, so that a compiler leaves all of this out, and the graph stays whole.
        if torch.compiler.is_compiling() or self._batch or not model.training:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, torch.Tensor)]
        try:
            parts = [_content(tensor) for tensor in tensors]
        except RuntimeError:  # within torch.func, or on no device: it has no values
            return
        if parts:
            self._batch = self._digest(BATCH, *parts)

    def _digest(self, kind: str, *parts: bytes) -> str:
        hasher = blake3(self._run_id.encode())
        for part in parts:
            hasher.update(part)
        return f"{kind} {hasher.hexdigest(length=8)}"


def _content(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().reshape(-1)[:VALUES_MAX].cpu().contiguous()
    return (
        f"{tensor.dtype} {list(tensor.shape)} ".encode()
        + values.view(torch.uint8).numpy().tobytes()
    )

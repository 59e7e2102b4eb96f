"""Mistakes of a training loop, found without reading anything from a device.

Each mistake is told once: as a Python warning (``LoopWarning``) and in the event log. With
``strict=True`` the first three of ``Mistake`` raise ``LoopMistake`` instead.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from peer.errors import LoopMistake, LoopWarning
from peer.model.naming import named_parameters, saved_buffers

Mistake: TypeAlias = Literal["optimizer", "parameters", "no_exchange", "not_finite", "no_tokens"]

STRICT: Collection[Mistake] = ("optimizer", "parameters", "no_exchange")

OTHERS_STEPS_MAX = 16
"""Steps of an optimizer that was not given, without one of those that were."""

LOGS_MAX = 1000
"""Batches that were reported without a step; more accumulation than that is unlikely."""

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
        strict: bool,
        tell: Callable[[Mistake, str], None],
        statistics: Mapping[str, torch.Tensor] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tell(mistake, text)`` is called once for each mistake, before it is raised.

        ``statistics``: the buffers that are exchanged.
        """
        self._model = model
        self._optimizers = optimizers
        self._auto = auto
        self._cycle = cycle
        self._strict = strict
        self._tell = tell
        self._clock = clock
        self._told: set[Mistake] = set()
        self._joined = dict(named_parameters(model))
        self._exchanged = {name: p for name, p in self._joined.items() if p.requires_grad}
        self._statistics = dict(statistics)
        self._of_model = {id(p) for p in self._exchanged.values()}
        self._harmless: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers without a parameter that is exchanged."""
        self._steps = self._steps_outside = self._logs = 0
        self._exchange_step, self._exchange_at = 0, clock()

    def found(self, mistake: Mistake, text: str) -> None:
        """Tell a mistake, if it is the first of its kind."""
        if mistake in self._told:
            return
        self._told.add(mistake)
        self._tell(mistake, text)
        if self._strict and mistake in STRICT:
            raise LoopMistake(mistake, text)
        warnings.warn(text, LoopWarning, stacklevel=4)

    # --- at each step -------------------------------------------------------------------------

    def stepped(self, *, tokens: int, exchanged: bool, alone: bool) -> None:
        """Note a safe point. ``exchanged``: a version was adopted since the last one.

        ``alone``: there is nobody to exchange with.
        """
        self._steps += 1
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
        told = [f"{_listed(names)} {what}" for what, names in changes.items() if names]
        if told:
            self.found(
                "parameters",
                f"since joining, parameters of the model were changed: {'; '.join(told)}. The run "
                "exchanges those it was joined with: change the model before peer.join",
            )

    # --- between steps ------------------------------------------------------------------------

    def watch_optimizers(self, stack: ExitStack) -> None:
        """Watch the steps of all optimizers of the program until ``stack`` closes."""
        stack.callback(register_optimizer_step_post_hook(self._some_stepped).remove)

    def _some_stepped(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        given = any(optimizer is each for each in self._optimizers)
        if self._auto and optimizer is self._optimizers[-1]:
            return  # its own hook is the safe point
        if not given and (optimizer in self._harmless or not self._is_of_model(optimizer)):
            return
        self._steps_outside += 1
        limit = OTHERS_STEPS_MAX if self._auto and not given else CYCLES_MAX * self._cycle
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

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        if any(id(p) in self._of_model for group in groups for p in group["params"]):
            return True
        self._harmless.add(optimizer)
        return False

    def logged(self) -> None:
        """Note a batch that was reported."""
        self._logs += 1
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def warn_unless_entered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Warn when ``optimizer`` steps before the returned function was called."""

    def stepped(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        hook.remove()
        warnings.warn(
            "the run was joined and not entered, so nothing is exchanged: write "
            "`with peer.join(...) as run:` around the loop",
            LoopWarning,
            stacklevel=3,
        )

    hook = optimizer.register_step_post_hook(stepped)
    return hook.remove


# --- what a loop logs -------------------------------------------------------------------------


def token_count(tokens: Any) -> int:
    """The number of tokens that ``run.log`` was given. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(tokens, torch.Tensor):
        if tokens.device.type != "cpu":
            raise TypeError(
                f"tokens is a tensor on {tokens.device}, and to read it would wait for the device; "
                "pass a number of the host, such as batch.numel()"
            )
        if tokens.numel() != 1:
            raise ValueError(f"tokens has the shape {tuple(tokens.shape)}; it is one number")
        tokens = tokens.item()
    elif hasattr(tokens, "item") and not isinstance(tokens, int | float):
        tokens = tokens.item()  # of numpy
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        raise TypeError(f"tokens is {tokens!r}; it is a number, such as batch.numel()")
    if not math.isfinite(tokens) or tokens != int(tokens) or tokens < 0:
        raise ValueError(f"tokens is {tokens}; a batch has none or a whole number of them")
    return int(tokens)


def checked_loss(loss: Any) -> torch.Tensor | float:
    """The loss that ``run.log`` was given. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"loss has the shape {tuple(loss.shape)}; pass one number, such as loss.mean()"
            )
        if loss.is_complex():
            raise TypeError(f"loss is {loss.dtype}; it is a real number")
        return loss
    refused = f"loss is {loss!r}; it is a number or a tensor with one value"
    if isinstance(loss, str):
        raise TypeError(refused)
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(refused) from error


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

"""The learning rate as a function of the run's global tokens.

A peer's own steps do not count, so that late and slow peers use the same rate as all others.
"""

from __future__ import annotations

import math
from typing import Any

from peer.run_file.sections import RunFile


def learning_rate(run: RunFile, global_tokens: int) -> float:
    """The inner optimizer's rate after ``global_tokens`` tokens of the run.

    The rate rises linearly to ``inner.learning_rate`` at ``schedule.warmup_tokens``, falls with
    ``schedule.shape`` to ``schedule.final_fraction`` of it at the end of the decay, and
    stays.
    """
    if global_tokens < 0:
        raise ValueError(f"global_tokens is {global_tokens}; it must be at least 0")
    peak, schedule = run.inner.learning_rate, run.schedule
    if global_tokens < schedule.warmup_tokens:
        # Not exactly 0 at token 0, which would waste the first step.
        return peak * max(global_tokens, 1) / schedule.warmup_tokens
    if run.decay_tokens is None:
        return peak
    span = run.decay_tokens - schedule.warmup_tokens
    done = min(1.0, (global_tokens - schedule.warmup_tokens) / span)
    height = 0.5 * (1 + math.cos(math.pi * done)) if schedule.shape == "cosine" else 1 - done
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * height)


class Rates:
    """Sets the learning rates of optimizers (``torch.optim`` or compatible) by the schedule."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._now = run
        """The run with the amendments of its owner."""
        self._followers: list[tuple[Any, list[float]]] = []

    def follow(self, optimizer: Any, *, peak: float | None = None) -> None:
        """Set this optimizer's rates in every following ``set``.

        Parameter groups keep the proportions of their initial rates. ``peak``: the rate of the
        first group at the peak of the schedule; by default ``inner.learning_rate``.
        """
        scale = 1.0 if peak is None else peak / self._run.inner.learning_rate
        # A torch scheduler that was created earlier has saved the initial rates.
        initial = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
        if not initial[0] > 0:
            raise ValueError(f"the first group's rate is {initial[0]}; it must be above 0")
        self._followers.append((optimizer, [scale * rate / initial[0] for rate in initial]))

    def amend(self, run: RunFile) -> None:
        """Follow the schedule of ``run``, which is this run with other settings, from now on."""
        self._now = run

    def rate(self, global_tokens: int) -> float:
        """The rate of the first group of an optimizer that has the run's own peak."""
        return learning_rate(self._now, global_tokens)

    def set(self, global_tokens: int, *, rate: float | None = None) -> None:
        """Set all rates. ``rate``: as another process of the same learner computed it."""
        rate = self.rate(global_tokens) if rate is None else rate
        for optimizer, scales in self._followers:
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                fill = getattr(group["lr"], "fill_", None)
                if fill is not None:  # a tensor, which optimizers keep a reference to
                    fill(rate * scale)
                else:
                    group["lr"] = rate * scale

"""The learning rate as a function of the run's global tokens.

Not of a peer's own steps: whoever joins late, or is slow, has the rate of the run.
"""

from __future__ import annotations

import math
from typing import Any

from peer.run_file.sections import RunFile


def learning_rate(run: RunFile, global_tokens: int) -> float:
    """The inner optimizer's rate when the run has seen so many tokens.

    Rises linearly to ``inner.learning_rate`` at ``schedule.warmup_tokens``, then falls in the
    schedule's shape to ``schedule.final_fraction`` of it at the end of the decay, and stays.
    """
    if global_tokens < 0:
        raise ValueError(f"global_tokens is {global_tokens}; a run cannot have seen fewer than 0")
    peak, schedule = run.inner.learning_rate, run.schedule
    if global_tokens < schedule.warmup_tokens:
        # The first step must move: a rate of exactly 0 at token 0 would waste it.
        return peak * max(global_tokens, 1) / schedule.warmup_tokens
    if run.decay_tokens is None:
        return peak
    span = run.decay_tokens - schedule.warmup_tokens
    done = min(1.0, (global_tokens - schedule.warmup_tokens) / span)
    height = 0.5 * (1 + math.cos(math.pi * done)) if schedule.shape == "cosine" else 1 - done
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * height)


class Rates:
    """Sets the rates of optimizers (``torch.optim`` or like it) to what the schedule says."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._followers: list[tuple[Any, list[float]]] = []

    def follow(self, optimizer: Any, *, peak: float | None = None) -> None:
        """From now on set its rates. Groups keep the proportions among those they were made with.

        ``peak``: the first group's rate where the schedule is at ``inner.learning_rate``; unset:
        just that. A scheduler of torch's, made before, keeps the rates that the groups were made
        with apart from those that it has set.
        """
        scale = 1.0 if peak is None else peak / self._run.inner.learning_rate
        made = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
        if not made[0] > 0:
            raise ValueError(f"the first group's rate is {made[0]}; others are in proportion to it")
        self._followers.append((optimizer, [scale * rate / made[0] for rate in made]))

    def set(self, global_tokens: int) -> None:
        rate = learning_rate(self._run, global_tokens)
        for optimizer, scales in self._followers:
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                if hasattr(group["lr"], "fill_"):  # a tensor, whose identity optimizers rely on
                    group["lr"].fill_(rate * scale)
                else:
                    group["lr"] = rate * scale

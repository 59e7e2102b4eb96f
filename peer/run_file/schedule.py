"""The learning rate as a function of the run's global tokens.

A peer's own steps do not count, so that late and slow peers use the same rate as all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self.run_now = run
        """The run with the amendments of its owner, whose schedule is followed from now on."""
        self._followers: list[_Follower] = []

    def follow(self, optimizer: Any, *, peak: float | None = None) -> None:
        """Set this optimizer's rates in every following ``set``.

        Parameter groups keep the proportions of their initial rates, also those that are added
        later. ``peak``: the rate of the first group at the peak of the schedule; by default
        ``inner.learning_rate``.
        """
        scale = 1.0 if peak is None else peak / self._run.inner.learning_rate
        first = _initial(optimizer.param_groups[0])
        if not first > 0:
            raise ValueError(f"the first group's rate is {first}; it must be above 0")
        self._followers.append(_Follower(optimizer, scale / first))

    def rate(self, global_tokens: int) -> float:
        """The rate of the first group of an optimizer that has the run's own peak."""
        return learning_rate(self.run_now, global_tokens)

    def set(self, global_tokens: int, *, rate: float | None = None) -> None:
        """Set all rates. ``rate``: as another process of the same learner computed it."""
        rate = self.rate(global_tokens) if rate is None else rate
        for follower in self._followers:
            follower.set_to = [rate * scale for scale in follower.scales]
            for group, scale in zip(follower.groups, follower.scales, strict=True):
                fill = getattr(group["lr"], "fill_", None)
                if fill is not None:  # a tensor, which optimizers keep a reference to
                    fill(rate * scale)
                else:
                    group["lr"] = rate * scale

    def follows(self, optimizer: Any) -> bool:
        """Say whether this optimizer's rates are set here."""
        return any(follower.optimizer is optimizer for follower in self._followers)

    def overruled(self, optimizer: Any) -> tuple[float, float] | None:
        """A rate that was set last, and the one that a group of the optimizer has instead.

        A rate in a tensor is not looked at: the tensor may be on a device.
        """
        for follower in self._followers:
            if follower.optimizer is optimizer:
                for group, rate in zip(follower.groups, follower.set_to, strict=False):
                    if isinstance(group["lr"], float | int) and group["lr"] != rate:
                        return rate, group["lr"]
        return None


class _Follower:
    """An optimizer whose rates are set, with the factor of each of its groups."""

    def __init__(self, optimizer: Any, by_initial: float) -> None:
        """``by_initial``: the factor of a group, by its initial rate."""
        self.optimizer = optimizer
        self.set_to: list[float] = []
        """The rates that were set last."""
        self._by_initial = by_initial
        self._scales: list[float] = []
        self._note_groups()

    @property
    def groups(self) -> Sequence[Any]:
        groups: Sequence[Any] = self.optimizer.param_groups
        return groups

    @property
    def scales(self) -> Sequence[float]:
        self._note_groups()
        return self._scales

    def _note_groups(self) -> None:
        # A group that was added since has the rate that the program has given it.
        for group in self.groups[len(self._scales) :]:
            self._scales.append(self._by_initial * _initial(group))


def _initial(group: Mapping[str, Any]) -> float:
    """The rate that a group was made with, which a torch scheduler has saved."""
    return float(group.get("initial_lr", group["lr"]))

"""A simulated learner: it trains, and offers and adopts fragments.

The rules of adoption are those of ``peer.agent.slots``, on a plain array instead of memory shared
with a trainer. Training is lazy: steps are only counted while time passes, and computed all at once
before the parameters are read or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.round.inputs import Offer
from peer.lab.simulate.problems.problem import LocalTraining, Places

AdoptionRule = Literal["carry", "replace", "blend"]


class Trainee:
    """All parameters of one learner, and the number of steps that it has made."""

    def __init__(
        self,
        training: LocalTraining,
        places: Places,
        *,
        step_tokens: int,
        rate: Callable[[], float],
    ) -> None:
        """``rate``: current share of the peak learning rate."""
        self.training = training
        self.places = places
        self.step_tokens = step_tokens
        self.step = 0
        """Number of steps made so far, whether or not they are computed yet."""
        self.loss: float | None = None
        self._rate = rate
        self._computed = 0

    @property
    def values(self) -> Float32s:
        """The parameters as of ``step``."""
        behind = self.step - self._computed
        if behind:
            self._computed = self.step
            self.loss = self.training.train(behind, rate=self._rate())
        return self.training.values


class Seat:
    """One fragment of a learner. A ``FragmentLearner``."""

    def __init__(
        self,
        trainee: Trainee,
        state: FragmentState,
        *,
        rule: AdoptionRule,
        alpha: float,
        missed_kept: float = 1.0,
    ) -> None:
        """The learner's parameters are ``state.theta`` already. ``missed_kept``: share of its own
        displacement that it keeps when a version does not contain it; a live peer keeps all.
        """
        self.base = state.theta
        self.snapshot: Float32s | None = None
        self.merged_step = trainee.step
        self.discarded_steps = 0
        self._trainee = trainee
        self._fragment = state.fragment
        self._rule = rule
        self._alpha = np.float32(alpha)
        self._missed_kept = np.float32(missed_kept)
        self._base_version = state.version
        self._base_lineage = state.lineage
        self.snapshot_step = 0

    @property
    def pending_steps(self) -> int:
        return self._trainee.step - self.merged_step

    def offer(self) -> Offer:
        trainee = self._trainee
        self.snapshot = trainee.places.read(self._fragment, trainee.values)
        self.snapshot_step = trainee.step
        return Offer(
            mark=trainee.step,
            steps=self.pending_steps,
            tokens=self.pending_steps * trainee.step_tokens,
            base_version=self._base_version,
            base_lineage=self._base_lineage,
            batch_tokens_max=trainee.step_tokens,
        )

    def release(self) -> None:
        self.snapshot = None

    def adopt(self, state: FragmentState, contained: int | None) -> None:
        snapshot = self.snapshot
        if contained is None and self._missed_kept == 0:
            self._replace(state.theta)
        elif contained is None:
            if self._missed_kept != 1:
                own = self._trainee.places.read(self._fragment, self._trainee.values) - self.base
                self._set(self.base + self._missed_kept * own)
            self._add(state.theta - self.base)
        elif snapshot is not None and contained == self.snapshot_step:
            self.merged_step = contained
            if self._rule == "carry":
                self._add(state.theta - snapshot)
            elif self._rule == "replace":
                self._replace(state.theta)
            else:
                now = self._trainee.places.read(self._fragment, self._trainee.values)
                self._set(self._alpha * now + (1 - self._alpha) * state.theta)
        else:
            # The version contains own work that cannot be separated any more: take theta.
            self.merged_step = contained
            self._replace(state.theta)
        self._on(state)

    def rebase(self, state: FragmentState, ancestor: Float32s | None, merged_step: int) -> None:
        self._add(state.theta - (self.base if ancestor is None else ancestor))
        if ancestor is not None:
            self.merged_step = min(self.merged_step, merged_step)
        else:
            self.merged_step = max(self.merged_step, merged_step)
        self._on(state)

    def let_go(self, theta: Float32s) -> None:
        self._replace(theta)
        self.snapshot = None

    def _on(self, state: FragmentState) -> None:
        self.base = state.theta
        self._base_version, self._base_lineage = state.version, state.lineage
        self.snapshot = None

    def _add(self, difference: Float32s) -> None:
        trainee = self._trainee
        trainee.places.add(self._fragment, trainee.values, difference)

    def _set(self, values: Float32s) -> None:
        trainee = self._trainee
        trainee.places.write(self._fragment, trainee.values, values)

    def _replace(self, theta: Float32s) -> None:
        """Overwrite the parameters, and with them the steps since ``merged_step``."""
        self._set(theta)
        self.discarded_steps += self._trainee.step - self.merged_step
        self.merged_step = self._trainee.step

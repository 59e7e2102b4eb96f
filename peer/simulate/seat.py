"""The parameters of a simulated learner: it trains, and offers and adopts fragments.

Adoption follows ``averaging.history.adoption``, as it does for a live trainer. Training is lazy:
steps are only counted while time passes, and computed all at once before the parameters are read or
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from averaging.history.adoption import Adopted, Origin, OwnWork, Parting
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.round.interface.inputs import Offer
from peer.simulate.problems.problem import LocalTraining, Places


@dataclass(slots=True, eq=False)
class Trainee:
    """All parameters of one learner, and the number of steps that it has made."""

    training: LocalTraining
    places: Places
    step_tokens: int
    rate: Callable[[], float]
    """Current share of the peak learning rate."""
    step: int = 0
    """Number of steps made so far, whether or not they are computed yet."""
    loss: float | None = None
    _computed: int = 0

    @property
    def values(self) -> Float32s:
        """The parameters as of ``step``."""
        behind = self.step - self._computed
        if behind:
            self._computed = self.step
            self.loss = self.training.train(behind, rate=self.rate())
        return self.training.values


class Seat:
    """One fragment of a learner."""

    def __init__(
        self,
        trainee: Trainee,
        state: FragmentState,
        *,
        missed_kept: float = 1.0,
        upload: Callable[[Float32s, Float32s], Float32s] | None = None,
    ) -> None:
        """The learner's parameters are ``state.theta`` already. ``missed_kept``: share of its own
        displacement that it keeps when a version does not contain it; a live peer keeps all.
        ``upload(base, values)``: the values that a member that poisons uploads instead of its own.
        """
        self.own = OwnWork(state, step=trainee.step)
        self._trainee = trainee
        self._fragment = state.fragment
        self._missed_kept = np.float32(missed_kept)
        self._upload = upload
        self._made_up: Float32s | None = None

    @property
    def base(self) -> Float32s:
        return self.own.base

    @property
    def snapshot(self) -> Float32s | None:
        own = self.own.snapshot
        return own if own is None or self._upload is None else self._made_up

    @property
    def pending_steps(self) -> int:
        return self._trainee.step - self.own.merged_step

    def offer(self) -> Offer:
        trainee, own = self._trainee, self.own
        values = trainee.places.read(self._fragment, trainee.values)
        own.offer(values, step=trainee.step)
        if self._upload is not None:
            self._made_up = self._upload(own.base, values)
        return Offer(
            mark=trainee.step,
            steps=self.pending_steps,
            tokens=self.pending_steps * trainee.step_tokens,
            base_version=own.base_version,
            base_lineage=own.base_lineage,
            batch_tokens_max=trainee.step_tokens,
        )

    def release(self) -> None:
        self.own.release()

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        trainee = self._trainee
        if contained is None and self._missed_kept == 0:
            self.discard(state)
            return
        if contained is None and self._missed_kept != 1:
            moved = trainee.places.read(self._fragment, trainee.values) - self.base
            self._set(self.base + self._missed_kept * moved)
        self._carry_out(self.own.adopt(state, contained, step=trainee.step))

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        rebased = self.own.rebase(state, parting, step=self._trainee.step)
        if rebased is None:
            return None
        self._carry_out(rebased.adopted)
        return rebased.again_steps * self._trainee.step_tokens

    def discard(self, state: FragmentState) -> None:
        self._carry_out(self.own.discard(state, step=self._trainee.step))

    def _carry_out(self, adopted: Adopted) -> None:
        trainee, change = self._trainee, adopted.change
        if change.origin is not Origin.NONE:
            trainee.places.add(self._fragment, trainee.values, adopted.given)
        else:
            self._set(adopted.given)

    def _set(self, values: Float32s) -> None:
        trainee = self._trainee
        trainee.places.write(self._fragment, trainee.values, values)

"""Spot checks in a simulated swarm: a learner's judgement of others' contributions.

Losses are real: those of the model with the checker's own states, on the batch of one of the
author's steps, without and with what the author has uploaded. Measuring takes no virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from averaging.guard.door import Losses, OtherData, Trial
from averaging.history.readings import Reading
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from peer.simulate.problems.problem import ChecksOthers, Places

AUTHOR, STEP = "author", "step"
DIGEST = bytes(32)
"""All read the same."""


class Judge:
    """The judge of one life of one peer (``averaging.guard.spot_checking.Judge``)."""

    same_data = True

    def __init__(
        self,
        problem: ChecksOthers,
        places: Places,
        *,
        number: int,
        seed: int,
        steps_before: int,
        states: Callable[[], Sequence[FragmentState | None]],
        judges: bool,
    ) -> None:
        """``steps_before``: steps of the earlier lives, of whose data this one's goes on."""
        self.judges = judges
        self._problem = problem
        self._places = places
        self._number = number
        self._seed = seed
        self._steps_before = steps_before
        self._states = states

    def __repr__(self) -> str:
        return f"Judge({self._number})"

    async def reading_of(self, step: int) -> Reading | None:
        place = {AUTHOR: self._number, STEP: self._steps_before + step - 1}
        return Reading(place, 1, DIGEST)

    async def judge(self, trial: Trial) -> Losses | OtherData | None:
        states, place = self._states(), trial.reading.position
        if place.keys() != {AUTHOR, STEP}:
            return OtherData()
        if None in states:
            return None

        def loss(instead: Float32s) -> float:
            thetas = [state.theta for state in states if state is not None]
            thetas[trial.fragment] = instead
            values = self._places.join(thetas)
            return self._problem.loss_of_step(values, place[AUTHOR], self._seed, place[STEP])

        return Losses(loss(trial.before), loss(trial.after))

"""The learner as averaging sees it: it has parameters, and must never be made to wait.

The agent implements ``LearnerPort`` over memory shared with the trainer, tests
and the simulator over numpy arrays. Averaging never touches the parameters; it
asks for a snapshot and hands back a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from averaging.history.adoption import Parting
from averaging.history.lineage import Lineage
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the learner. All counts are of this incarnation."""

    step: int
    tokens: int
    step_time_s: float
    """Median over the last steps."""
    batch_tokens_max: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A learner's offer of one fragment: the values it started from, and those it has."""

    base: Float32s
    """Theta as the learner really holds it, after the cast to its own dtype."""
    values: Float32s
    """Averaging may change them: a version that has this contribution was made relative to what
    they are then (``averaging.numbers.arithmetic.Moved.feedback``)."""
    base_version: int
    base_lineage: Lineage
    mark: int
    """The learner's own step at which the values were taken."""
    steps: int
    tokens: int
    """Tokens since the last merged mark."""


class LearnerPort(Protocol):
    def progress(self) -> Progress:
        """Cheap; never waits."""
        ...

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        """The fragment at the learner's next safe point; ``None`` when there is none in time.

        The views stay valid until ``adopt`` or ``release`` of this fragment.
        """
        ...

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        """Take in a new theta. ``contained``: own work up to this mark is in it (``None``: no new).

        As a rule that is the outstanding snapshot's mark. After some failures it is that of one
        which was released: then the own displacement cannot be told apart any more, the
        parameters become theta, and the steps since that mark are lost.
        """
        ...

    def passed(self, fragment: int, state: FragmentState) -> None:
        """A replay, which ``adopt`` follows, goes through ``state``.

        Its arrays change with the next step: copy them to keep them.
        """
        ...

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        """The arrays of a state are in other memory, with the same values: hold on to these only.

        Until nobody has the old ones any more, there is no room for those of the next round.
        """
        ...

    def misses_base(self, fragment: int) -> bool:
        """True if the base of the parameters can be found only by a replay, through ``passed``."""
        ...

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        """Take the other side of a fork: the work since the parting stays whole, and all work since
        ``merged_mark`` is offered again.

        Returns how many tokens that were merged on the side given up are pending again; or ``None``
        when they cannot be told apart: nothing was done then, and ``adopt`` is called.
        """
        ...

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        """Give up pending work that is too old to be offered: go on from ``state.theta``."""
        ...

    def release(self, fragment: int) -> None:
        """The outstanding snapshot will not be used, and there is nothing new to adopt."""
        ...

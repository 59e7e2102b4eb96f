"""Taking in a new version of a fragment at a learner, and the fate of the learner's pending work.

A learner keeps training while a round runs. When a new theta arrives, the steps that are not yet
merged must survive in its parameters exactly once, whether or not the version contains the part
that was offered::

    the offered snapshot is in it      parameters += theta' - snapshot
    none of the pending work is in it  parameters += theta' - base
    another side of a fork is taken    parameters += theta' - parting.theta
    neither can be told apart          parameters  = theta', and the pending steps are lost
    statistics                         values      = theta', and the accounts as for parameters

Statistics (running means and variances) are not moved by a difference: a variance that the learner
has brought from 1 to 0.01 meanwhile would become negative. They forget within some steps in any
case, so the own movement since the offer is no loss.

``change_for`` makes that choice. ``OwnWork`` also does the bookkeeping for a learner whose
parameters are a numpy array of the same process. A trainer in another process keeps its books in
shared memory (``peer.agent.slots``) and uses ``change_for`` alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s


@dataclass(frozen=True, slots=True, eq=False)
class Parting:
    """The last version that two sides of a fork share, seen by a peer that changes sides."""

    version: int
    theta: Float32s
    """Theta of that version, up to rounding."""
    merged_mark: int
    """Own step up to which the side that is taken contains this peer's work; 0: none of it."""
    given_up_mark: int
    """The same for the side that is given up."""


class Origin(enum.Enum):
    """The vector that is subtracted from the new theta; the difference is added to parameters."""

    SNAPSHOT = "snapshot"
    BASE = "base"
    PARTING = "parting"
    NONE = "none"
    """No difference can be formed: the parameters become theta itself."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of the parameters, and the own step up to which the work is merged afterwards."""

    origin: Origin
    mark: int | None = None
    """``None``: unchanged. Where parameters are overwritten, the step of the overwriting."""
    sets: bool = False
    """The values become theta itself; the origin is only that of the accounts."""

    @property
    def overwrites(self) -> bool:
        """True if the pending work is lost."""
        return self.origin is Origin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The facts about a learner's fragment that decide how it takes in the next version."""

    base_version: int | None
    """The version that the parameters grew from; ``None``: there was none yet."""
    knows_base: bool
    """True if theta of that version is at hand."""
    snapshot_mark: int | None
    """Own step of the offered snapshot, if its values are still at hand."""
    begun_mark: int = 0
    """Own work up to this step is not in the parameters' displacement: it must not come back."""


def change_for(
    held: Held,
    *,
    contained: int | None,
    parting: Parting | None = None,
    gives_up: bool = False,
    statistics: bool = False,
) -> Change:
    """Choose how a learner takes in a version.

    ``contained``: own work up to this step is newly in it; ``parting``: it is another side of a
    fork; ``gives_up``: pending work is to be overwritten.
    """
    if statistics:
        change = change_for(held, contained=contained, parting=parting, gives_up=gives_up)
        return replace(change, sets=change.origin is not Origin.NONE)
    if contained is not None and contained == held.snapshot_mark and not gives_up:
        return Change(Origin.SNAPSHOT, contained)
    if contained is None and held.knows_base and not gives_up:
        if parting is not None and (held.base_version or 0) > parting.version:
            return Change(Origin.PARTING, max(parting.merged_mark, held.begun_mark))
        return Change(Origin.BASE)
    return Change(Origin.NONE)


class OwnWork:
    """One learner's fragment: the base of its parameters, the offered snapshot, the marks.

    The methods return what is to be done to the parameters and never touch them. ``step`` is the
    learner's own step counter at that moment.
    """

    def __init__(self, state: FragmentState, *, step: int, statistics: bool = False) -> None:
        """The parameters are ``state.theta`` now."""
        self._statistics = statistics
        self.base = state.theta
        self.base_version, self.base_lineage = state.version, state.lineage
        self.merged_step = step
        """Own steps up to this one are merged or lost, and not to be offered."""
        self.discarded_steps = 0
        self.begun_version, self._begun_step = state.version, step
        """The own displacement is known since this version: it was overwritten there, or another
        side of a fork was taken without its parting. It has no work up to this step."""
        self.snapshot: Float32s | None = None
        """The offered values, until they are adopted or released."""
        self.snapshot_step = 0

    def offer(self, values: Float32s, *, step: int) -> None:
        self.snapshot, self.snapshot_step = values, step

    def release(self) -> None:
        self.snapshot = None

    def adopt(self, state: FragmentState, contained: int | None, *, step: int) -> Adopted:
        change = self._change(contained=contained)
        if change.overwrites and contained is not None:
            self.merged_step = max(self.merged_step, contained)  # merged, so not lost
        return self._take(state, change, None, step)

    def rebase(self, state: FragmentState, parting: Parting, *, step: int) -> Rebased | None:
        """Take another side of a fork. ``None``: the own displacement since the parting is not
        known, and nothing was done."""
        if parting.version < self.begun_version:
            return None
        change = self._change(contained=None, parting=parting)
        again = max(0, parting.given_up_mark - max(parting.merged_mark, self._begun_step))
        return Rebased(self._take(state, change, parting, step), again)

    def discard(self, state: FragmentState, *, step: int) -> Adopted:
        """Give up the pending work: the parameters become theta."""
        change = self._change(contained=None, gives_up=True)
        return self._take(state, change, None, step)

    def _change(
        self, *, contained: int | None, parting: Parting | None = None, gives_up: bool = False
    ) -> Change:
        held = Held(
            base_version=self.base_version,
            knows_base=True,
            snapshot_mark=None if self.snapshot is None else self.snapshot_step,
            begun_mark=self._begun_step,
        )
        return change_for(
            held,
            contained=contained,
            parting=parting,
            gives_up=gives_up,
            statistics=self._statistics,
        )

    def _take(
        self, state: FragmentState, change: Change, parting: Parting | None, step: int
    ) -> Adopted:
        given = state.theta
        if change.sets:
            pass
        elif change.origin is Origin.SNAPSHOT:
            assert self.snapshot is not None
            given = state.theta - self.snapshot
        elif change.origin is Origin.BASE:
            given = state.theta - self.base
        elif change.origin is Origin.PARTING:
            assert parting is not None
            given = state.theta - parting.theta
        if change.overwrites:
            self.discarded_steps += step - self.merged_step
            self.merged_step = step
        elif change.mark is not None:
            self.merged_step = change.mark
        begins = parting is None and not state.follows(self.base_version, self.base_lineage)
        if change.overwrites or begins:
            self.begun_version, self._begun_step = state.version, self.merged_step
        self.base = state.theta
        self.base_version, self.base_lineage = state.version, state.lineage
        self.snapshot = None
        return Adopted(change, given)


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """A change of the parameters: add ``given``, or set it."""

    change: Change
    given: Float32s

    def apply(self, values: Float32s) -> None:
        """Change ``values`` in place."""
        if self.change.origin is not Origin.NONE and not self.change.sets:
            values += self.given
        else:
            values[:] = self.given


@dataclass(frozen=True, slots=True, eq=False)
class Rebased:
    adopted: Adopted
    again_steps: int
    """Own steps that were merged on the side that was given up, and are pending again."""

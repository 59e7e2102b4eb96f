"""A learner takes in a version: nothing of its own work is lost or counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.history.adoption import (
    Change,
    Held,
    Origin,
    OwnWork,
    Parting,
    change_for,
)
from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.arrays import Float32s

HELD = Held(base_version=3, knows_base=True, snapshot_mark=8)
PARTING = Parting(2, np.zeros(2, np.float32), merged_mark=4, given_up_mark=7)


def vector(value: float) -> Float32s:
    return np.full(2, value, np.float32)


def state(version: int, value: float, *, shared: int = 99) -> FragmentState:
    """A version of one side of a fork; of the other one if it is after the last ``shared`` one."""
    lineages = [bytes([n if n <= shared else 100 + n]) * 32 for n in range(version + 1)]
    chain = Chain([Link(n, lineage, 0) for n, lineage in enumerate(lineages)])
    return FragmentState(0, version, lineages[-1], chain, vector(value), vector(0.0), MergedMap())


@pytest.mark.parametrize(
    ("statistics", "contained", "expected"),
    [
        (False, 8, Change(Origin.SNAPSHOT, 8)),
        (False, 7, Change(Origin.NONE)),
        (False, None, Change(Origin.BASE)),
        (True, 8, Change(Origin.SNAPSHOT, 8, sets=True)),
        (True, None, Change(Origin.BASE, sets=True)),
        (True, 7, Change(Origin.NONE)),
    ],
)
def test_the_change_of_parameters_follows_from_the_contained_step(
    statistics: bool, contained: int | None, expected: Change
) -> None:
    assert change_for(HELD, contained=contained, statistics=statistics) == expected


def test_without_a_base_or_when_work_is_given_up_theta_overwrites_it() -> None:
    lost = Held(base_version=3, knows_base=False, snapshot_mark=8)
    assert change_for(lost, contained=None).overwrites
    assert change_for(HELD, contained=None, gives_up=True).overwrites
    assert change_for(HELD, contained=8, gives_up=True).overwrites


def test_a_parting_counts_only_for_parameters_that_grew_from_a_later_version() -> None:
    change = change_for(HELD, contained=None, parting=PARTING)
    assert change == Change(Origin.PARTING, 4)
    early = Held(base_version=2, knows_base=True, snapshot_mark=None)
    assert change_for(early, contained=None, parting=PARTING) == Change(Origin.BASE)


def test_steps_after_the_snapshot_stay_in_the_parameters_once() -> None:
    own, values = OwnWork(state(0, 1.0), step=0), vector(1.0)
    values += 2.0
    own.offer(values.copy(), step=5)
    values += 0.5
    own.adopt(state(1, 10.0), 5, step=6).apply(values)
    assert values.tolist() == [10.5, 10.5]
    assert (own.merged_step, own.discarded_steps, own.base_version) == (5, 0, 1)
    own.adopt(state(2, 20.0), None, step=7).apply(values)
    assert values.tolist() == [20.5, 20.5]
    assert own.merged_step == 5


def test_statistics_become_theta_and_never_cross_zero_on_the_way() -> None:
    own, values = OwnWork(state(0, 1.0), step=0, statistics=True), vector(1.0)
    own.offer(vector(0.8), step=2)
    values[:] = 0.01  # a variance that fell fast
    adopted = own.adopt(state(1, 0.5), 2, step=9)
    adopted.apply(values)
    assert values.tolist() == [0.5, 0.5]
    assert (own.discarded_steps, own.merged_step) == (0, 2), "the steps since are pending"
    values[:] = 0.01
    own.adopt(state(2, 0.02), None, step=12).apply(values)
    assert np.array_equal(values, vector(0.02))
    assert (own.merged_step, own.discarded_steps) == (2, 0)


def test_work_that_cannot_be_told_apart_is_lost_and_counted() -> None:
    own, values = OwnWork(state(0, 1.0), step=0), vector(4.0)
    adopted = own.adopt(state(1, 10.0), 5, step=9)
    adopted.apply(values)
    assert values.tolist() == [10.0, 10.0]
    assert (own.merged_step, own.discarded_steps) == (9, 4)


def test_another_side_of_a_fork_leaves_what_was_moved_since_the_parting_whole() -> None:
    own, values = OwnWork(state(0, 0.0), step=0), vector(0.0)
    own.offer(values.copy(), step=4)
    own.adopt(state(3, 3.0), 4, step=4).apply(values)
    values += 1.0
    parting = Parting(2, vector(2.0), merged_mark=2, given_up_mark=4)
    rebased = own.rebase(state(4, 50.0, shared=2), parting, step=6)
    assert rebased is not None and rebased.again_steps == 2
    rebased.adopted.apply(values)
    assert values.tolist() == [52.0, 52.0]
    assert own.merged_step == 2


def test_work_that_was_overwritten_at_the_parting_itself_is_not_offered_again() -> None:
    """The steps of that work were counted as lost, and would be offered without their
    displacement."""
    own, values = OwnWork(state(0, 0.0), step=0), vector(9.0)
    own.discard(state(2, 2.0), step=30).apply(values)
    own.adopt(state(3, 3.0), None, step=31).apply(values)
    parting = Parting(2, vector(2.0), merged_mark=4, given_up_mark=4)
    rebased = own.rebase(state(4, 50.0, shared=2), parting, step=32)
    assert rebased is not None and rebased.again_steps == 0
    assert own.merged_step == 30
    older = Parting(1, vector(1.0), merged_mark=4, given_up_mark=4)
    assert own.rebase(state(5, 60.0), older, step=33) is None


def test_work_of_a_side_that_was_left_without_its_parting_is_not_offered_again() -> None:
    """It was written off, and it is not in the displacement from the side that was taken. A second
    fork made it pending as well (storm 60279)."""
    own, values = OwnWork(state(0, 0.0), step=0), vector(0.0)
    own.offer(values.copy(), step=4)
    own.adopt(state(1, 1.0), 4, step=4).apply(values)
    values += 1.0
    own.adopt(state(2, 20.0, shared=0), None, step=5).apply(values)
    own.offer(values.copy(), step=6)
    own.adopt(state(3, 30.0, shared=0), 6, step=6).apply(values)
    assert own.rebase(state(4, 50.0), Parting(0, vector(0.0), 0, 6), step=7) is None
    parting = Parting(2, vector(20.0), merged_mark=0, given_up_mark=6)
    rebased = own.rebase(state(4, 50.0, shared=0), parting, step=7)
    assert rebased is not None and rebased.again_steps == 2
    rebased.adopted.apply(values)
    assert values.tolist() == [60.0, 60.0]
    assert own.merged_step == 4

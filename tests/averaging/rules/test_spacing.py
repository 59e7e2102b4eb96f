"""Fragments that were due in one moment are spread over a cycle again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from averaging.rules.due import DuePolicy, DueTime
from averaging.rules.spacing import Spacing


def closings(
    fragments: int, cycle: int, *, begin: list[int], gathers: tuple[int, int] = (0, 0), cycles: int
) -> list[int]:
    """Last closings of fragments that each close once in a cycle, and late by a random number of
    steps. ``begin``: their first closings."""
    rng, spacing, last = random.Random(1), Spacing(), [0] * fragments
    due = sorted((step, fragment) for fragment, step in enumerate(begin))
    while due[0][0] < cycles * cycle:
        step, fragment = due.pop(0)
        last[fragment] = step
        shift = spacing.closed(fragment, step, fragments=fragments, interval=cycle)
        due = sorted([*due, (step + cycle + shift + rng.randint(*gathers), fragment)])
    return last


def gaps(last: list[int], cycle: int) -> list[int]:
    at = sorted(step % cycle for step in last)
    return [after - before for before, after in pairwise([*at, at[0] + cycle])]


@pytest.mark.parametrize(("fragments", "cycle"), [(2, 24), (4, 24), (4, 120), (24, 120)])
def test_fragments_that_closed_in_one_moment_are_spread_evenly_within_ten_cycles(
    fragments: int, cycle: int
) -> None:
    last = closings(fragments, cycle, begin=[100] * fragments, cycles=10 + 100 // cycle)
    even = cycle // fragments
    assert all(abs(gap - even) <= 2 for gap in gaps(last, cycle)), gaps(last, cycle)


def test_the_places_are_those_of_the_first_due_times() -> None:
    policy = DuePolicy(cycle_steps=24, fragments=4)
    begin = [DueTime(policy, fragment=index, step=0).due_step for index in range(4)]
    last = closings(4, 24, begin=begin, cycles=6)
    assert [step % 24 for step in last] == [step % 24 for step in begin]


def test_rosters_that_close_late_at_random_leave_the_fragments_spread() -> None:
    last = closings(4, 120, begin=[1] * 4, gathers=(0, 10), cycles=40)
    assert min(gaps(last, 130)) > 10


def test_a_fragment_moves_by_an_eighth_of_a_cycle_at_most() -> None:
    spacing = Spacing()
    assert spacing.closed(0, 240, fragments=4, interval=24) == 0
    shifts = [spacing.closed(2, 240 + late, fragments=4, interval=24) for late in range(-12, 13, 2)]
    assert min(shifts) == -3 and max(shifts) == 3
    assert spacing.closed(2, 252, fragments=4, interval=24) == 0, "half a cycle after fragment 0"


def test_nothing_moves_before_fragment_0_closes_or_in_a_cycle_of_a_few_steps() -> None:
    spacing = Spacing()
    assert spacing.closed(1, 7, fragments=4, interval=24) == 0
    assert spacing.closed(0, 8, fragments=4, interval=3) == 0
    assert spacing.closed(1, 8, fragments=4, interval=3) == 0

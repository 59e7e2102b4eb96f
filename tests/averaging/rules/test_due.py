"""Due times, counted in own steps."""

import random
from itertools import pairwise

import pytest

from averaging.rules.due import DuePolicy, DueTime, Spacing

POLICY = DuePolicy(cycle_steps=24, fragments=4)


def test_first_due_times_are_staggered_over_a_cycle() -> None:
    due = [DueTime(POLICY, fragment=p, step=100).due_step for p in range(4)]

    assert due == [124, 118, 112, 106]


def test_more_fragments_than_steps_are_all_due_within_a_cycle() -> None:
    policy = DuePolicy(cycle_steps=3, fragments=24)

    due = {DueTime(policy, fragment=p, step=0).due_step for p in range(24)}

    assert due == {1, 2, 3}


def test_asks_one_step_ahead_because_the_snapshot_comes_at_the_next_safe_point() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    assert not time.is_due(22)
    assert time.is_due(23)


def test_a_closing_re_anchors_every_peer_that_hears_of_it() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    time.closed(10, 24)

    assert time.due_step == 34


def test_slow_peers_take_fewer_steps_between_merges() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    assert time.interval(own_s=1.0, median_s=1.0) == 24
    assert time.interval(own_s=2.0, median_s=1.0) == 12
    assert time.interval(own_s=0.5, median_s=1.0) == 48
    assert time.interval(own_s=1000.0, median_s=1.0) == 1
    assert time.interval(own_s=None, median_s=1.0) == 24


def test_a_flat_cycle_ignores_speed() -> None:
    policy = DuePolicy(cycle_steps=24, fragments=1, scale_by_speed=False)

    assert DueTime(policy, fragment=0, step=0).interval(own_s=4.0, median_s=1.0) == 24


def test_at_the_end_a_called_peer_joins_with_any_work() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.eager = True

    assert time.answers_call(101, 24)
    assert not time.answers_call(100, 24)


def test_a_called_peer_joins_with_half_a_cycle_of_steps() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.took_part(1, 100)

    assert not time.answers_call(111, 24)
    assert time.answers_call(112, 24)
    assert not time.answers_call(100, 1), "a call without a single new step is not answered"


def test_a_called_peer_that_was_in_no_round_yet_joins_with_an_eighth_of_a_cycle() -> None:
    """One that was killed and came back made half a cycle of steps before it was in a round."""
    time = DueTime(POLICY, fragment=0, step=100)

    assert not time.answers_call(102, 24)
    assert time.answers_call(103, 24)


def test_a_peer_that_is_called_for_one_that_leaves_joins_with_an_eighth_of_its_steps() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.took_part(1, 100)

    assert not time.answers_call(102, 24, hurried=True)
    assert time.answers_call(103, 24, hurried=True)
    assert not time.answers_call(100, 1, hurried=True)
    time.every = 4
    assert not time.answers_call(111, 24, hurried=True), "its line carries every fourth version"
    assert time.answers_call(112, 24, hurried=True)


@pytest.mark.parametrize("every", [1, 4])
def test_one_that_says_for_ever_that_it_leaves_has_the_others_exchange_no_more(every: int) -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = every
    cycle = every * 24
    for version in range(8):
        time.took_part(version, (version - 7) * cycle)  # one in each cycle, as usual

    rounds: list[int] = []
    for step in range(1, 100 * cycle):
        if time.answers_call(step, 24, hurried=True):
            time.took_part(8 + len(rounds), step)
            rounds.append(step)
    assert rounds[:4] == [every * step for step in (3, 6, 9, 12)], "four that leave in one cycle"
    assert len(rounds) <= 2 * 100 + 4, "two in a cycle, as whoever calls can have"


def test_a_called_peer_that_missed_the_last_closings_joins_at_once() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.took_part(version=4, step=20)
    time.closed(20, 24)
    time.closed(44, 24)  # without it

    assert time.answers_call(46, 24), "it has 26 steps for a round"
    time.took_part(version=6, step=46)
    assert not time.answers_call(57, 24)
    assert time.answers_call(58, 24)


def test_a_failed_attempt_is_retried_a_quarter_cycle_later() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    time.attempt_failed(30, 24)

    assert time.due_step == 36


def test_a_peer_that_takes_part_in_every_third_version_sits_two_out() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    assert not time.sits_out(7, 30, 24), "it has not been in any yet"
    time.took_part(7, 30)

    assert [time.sits_out(version, 60, 24) for version in (8, 9, 10, 11)] == [
        True,
        True,
        False,
        False,
    ]


def test_where_no_roster_closes_without_it_a_peer_takes_part_after_as_many_cycles() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    time.took_part(7, 30)

    assert time.sits_out(8, 30 + 71, 24)
    assert not time.sits_out(8, 30 + 72, 24)


def test_a_peer_that_sits_versions_out_comes_half_a_cycle_earlier_when_it_is_called() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 2
    time.took_part(7, 30)

    assert time.sits_out(8, 30 + 35, 24, called=True)
    assert not time.sits_out(8, 30 + 36, 24, called=True)
    assert time.sits_out(8, 30 + 47, 24)


def test_at_the_end_nobody_sits_a_version_out() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    time.took_part(7, 30)
    time.eager = True

    assert not time.sits_out(8, 31, 24)


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
